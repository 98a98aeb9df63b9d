"""The Hugging Face engine against transformers itself, on the real demo model (float32, greedy).

The tokens of transformers are stored in tests/data/oracles; `make test-oracles` generates them again.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from oracle import Oracle
from serving import PATIENCE

from tonnage.planner.deployment import Deployment
from tonnage.planner.planning.build import make_plan
from tonnage.planner.plans import Plan
from tonnage.server.demo.model import GGUF_SHA256, ensure_demo
from tonnage.server.engines.chunk import Chunk
from tonnage.server.engines.errors import EngineDead, NeverFits, QueueFull
from tonnage.server.engines.hf import HFEngine
from tonnage.server.engines.hf.messages import Ready
from tonnage.server.engines.request import GenerationRequest, SamplingParams

TOKENS = 12
ORACLE = Oracle("generate", "torch", "transformers")
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def demo() -> Path:
    return ensure_demo()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Return 64 prompts of 1 to 330 tokens; every third begins with the same 96 tokens."""
    draw = random.Random(7)
    shared = [draw.randrange(3, 49000) for _ in range(96)]
    made = []
    for number in range(64):
        length = 1 + number * number // 13
        own = [draw.randrange(3, 49000) for _ in range(length)]
        made.append((shared + own) if number % 3 == 0 else own)
    return made


