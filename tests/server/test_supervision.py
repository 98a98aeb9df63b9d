"""Tests of engine supervision: requests fail at once when the engine dies, and a new engine is started."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import httpx
import psutil
import pytest
from engines import Loading
from invariants import check_invariants
from serving import PATIENCE

from tonnage.server.engines.capacity import Capacity
from tonnage.server.engines.chunk import Chunk
from tonnage.server.engines.errors import EngineDead, QueueFull
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.engines.heap import settle_heap
from tonnage.server.engines.request import GenerationRequest, SamplingParams
from tonnage.server.engines.supervisor import SupervisedEngine


async def test_counters_keep_increasing_after_an_engine_restart(run_server, small_plan) -> None:
    class Engine(Loading):
        """An engine without capacity before it has loaded, as the hf and vLLM engines."""

        def capacity(self) -> Capacity:
            if not self._ready:
                raise QueueFull("the engine is not ready")
            return super().capacity()

    made: list[Engine] = []

    def make() -> Engine:
        made.append(Engine(small_plan(), token_rate=100))
        return made[-1]

    supervised = SupervisedEngine(make)
    made[0].loaded.set()
    async with run_server(made[0], served=supervised) as server:
        assert (await server.complete(max_tokens=3, ignore_eos=True)).status_code == 200
        running = [asyncio.create_task(server.complete(max_tokens=500)) for _ in range(5)]
        await server.until(lambda: made[0].stats().running == 5)
        before = supervised.stats()
        made[0].die()
        assert {(await task).status_code for task in running} == {503}
        await server.until(lambda: not supervised.stats().ready)
        assert (await server.http.get("/ready")).status_code == 503
        refused = await server.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
        await server.until(lambda: len(made) == 2)  # the next one loads
        refused = await server.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
        assert (await server.http.get("/v1/models")).status_code == 200
        made[1].loaded.set()
        await server.until(lambda: supervised.stats().ready)
        assert (await server.http.get("/ready")).status_code == 200
        assert (await server.complete(max_tokens=3)).status_code == 200
        after = supervised.stats()
        assert (after.restarts, len(made)) == (1, 2)
        assert after.prompt_tokens > before.prompt_tokens
        assert after.generation_tokens > before.generation_tokens
        assert server.state.accounts.outcomes["error"] == 7
        check_invariants(made[1].manager)
        # What the dead engine still held is gone with it; the fixture looks at the one it was given.
        for entry in list(made[0]._live):
            made[0]._forget(entry)


async def test_server_exits_when_engine_keeps_dying(small_plan) -> None:
    class Stillborn(FakeEngine):
        async def start(self) -> None:
            if made > 1:
                raise EngineDead("no luck")
            await super().start()

    made = 0

    def make() -> FakeEngine:
        nonlocal made
        made += 1
        return Stillborn(small_plan())

    told: list[Exception] = []
    engine = SupervisedEngine(make, max_restarts=3, back_off=(0.01,), on_give_up=told.append)
    await engine.start()
    engine.engine.die()
    async with asyncio.timeout(PATIENCE):
        while not told:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert "after 3 restarts" in str(told[0])
    assert made == 4
    assert not engine.stats().ready
    await engine.stop()


async def test_resources_of_a_dead_engine_are_released_after_restart(small_plan) -> None:
    """Objects in reference cycles are released too; vLLM's client is in one, and its sockets stayed open."""

    class Itself:
        def __init__(self) -> None:
            self.itself = self

    engine = SupervisedEngine(lambda: FakeEngine(small_plan()), back_off=(0.01,))
    await engine.start()
    held = weakref.ref(kept := Itself())
    vars(engine.engine)["kept"] = kept
    del kept
    settle_heap()  # as tonnage serve does when the model is loaded
    engine.engine.die()
    async with asyncio.timeout(PATIENCE):
        while not engine.stats().ready or not engine.stats().restarts:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert held() is None
    await engine.stop()


