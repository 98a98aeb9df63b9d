"""``tonnage verify``: load a model, run a full batch, and compare the plan with the measured memory."""

from __future__ import annotations

import asyncio
import json
import random
import sys

from tonnage.planner.errors import TonnageError
from tonnage.planner.screen import Screen
from tonnage.server.app import create_app
from tonnage.server.commands.comparison import ComparisonRow, print_table, process_row
from tonnage.server.commands.launch import (
    ProgressDisplay,
    make_engine,
    plan_for_loading,
    select_backend,
    settings_from,
)
from tonnage.server.commands.stopping import stoppable
from tonnage.server.engines.base import Engine
from tonnage.server.engines.errors import EngineDead
from tonnage.server.engines.request import GenerationRequest, SamplingParams
from tonnage.server.parsers import verify as parser
from tonnage.server.settings import Settings

WITHIN, OUTSIDE = 0, 1


def run(argv: list[str]) -> int:
    """Compare the plan with a loaded model; return 0 when every difference is within its bound, else 1.

    Raises:
        TonnageError: the input is invalid.
    """
    arguments = parser().parse_args(argv)
    settings = settings_from(arguments)
    with stoppable():
        settings, source = select_backend(settings, sys.stderr if arguments.json else sys.stdout)
        plan = plan_for_loading(settings, source, sys.stderr if arguments.json else sys.stdout)
        engine = make_engine(settings, plan)
        # The app is created but listens on no port. It is needed, because plan and measurement include the
        # memory of the API process.
        api = create_app(settings, engine)
        try:
            rows = asyncio.run(_measure(api.state.tonnage.engine, settings))
        except EngineDead as error:
            Screen(sys.stderr).print(f"tonnage: {error}")
            return OUTSIDE
    within = all(row.within for row in rows)
    if arguments.json:
        result = {
            "model": plan.model.id,
            "plan_id": plan.plan_id,
            "engine": plan.deployment.engine,
            "within": within,
            "rows": [row.to_dict() for row in rows],
        }
        print(json.dumps(result, indent=2))
    else:
        print()
        print_table(rows)
    return WITHIN if within else OUTSIDE


async def _measure(engine: Engine, settings: Settings) -> list[ComparisonRow]:
    start = asyncio.create_task(engine.start())
    try:
        await _with_progress(f"loading {settings.model}", start)
        await _with_progress("running a full batch", asyncio.create_task(_full_batch(engine)))
        return rows(engine)
    finally:
        try:
            await engine.stop()
        finally:
            start.cancel()
            # Exceptions are ignored, because starting the engine raises one when Ctrl-C has cancelled it.
            await asyncio.gather(start, return_exceptions=True)


async def _with_progress(what: str, task: asyncio.Task[None]) -> None:
    """Wait for `task`, and meanwhile show a progress display with the text `what`."""
    with ProgressDisplay(what) as tick:
        while not task.done():
            tick()
            await asyncio.wait([task], timeout=0.2)
        await task


async def _full_batch(engine: Engine) -> None:
    """Run as many sequences as the batch can hold, with prompts that together exceed one step's token budget.

    The plan includes the activations of a step with a full token budget, so the measured peak must include
    such a step.
    """
    deployment = engine.plan.deployment
    sequences = deployment.max_num_seqs or 1
    longest = (deployment.max_model_len or engine.plan.model.max_model_len) - _NEW_TOKENS
    pool = engine.plan.kv_cache.tokens // sequences - engine.plan.kv_cache.layout.block_size - _NEW_TOKENS
    budget = 2 * (deployment.max_num_batched_tokens or 0) // sequences
    if not engine.plan.kv_cache.layout.groups:
        pool = longest  # an encoder model needs no KV blocks, so the pool does not limit its prompts
    length = max(1, min(longest, pool, max(16, budget)))
    draw = random.Random(0)
    params = SamplingParams(max_tokens=_NEW_TOKENS, temperature=0)

    async def one(number: int) -> None:
        prompt = tuple(draw.randrange(engine.plan.model.vocab_size) for _ in range(length))
        async for chunk in engine.generate(GenerationRequest(f"verify-{number}", prompt, params)):
            if chunk.finish_reason == "error":
                raise TonnageError(f"the engine failed on a request of the full batch: {chunk.error}")

    await asyncio.gather(*(one(number) for number in range(sequences)))


_NEW_TOKENS = 4


def rows(engine: Engine) -> list[ComparisonRow]:
    """Return the rows of the comparison table: planned bytes and currently measured bytes of each component."""
    plan, memory, capacity = engine.plan, engine.stats().memory, engine.capacity()
    layout = plan.kv_cache.layout
    found = [
        ComparisonRow("weights", plan.rank.weights_bytes, memory.weights),
        ComparisonRow("KV pool", plan.rank.kv_pool_bytes, memory.kv_pool),
        process_row(plan.deployment.engine, plan.deployment.device, plan.rank.used_bytes, memory.process_peak),
    ]
    # Bytes of one token slot in the pool that the engine allocated; the value does not come from the plan.
    slots = capacity.num_blocks * capacity.block_size
    per_slot = None if memory.kv_pool is None else memory.kv_pool // slots
    name = "KV bytes per slot" if layout.bytes_per_token is None else "KV bytes per token"
    return [*found, ComparisonRow(name, layout.bytes_per_block // layout.block_size, per_slot)]