@pytest.fixture(scope="module")
def expected(demo: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens that transformers.generate adds to each prompt."""
    asked = [GGUF_SHA256, TOKENS, prompts]
    answers: list[list[int]] = ORACLE.says("64 prompts", asked, lambda: ask_transformers(demo, prompts))
    return answers


def ask_transformers(demo: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Generate with transformers, one prompt at a time; return the new tokens of each prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                do_sample=False,
                pad_token_id=2,
                eos_token_id=2,
            )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def plan_for(**changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_memory_bytes": 256 << 20,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        **changes,
    }
    return make_plan("demo", Deployment(**settings))


@asynccontextmanager
async def running(plan: Plan) -> AsyncIterator[HFEngine]:
    engine = HFEngine(plan)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[HFEngine]:
    """Yield a running engine with default flags, shared by several tests."""
    async with running(plan_for()) as made:
        yield made


async def ask(engine: HFEngine, name: str, prompt: list[int], n: int = 1, **params: Any) -> list[list[int]]:
    """Generate with the engine; return the tokens of each of the ``n`` sequences."""
    settings: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.0, "stop_token_ids": (2,), **params}
    said: list[list[int]] = [[] for _ in range(n)]
    request = GenerationRequest(name, tuple(prompt), SamplingParams(**settings), n=n)
    async for chunk in engine.generate(request):
        assert chunk.error is None, chunk.error
        said[chunk.index] += chunk.token_ids
    return said


async def ask_all(engine: HFEngine, prompts: list[list[int]]) -> list[list[int]]:
    answers = await asyncio.gather(*(ask(engine, str(i), prompt) for i, prompt in enumerate(prompts)))
    return [answer[0] for answer in answers]


def without_eos(tokens: list[int]) -> list[int]:
    return tokens[:-1] if tokens and tokens[-1] == 2 else tokens


def decisions(engine: HFEngine) -> dict[tuple[str, str], int]:
    return {(outcome, str(reason)): count for outcome, reason, count in engine.stats().admissions}


async def all_free(engine: HFEngine) -> None:
    """Wait until no request is left, then every block must be free or reclaimable."""
    for _ in range(int(PATIENCE / 0.02)):
        stats = engine.stats()
        if not stats.running and not stats.waiting and not stats.pool.used:
            break
        await asyncio.sleep(0.02)
    assert (stats.running, stats.waiting, stats.pool.used, stats.pool.reserved) == (0, 0, 0, 0)
    assert stats.pool.cached + stats.pool.free == stats.pool.usable


def most(count: int) -> int | None:
    """Return how many of the shortest prompts to run: ``count``, or None (all) in ``make test-oracles``."""
    return None if "TONNAGE_ORACLES" in os.environ else count


@pytest.mark.oracle
async def test_tokens_of_concurrent_prompts_with_a_shared_prefix_equal_transformers_generate(
    engine: HFEngine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    prompts, expected = prompts[: most(32)], expected[: most(32)]
    await ask(engine, "first", prompts[0])  # leaves the shared prefix in the cache
    got = await ask_all(engine, prompts)
    stats = engine.stats()
    assert [without_eos(tokens) for tokens in expected] == got
    assert stats.prefix_hit_tokens >= 96 * 10
    assert stats.generation_tokens >= sum(map(len, got))
    await all_free(engine)


@pytest.mark.oracle
async def test_tokens_are_unchanged_when_requests_wait_for_blocks(
    prompts: list[list[int]], expected: list[list[int]]
) -> None:
    prompts, expected = prompts[: most(24)], expected[: most(24)]
    longest = max(map(len, prompts)) + TOKENS
    blocks = -(-longest // 16) + 8
    plan = plan_for(max_num_batched_tokens=32, kv_cache_memory_bytes=None)
    per_block = plan.kv_cache.layout.bytes_per_block
    plan = plan_for(
        max_num_batched_tokens=32, kv_cache_memory_bytes=(blocks + 1) * per_block, max_model_len=longest
    )
    assert plan.kv_cache.usable_blocks == blocks
    async with running(plan) as engine:
        got = await ask_all(engine, prompts)
        assert [without_eos(tokens) for tokens in expected] == got
        assert decisions(engine)[("wait", "blocks")] >= 10
        await all_free(engine)


async def test_n_outputs_share_prompt_blocks_and_depend_only_on_the_seed(
    engine: HFEngine, prompts: list[list[int]]
) -> None:
    prompt = prompts[20]
    alone = await ask(engine, "alone", prompt, n=4, temperature=1.0, top_p=0.95, top_k=50, seed=11)
    beside = await asyncio.gather(
        ask(engine, "again", prompt, n=4, temperature=1.0, top_p=0.95, top_k=50, seed=11),
        *(ask(engine, f"other-{i}", prompts[i], temperature=1.0, seed=i) for i in range(8)),
    )
    other = await ask(engine, "other", prompt, n=4, temperature=1.0, top_p=0.95, top_k=50, seed=12)
    assert beside[0] == alone
    assert other != alone
    assert len({tuple(tokens) for tokens in alone}) > 1
    greedy = await ask(engine, "greedy", prompt, n=3)
    assert greedy[0] == greedy[1] == greedy[2]
    await all_free(engine)


async def test_cancelled_streams_free_all_kv_blocks(engine: HFEngine, prompts: list[list[int]]) -> None:
    async def leave(number: int) -> None:
        params = SamplingParams(max_tokens=400, temperature=0.0)
        request = GenerationRequest(str(number), tuple(prompts[number % 25]), params, n=1 + number % 3)
        stream = engine.generate(request)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]

    await asyncio.gather(*(leave(number) for number in range(50)))
    await all_free(engine)
    assert (await ask(engine, "after", prompts[5]))[0]


async def test_request_that_never_fits_is_rejected_at_submit(engine: HFEngine) -> None:
    with pytest.raises(NeverFits, match="max_model_len is 1024"):
        await ask(engine, "long", [5] * 1020, max_tokens=100)
    assert decisions(engine)[("never", "max_model_len")] == 1
    assert engine.stats().waiting == 0


async def exhaust(stream: AsyncIterator[Chunk]) -> None:
    async for _ in stream:
        pass


async def test_killed_engine_process_raises_engine_dead_without_hanging(engine: HFEngine) -> None:
    """This must stay the last test that uses the shared engine, because it kills its process."""
    stream = engine.generate(GenerationRequest("x", (5, 6, 7), SamplingParams(max_tokens=500)))
    assert isinstance(await anext(stream), Chunk)
    assert engine.pid
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineDead):
        await asyncio.wait_for(exhaust(stream), PATIENCE)
    with pytest.raises(EngineDead):
        await ask(engine, "y", [5])
    assert not engine.stats().ready


async def test_loaded_weight_and_pool_bytes_equal_the_plan(prompts: list[list[int]]) -> None:
    """The model is loaded in bfloat16; test_hf_formats.py tests quantized models over HTTP."""
    plan = plan_for(dtype="bfloat16")
    async with running(plan) as engine:
        memory = engine.stats().memory
        assert memory.weights == memory.warm_weights == plan.rank.weights_bytes
        assert memory.kv_pool == plan.rank.kv_pool_bytes
        assert engine.capacity().num_blocks == plan.kv_cache.num_blocks
        assert len((await ask(engine, "q", prompts[9], stop_token_ids=()))[0]) == TOKENS


async def test_messages_of_the_engine_process_are_ignored_after_a_cancelled_start() -> None:
    """Cancel the start while the model loads, then receive the child's ready or error message."""
    engine = HFEngine(plan_for())
    started: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
    started.cancel()
    engine._receive(Ready(8, 1, 1, 1, 1, 0.0, engine.stats()), started)
    engine._receive(EngineDead("no model"), started)
    assert started.cancelled()
    with pytest.raises(QueueFull, match="not ready"):
        engine.capacity()


async def test_shutdown_does_not_wait_for_a_loading_engine() -> None:
    """Stop during a load: the child cannot react to the stop message then, and has no results to lose."""
    engine = HFEngine(plan_for())
    start = asyncio.create_task(engine.start())
    while engine.pid is None:
        await asyncio.sleep(0)
        assert not start.done(), start
    process = engine._process
    assert process is not None
    calls: list[str] = []  # the reader of the pipe also waits for the process, but only after its death
    wait, kill = process.wait, process.kill

    def recorded_wait(seconds: float | None = None) -> int:
        calls.append(f"wait {seconds}")
        return wait(seconds)

    def recorded_kill() -> None:
        calls.append("kill")
        kill()

    process.wait, process.kill = recorded_wait, recorded_kill
    await engine.stop()
    assert calls[:2] == ["wait 0.0", "kill"]  # and not five seconds
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(EngineDead):
        await start
