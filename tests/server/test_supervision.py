"""An engine that dies: everybody is told at once, and another engine takes its place in the same server."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest

from tonnage.server.engines.base import EngineDead
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.supervisor import SupervisedEngine

TOLD_WITHIN = 2.0  # seconds after the kill


async def test_a_new_engine_takes_over_and_counters_go_on(run_server, small_plan) -> None:
    made: list[FakeEngine] = []

    def make() -> FakeEngine:
        made.append(FakeEngine(small_plan(), token_rate=100, load_seconds=0.3 if made else 0.0))
        return made[-1]

    supervised = SupervisedEngine(make)
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
        await server.until(lambda: supervised.stats().ready)
        assert (await server.http.get("/ready")).status_code == 200
        assert (await server.complete(max_tokens=3)).status_code == 200
        after = supervised.stats()
        assert (after.restarts, len(made)) == (1, 2)
        assert after.prompt_tokens > before.prompt_tokens
        assert after.generation_tokens > before.generation_tokens
        assert server.state.accounts.outcomes["error"] == 6
        made[1].manager.check_invariants()
        # What the dead engine still held is gone with it; the fixture looks at the one it was given.
        for entry in list(made[0]._live):
            made[0]._forget(entry)


async def test_an_engine_that_keeps_dying_ends_the_server(small_plan) -> None:
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
    async with asyncio.timeout(10):
        while not told:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert "after 3 restarts" in str(told[0])
    assert made == 4
    assert not engine.stats().ready
    await engine.stop()


async def test_a_request_has_its_time(run_server, small_plan) -> None:
    engine = FakeEngine(small_plan(256, max_num_seqs=1), token_rate=20)
    async with run_server(engine, request_timeout=0.4) as server:
        both = [asyncio.create_task(server.complete(max_tokens=1000, stream=s)) for s in (False, False)]
        first, second = sorted([await task for task in both], key=lambda answer: answer.status_code)
        # One had begun: again would take as long. The other never got its turn: later it may.
        assert (first.status_code, first.json()["error"]["code"]) == (408, "request_timeout")
        assert first.headers["x-should-retry"] == "false"
        assert (second.status_code, second.json()["error"]["code"]) == (503, "queue_timeout")
        assert "retry-after" in second.headers
        streamed = await server.complete(max_tokens=1000, stream=True)
        assert '"request_timeout"' in streamed.text
        assert streamed.text.endswith("data: [DONE]\n\n")
        outcomes = server.state.accounts.outcomes
        assert (outcomes["aborted"], outcomes["rejected"]) == (2, 1)


async def test_a_silent_stream_is_kept_alive(run_server, small_plan) -> None:
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
    """A real ``tonnage serve demo``: its address and process, stopped on the way out."""
    command = [sys.executable, "-m", "tonnage.server.cli", "serve", "demo", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = next(line.split()[-1] for line in process.stdout if line.startswith("ready on "))
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.communicate(timeout=60)


async def streams_until_killed(url: str, victim: psutil.Process, count: int) -> None:
    """``count`` streams, ``victim`` killed in their middle: every client gets an error in time."""
    begun = asyncio.Semaphore(0)

    async def client(http: httpx.AsyncClient, number: int) -> float:
        body: dict[str, Any] = {
            "model": "demo", "prompt": f"Story {number}:", "max_tokens": 400, "stream": True,
            "ignore_eos": True,
        }  # fmt: skip
        told = False
        async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
            assert response.status_code in (200, 503)
            async for line in response.aiter_lines():
                begun.release()
                if line.startswith("data: {"):
                    told = "error" in json.loads(line.removeprefix("data: "))
                elif line.startswith("{"):
                    told = json.loads(line)["error"]["code"] == "engine_dead"
        begun.release()
        assert told
        return time.monotonic()

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(trust_env=False, timeout=120, limits=limits) as http:
        tasks = [asyncio.create_task(client(http, number)) for number in range(count)]
        await begun.acquire()
        await asyncio.sleep(0.5)
        killed = time.monotonic()
        victim.kill()
        assert max(await asyncio.gather(*tasks)) - killed < TOLD_WITHIN

        async def ready() -> bool:
            return (await http.get(f"{url}/ready")).status_code == 200

        await until(ready, 120)
        answer = await http.post(
            f"{url}/v1/completions", json={"model": "demo", "prompt": "hi", "max_tokens": 2}
        )
        assert answer.status_code == 200
        await counts_agree(http, url)


async def until(condition: Callable[[], Awaitable[bool]], seconds: float) -> None:
    """Ask a server of another process until it says yes."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def counts_agree(http: httpx.AsyncClient, url: str) -> dict[str, float]:
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


async def overload(url: str, *, clients: int = 24, rounds: int = 3) -> dict[str, float]:
    """Good, broken, never-fitting and leaving clients at once; then everything must add up."""
    draw = random.Random(1)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(trust_env=False, timeout=120, limits=limits, base_url=url) as http:

        async def client(number: int) -> None:
            for _ in range(rounds):
                kind = draw.choice(["good", "good", "bad", "never", "leaves"])
                body: dict[str, Any] = {
                    "model": "demo", "prompt": f"{number}", "max_tokens": 16, "stream": draw.random() < 0.5,
                }  # fmt: skip
                if kind == "bad":
                    body["temperature"] = 9
                if kind == "never":
                    body["max_tokens"] = 10**6
                if kind == "leaves":
                    body["max_tokens"] = 1000
                try:
                    response = await http.post(
                        "/v1/completions", json=body, timeout=0.3 if kind == "leaves" else 120
                    )
                except httpx.TimeoutException:
                    assert kind == "leaves"
                    continue
                assert response.status_code in {"bad": (400,), "never": (400,)}.get(kind, (200, 503))

        await asyncio.gather(*(client(number) for number in range(clients)))

        async def idle() -> bool:
            blocks = (await http.get("/memory")).json()["pool"]["blocks"]
            return (await http.get("/load")).json()["server_load"] == 0 and blocks["promised"] == 0

        await until(idle, 60)
        return await counts_agree(http, url)


async def test_hf_is_killed_among_20_streams_and_comes_back() -> None:
    with serving("--kv-cache-memory-bytes", "512MiB", "--max-num-seqs", "8") as (url, process):
        (engine,) = process.children()
        await streams_until_killed(url, engine, 20)
        assert process.is_running()
        outcomes = await overload(url)
        assert outcomes["aborted"] > 0
        assert outcomes["rejected"] > 0


@pytest.mark.parametrize("grace", ["10", "0"], ids=["drained", "cut off"])
async def test_sigterm_drains(grace: str) -> None:
    flags = ("--backend", "fake", "--drain-seconds", grace)
    with serving(*flags) as (url, process):
        async with httpx.AsyncClient(trust_env=False, timeout=30, base_url=url) as http:
            body = {"model": "demo", "prompt": "a", "max_tokens": 6000, "ignore_eos": True, "stream": True}
            body["n"] = 1 if grace != "0" else 32  # 32 x 6,000 tokens take the fake engine some seconds
            async with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                process.terminate()
                if grace != "0":

                    async def stopping() -> bool:
                        answer = await http.get("/ready")
                        return answer.status_code == 503 and "server_stopping" in answer.text

                    await until(stopping, 5)
                    refused = await http.post("/v1/completions", json=body)
                    assert refused.json()["error"]["code"] == "server_stopping"
                rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert ("server_stopping" in rest[-2]) == (grace == "0")
        process.wait(timeout=20)
