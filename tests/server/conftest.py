"""Real parts for the API tests: the demo tokenizer, a Plan, a fake engine behind a real uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI

from tonnage.planner.layout import KVGroup, KVLayout
from tonnage.planner.plan import Deployment, KVCachePlan, ModelInfo, Plan, RankPlan
from tonnage.server.app import create_app
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.settings import Settings
from tonnage.server.state import ServerState
from tonnage.server.text import Tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder() -> Path:
    return Path("/tmp/api_tok")


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(tokenizer_folder)


def small_plan(blocks: int = 256, *, max_model_len: int = 2048, max_num_seqs: int = 64) -> Plan:
    layout = KVLayout((KVGroup("full", tuple(range(30))),), 16, 30, 3, 64, "bfloat16", 2)
    rank = RankPlan(269030016, blocks * layout.bytes_per_block, 10**7, 0, 3 * 10**8, 8 * 2**30)
    return Plan(
        "p" * 12,
        0,
        ModelInfo("demo", "/nowhere", "LlamaForCausalLM", 134515008, "GQA", "adapter", 8192, 49152, "bfloat16"),
        Deployment(
            max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=512, block_size=16
        ),
        (rank,),
        0,
        KVCachePlan(
            layout, blocks, blocks - 1, (blocks - 1) * 16, 1.0, -(-max_model_len // 16) * layout.bytes_per_block
        ),
        True,
    )


@dataclass
class Running:
    """A server on a loopback port, in the event loop of the test."""

    url: str
    app: FastAPI
    engine: FakeEngine
    state: ServerState
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI

    async def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Wait for ``condition``; fails after ``seconds``."""
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "demo", "prompt": "hello", **body})


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):  # the test runner keeps its own
        yield


@contextlib.asynccontextmanager
async def run_server(
    engine: FakeEngine, tokenizer: Tokenizer, *, ready: bool = True, **settings: Any
) -> AsyncIterator[Running]:
    """A real uvicorn around ``engine``; on the way out nothing may be left in flight or in the pool."""
    app = create_app(Settings(model="demo", **settings), engine, tokenizer)
    server = _Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as http,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as sdk,
    ):
        running = Running(url, app, engine, app.state.tonnage, http, sdk)
        if ready:
            await running.until(lambda: running.state.started)
        try:
            yield running
        finally:
            server.should_exit = True
            await task
    running.state.accounts.check()
    assert running.state.accounts.in_flight == 0
    engine.manager.check_invariants()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pool.used, stats.pool.promised) == (0, 0, 0, 0)


@pytest.fixture
async def server(tokenizer: Tokenizer) -> AsyncIterator[Running]:
    """A ready server with a pool of 255 usable blocks."""
    async with run_server(FakeEngine(small_plan()), tokenizer) as running:
        yield running