async def exhaust(stream: AsyncIterator[Chunk]) -> None:
    async for _ in stream:
        pass


async def test_request_timeout_applies_while_queued_and_running(run_server, small_plan) -> None:
    engine = FakeEngine(small_plan(256, max_num_seqs=1), token_rate=20)
    async with run_server(engine, request_timeout=2) as server:
        # It never got its turn, which another request has, one without a limit: later it may.
        other = GenerationRequest("other", (5, 6, 7), SamplingParams(max_tokens=2000))
        runs = asyncio.create_task(exhaust(engine.generate(other)))
        await server.until(lambda: engine.stats().running == 1)
        waited = await server.complete(max_tokens=1000)
        assert (waited.status_code, waited.json()["error"]["code"]) == (503, "queue_timeout")
        assert "retry-after" in waited.headers
        runs.cancel()
        await server.until(lambda: engine.stats().running == 0)
        # It had begun: again would take as long.
        begun = await server.complete(max_tokens=1000)
        assert (begun.status_code, begun.json()["error"]["code"]) == (408, "request_timeout")
        assert begun.headers["x-should-retry"] == "false"
        streamed = await server.complete(max_tokens=1000, stream=True)
        assert '"request_timeout"' in streamed.text
        assert streamed.text.endswith("data: [DONE]\n\n")
        outcomes = server.state.accounts.outcomes
        assert (outcomes["aborted"], outcomes["rejected"]) == (2, 1)


async def test_idle_stream_gets_keep_alive_comments(run_server, small_plan) -> None:
    engine = FakeEngine(small_plan(256, max_num_seqs=1), token_rate=4)
    async with run_server(engine, sse_keep_alive=0.05) as server:
        answer = await server.complete(max_tokens=3, stream=True, ignore_eos=True)
        assert answer.text.count(": keep-alive\n\n") >= 3
        assert answer.text.count('"finish_reason":"length"') == 1
        stream = await server.openai.completions.create(
            model="demo", prompt="a", max_tokens=3, stream=True, extra_body={"ignore_eos": True}
        )
        assert len([chunk async for chunk in stream]) == 3


@contextmanager
def serving(*flags: str) -> Iterator[tuple[str, psutil.Process]]:
    """Run ``tonnage serve demo``; yield its URL and process, and stop it at the end."""
    command = [sys.executable, "-m", "tonnage.server.cli", "serve", "demo", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = next(line.split()[-1] for line in process.stdout if line.startswith("ready on "))
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)


async def test_hf_engine_killed_during_20_streams_is_restarted(streams_until_killed, overload) -> None:
    with serving("--kv-cache-memory-bytes", "512MiB", "--max-num-seqs", "8") as (url, process):
        (engine,) = process.children()
        await streams_until_killed(url, engine, 20)
        assert process.is_running()
        outcomes = await overload(url)
        assert outcomes["aborted"] > 0
        assert outcomes["rejected"] > 0


@pytest.mark.parametrize("grace", ["240", "0"], ids=["drained", "cut off"])
async def test_sigterm_lets_running_requests_finish(grace: str) -> None:
    flags = ("--backend", "fake", "--drain-seconds", grace)
    with serving(*flags) as (url, process):
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE, base_url=url) as http:
            body = {"model": "demo", "prompt": "a", "max_tokens": 6000, "ignore_eos": True, "stream": True}
            body["n"] = 1 if grace != "0" else 32  # 32 x 6,000 tokens take the fake engine some seconds
            async with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                process.terminate()
                if grace != "0":
                    async with asyncio.timeout(PATIENCE):
                        while "server_stopping" not in (await http.get("/ready")).text:
                            pass
                    refused = await http.post("/v1/completions", json=body)
                    assert refused.json()["error"]["code"] == "server_stopping"
                rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert ("server_stopping" in rest[-2]) == (grace == "0")
        process.wait(timeout=PATIENCE)
