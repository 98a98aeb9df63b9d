"""A hung engine process is killed, and every client that waits for it gets an error."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from serving import PATIENCE

from tonnage.planner.deployment import Deployment
from tonnage.planner.planning.build import make_plan
from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines import watchdog
from tonnage.server.engines.errors import EngineDead
from tonnage.server.engines.hf import HFEngine
from tonnage.server.engines.request import GenerationRequest, SamplingParams

# What the limits stand at is a matter of the busiest machine; that they are counted and kept to is tested.
CHECKS = 3


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> HFEngine:
    ensure_demo()
    monkeypatch.setattr(watchdog, "CHECK_SECONDS", 0.2)
    settings = Deployment(
        dtype="float32",  # no kernels to compile
        kv_cache_memory_bytes=128 << 20,
        max_model_len=512,
        max_num_seqs=8,
    )
    return HFEngine(make_plan("demo", settings))


async def test_watchdog_kills_an_engine_that_hangs_while_generating(
    engine: HFEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(PATIENCE):
        await engine.start()
    assert engine.pid is not None
    process = psutil.Process(engine.pid)
    params = SamplingParams(max_tokens=400, temperature=0.0)
    streams = [engine.generate(GenerationRequest(str(n), (5, 6, 7), params)) for n in range(3)]
    for stream in streams:
        await anext(stream)
    process.suspend()
    assert engine.ready
    monkeypatch.setattr(watchdog, "HANG_CHECKS", CHECKS)

    async def told(stream) -> bool:
        with pytest.raises(EngineDead, match="used no processor time"):
            async for _ in stream:
                pass
        return True

    async with asyncio.timeout(PATIENCE):
        assert all(await asyncio.gather(*map(told, streams)))
    assert not engine.ready
    with pytest.raises(EngineDead, match="used no processor time"):
        await anext(engine.generate(GenerationRequest("late", (5, 6, 7), params)))
    await engine.stop()
    assert not process.is_running()


async def test_watchdog_kills_an_engine_that_hangs_while_loading(
    engine: HFEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "HANG_CHECKS_LOADING", CHECKS)
    start = asyncio.create_task(engine.start())
    while engine.pid is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    os.kill(engine.pid, signal.SIGSTOP)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(EngineDead, match=r"used no processor time for .* during the load"):
            await start
    assert engine._process is not None
    assert engine._process.returncode == -signal.SIGKILL
    assert not engine.ready


def test_watchdog_distinguishes_a_busy_engine_process_from_a_stopped_one() -> None:
    """Also by its children: an engine that loads waits for the process that compiles."""
    busy = "while True: pass"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent])
    try:
        deadline = time.monotonic() + PATIENCE
        while not (children := psutil.Process(process.pid).children()):
            assert time.monotonic() < deadline
        watched = watchdog.Watchdog(process.pid)
        moves = 0
        while moves < 3:  # each a tick that only the child can have had
            moves += watched.check(0) == 0
            assert time.monotonic() < deadline
        for each in (children[0], psutil.Process(process.pid)):
            each.suspend()
            while each.status() != psutil.STATUS_STOPPED:
                assert time.monotonic() < deadline
        watched.reset()
        assert watched.check(0) == 0
        assert [watched.check(0) for _ in range(CHECKS)] == [1, 2, 3]
        assert watched.check(1) == 0  # a message came
    finally:
        for each in children:
            each.kill()
        process.kill()
        process.wait()
