"""Restarts with an engine factory that raises and with an engine that never finishes loading.

A factory raises when the model's files are deleted, for example. The server retries both, or gives up with an
error message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from serving import PATIENCE

from tonnage.planner.deployment import Deployment
from tonnage.planner.planning.build import make_plan
from tonnage.planner.plans import Plan
from tonnage.server.engines.errors import EngineDead
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.engines.request import GenerationRequest, SamplingParams
from tonnage.server.engines.supervisor import SupervisedEngine


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan("demo", Deployment(kv_cache_memory_bytes=64 << 20, max_model_len=512, max_num_seqs=8))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def generate(engine: SupervisedEngine) -> None:
    params = SamplingParams(max_tokens=3)
    async for _ in engine.generate(GenerationRequest("one", (1, 2, 3), params)):
        pass


async def test_engine_restart_is_retried_after_an_exception_while_creating_the_engine(plan: Plan) -> None:
    made = 0

    def make() -> FakeEngine:
        nonlocal made
        made += 1
        if made in (2, 3):
            raise FileNotFoundError("config.json")
        return FakeEngine(plan)

    engine = SupervisedEngine(make, back_off=(0.05,))
    await engine.start()
    await generate(engine)
    before = engine.stats()
    assert before.generation_tokens == 3
    engine.engine.die()  # type: ignore[attr-defined]
    seen: set[int] = set()

    def again() -> bool:
        seen.add(engine.stats().generation_tokens)
        return engine.ready

    await until(again)
    assert made == 4
    assert engine.stats().restarts == 3
    # A counter of Prometheus neither falls back nor counts an engine twice, also between two of them.
    assert seen == {3}
    await generate(engine)
    assert engine.stats().generation_tokens == 6
    await engine.stop()


async def test_server_exits_with_the_reason_if_engine_creation_always_fails(plan: Plan) -> None:
    made = 0

    def make() -> FakeEngine:
        nonlocal made
        made += 1
        if made > 1:
            raise RuntimeError("no luck")
        return FakeEngine(plan)

    told: list[Exception] = []
    engine = SupervisedEngine(make, max_restarts=2, back_off=(0.01,), on_give_up=told.append)
    await engine.start()
    engine.engine.die()  # type: ignore[attr-defined]
    await until(lambda: bool(told))
    assert "after 2 restarts" in str(told[0])
    assert made == 3
    assert not engine.ready
    await engine.stop()


async def test_engine_that_exceeds_the_loading_timeout_is_killed(plan: Plan) -> None:
    made: list[FakeEngine] = []

    def make() -> FakeEngine:
        made.append(FakeEngine(plan, load_seconds=3600.0 if len(made) == 1 else 0.0))
        return made[-1]

    engine = SupervisedEngine(make, ready_timeout=2.0, back_off=(0.01,))
    await engine.start()
    engine.engine.die()  # type: ignore[attr-defined]
    await until(lambda: engine.ready and len(made) == 3)
    assert engine.stats().restarts == 2
    assert not made[1].stats().ready
    await generate(engine)
    await engine.stop()


async def test_server_exits_naming_the_timeout_flag_if_its_first_load_never_ends(plan: Plan) -> None:
    engine = SupervisedEngine(lambda: FakeEngine(plan, load_seconds=3600.0), ready_timeout=0.1)
    with pytest.raises(EngineDead, match=r"did not load within 0\.1 s.*--engine-ready-timeout"):
        await engine.start()
    assert not engine.ready
    await engine.stop()
