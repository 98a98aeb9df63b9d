"""Tests of KV tiers in a replay: eviction, hits by tier, bytes and seconds, the curve and the verdict."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from invariants import check_step

from tonnage.cache.admission import Policy
from tonnage.cache.errors import CacheConfigError
from tonnage.cache.replay.chunk_store import ARCOrder, ChunkStore, ChunkUse
from tonnage.cache.replay.simulator import Setup, Simulator
from tonnage.cache.replay.step_time import StepTime
from tonnage.cache.replay.tier_curve import chunk_uses, tier_curve
from tonnage.cache.replay.tier_verdict import TierVerdict
from tonnage.cache.replay.tiers import Tiers, TierSetup, chunk_keys
from tonnage.cache.replay.trace import Trace, TraceRequest
from tonnage.planner.model.layout import KVGroup, KVLayout

AZURE = Path(__file__).parents[1] / "data" / "traces" / "azure_conversation_300.csv"
TOKEN = 2 * 8 * 128 * 2  # bytes of a token of the layout below
CHUNK = 64 * TOKEN
SETUP = Setup(
    layout=KVLayout((KVGroup("full", (0,)),), 16, 1, 8, 128, "bfloat16", 2),
    num_blocks=33,  # 512 tokens
    max_num_seqs=4,
    max_model_len=1024,
    budget=256,
    max_tokens=8,
    policy=Policy(),
    step_time=StepTime(16 * 10**9, 8 * 10**9, TOKEN, 3350e9, 1e12),
    check=check_step,
)


def trace_of(*prompts: tuple[float, tuple[int, ...]], output: int = 2) -> Trace:
    """Return a trace of prompts of whole chunks of 64 tokens, and one more token each."""
    return Trace("t", "log", tuple(
        TraceRequest(at, 64 * len(ids) + 1, output, hash_ids=(*ids, 10_000 + number), hash_block=64)
        for number, (at, ids) in enumerate(prompts)
    ))  # fmt: skip


def replayed(trace: Trace, tiers: TierSetup | None):
    return Simulator(trace, replace(SETUP, tiers=tiers)).run()


# A conversation returns after another one of 448 tokens has taken the pool of 512.
RETURNS = trace_of((0, (1, 2, 3, 4)), (10, (11, 12, 13, 14, 15, 16, 17)), (20, (1, 2, 3, 4)))


def test_repeated_prompt_is_loaded_from_the_host_memory_tier_in_a_replay() -> None:
    plain = replayed(RETURNS, None)
    tiered = replayed(RETURNS, TierSetup(64 * CHUNK, TOKEN, host_bandwidth=1e9))
    counts = tiered.tiers
    assert plain.tiers is None
    assert counts.host_hit_tokens + tiered.hit_tokens >= 256 > plain.hit_tokens
    assert counts.host_hit_tokens == counts.host_loaded_bytes // TOKEN
    assert counts.host_stored_bytes == 11 * CHUNK
    assert counts.load_seconds == pytest.approx(counts.host_loaded_bytes / 1e9)
    assert (tiered.finished, counts.loads) == (3, 1)
    # 0.13 s of prefill on this slow device become 8 ms of loading
    assert tiered.first_tokens[2] < plain.first_tokens[2] / 2


def test_replay_verdict_says_that_a_tier_behind_a_slow_link_costs_time() -> None:
    setup = TierSetup(64 * CHUNK, TOKEN, host_bandwidth=1e5)
    plain, tiered = replayed(RETURNS, None), replayed(RETURNS, setup)
    verdict = TierVerdict(plain, tiered, setup, SETUP.step_time, tier_curve(chunk_uses(RETURNS)), CHUNK, 0.5)
    assert not verdict.pays
    assert verdict.sentence().startswith("Costs: mean time to first token +")
    assert "The link limits it" in verdict.sentence()
    fast = replace(setup, host_bandwidth=1e9)
    paying = TierVerdict(
        plain, replayed(RETURNS, fast), fast, SETUP.step_time, tier_curve(chunk_uses(RETURNS)), CHUNK, 0.5
    )
    assert paying.pays
    assert paying.sentence().startswith("Pays: mean time to first token -")
    assert paying.to_dict()["knee_bytes"] == 11 * CHUNK


def test_replay_verdict_says_that_a_tier_behind_a_large_enough_pool_does_not_pay() -> None:
    """vllm-project/vllm#44294: requests that share one prefix hit the pool, and the tier adds nothing."""
    shared = trace_of(*((2.0 * i, (1, 2, 3, 4)) for i in range(6)))
    setup = TierSetup(64 * CHUNK, TOKEN)
    verdict = TierVerdict(replayed(shared, None), replayed(shared, setup), setup, SETUP.step_time,
                          tier_curve(chunk_uses(shared)), CHUNK, 0.5)  # fmt: skip
    assert verdict.counts.hit_tokens == 0
    assert verdict.sentence().startswith("Does not pay: ")
    assert "GPU's pool already hits" in verdict.sentence()


def test_documents_in_rotation_never_hit_an_lru_tier_smaller_than_all_of_them() -> None:
    """LMCache#1741: 50 documents in turn, and a tier smaller than all of them, hit nothing."""
    turns = trace_of(*((5.0 * i, tuple(range(100 * (i % 5), 100 * (i % 5) + 7))) for i in range(15)))
    small, large = (replayed(turns, TierSetup(n * CHUNK, TOKEN)).tiers for n in (28, 35))
    assert small.hit_tokens == 0
    assert small.chunks_evicted > 0
    assert large.hit_tokens > 9 * 7 * 64
    assert large.chunks_evicted == 0


def test_disk_tier_returns_chunks_that_host_memory_evicted() -> None:
    turns = trace_of(*((5.0 * i, tuple(range(100 * (i % 5), 100 * (i % 5) + 7))) for i in range(15)))
    setup = TierSetup(14 * CHUNK, TOKEN, disk_bytes=64 * CHUNK, host_bandwidth=1e9, disk_bandwidth=1e8)
    counts = replayed(turns, setup).tiers
    assert counts.host_hit_tokens == 0 < counts.disk_hit_tokens
    assert counts.disk_loaded_bytes == counts.host_loaded_bytes
    assert counts.disk_stored_bytes == 35 * CHUNK
    assert counts.load_seconds == pytest.approx(counts.host_loaded_bytes * (1e-9 + 1e-8))


def test_learned_policy_applies_to_the_disk_tier_while_host_memory_stores_every_chunk() -> None:
    draw, tiers = random.Random(1), Tiers(TierSetup(8 * CHUNK, TOKEN, 40 * CHUNK, "learned"), 64)
    for number in range(600):
        ids = (
            (number % 7, 50 + number % 7)
            if draw.random() < 0.5
            else tuple(range(1000 * number, 1000 * number + 4))
        )
        request = trace_of((float(number), ids)).requests[0]
        if tiers.load(number, request, 0, 0.0)[0]:
            tiers.loaded(number)
        tiers.computed(number, request.prompt_tokens)
        tiers.step_ended()
        tiers.ended(number)
    assert tiers.host.declined == 0
    assert tiers.disk is not None
    assert tiers.disk.evicted > 0
    assert tiers.counts.disk_hit_tokens > 1000


@pytest.mark.parametrize("policy", ["lru", "arc", "learned"])
def test_block_manager_invariants_hold_while_random_requests_load_from_tiers(policy: str) -> None:
    """Every invariant of the block manager is checked at every step while requests load from tiers."""
    draw, prompts, at = random.Random(3), [], 0.0
    for _ in range(60):
        start = draw.randrange(6)
        prompts.append((at, tuple(100 * start + place for place in range(draw.randrange(1, 8)))))
        at += draw.random() / 4
    trace = trace_of(*prompts, output=8)
    result = replayed(trace, TierSetup(12 * CHUNK, TOKEN, 24 * CHUNK, policy, 1e8, 1e8))
    assert result.finished == 60
    assert result.tiers.hit_tokens > 0
    assert result.tiers.chunks_stored - result.tiers.chunks_evicted <= 12


def test_lru_tier_evicts_the_last_chunks_of_a_prompt_first() -> None:
    store = ChunkStore(4)
    first = ChunkUse((1, 2, 3, 4))
    store.written(store.store(first, 0, 4))
    store.finish(first)
    second = ChunkUse((9,))
    store.written(store.store(second, 0, 1))
    assert [store.lookup(key) for key in (1, 2, 3, 4, 9)] == [True, True, True, False, True]


def test_arc_policy_keeps_chunks_that_were_used_more_than_once() -> None:
    store = ChunkStore(4, "arc")
    for _ in range(2):
        use = ChunkUse((1, 2))
        store.written(store.store(use, 0, 2))
        store.finish(use)
    for key in range(10, 20):
        use = ChunkUse((key,))
        store.written(store.store(use, 0, 1))
        store.finish(use)
    assert store.lookup(1)
    assert store.lookup(2)
    assert isinstance(store.order, ARCOrder)
    assert (len(store.order.again), len(store.order.once)) == (2, 2)


def test_chunk_in_transfer_between_tiers_is_not_evicted() -> None:
    store = ChunkStore(2)
    first = ChunkUse((1, 2))
    new = store.store(first, 0, 2)
    assert not store.lookup(1)  # not yet written
    assert store.store(ChunkUse((3,)), 0, 1) is None
    assert store.refused == 1
    store.written(new)
    store.load(first, 0, 2)
    assert store.store(ChunkUse((3,)), 0, 1) is None
    store.loaded(first, 0, 2)
    assert store.store(ChunkUse((3,)), 0, 1) == [3]


def test_equal_hash_ids_after_different_prefixes_are_different_chunks() -> None:
    known: dict[tuple[int, int], int] = {}
    one, other = (TraceRequest(0.0, 128, 1, hash_ids=ids, hash_block=64) for ids in ((1, 5), (2, 5)))
    assert not set(chunk_keys(one, known)) & set(chunk_keys(other, known))
    partial = TraceRequest(0.0, 100, 1, hash_ids=(1, 5), hash_block=64)
    assert chunk_keys(partial, known) == chunk_keys(one, known)[:1]


@pytest.mark.parametrize("seed", range(5))
def test_hit_rate_curve_is_near_lru_replays_of_every_tier_size(seed: int) -> None:
    """A request renews its chunks when it ends; some are evicted between their load and that end."""
    draw = random.Random(seed)
    prompts = [
        (float(i), tuple(range(start := 100 * draw.randrange(20), start + draw.randrange(1, 9))))
        for i in range(400)
    ]
    trace = trace_of(*prompts)
    curve, tokens = tier_curve(chunk_uses(trace)), sum(request.prompt_tokens for request in trace.requests)
    for size in (96, 128, 160):
        tiers = Tiers(TierSetup(size * 64, 1), 64)
        for number, request in enumerate(trace.requests):
            loaded, _ = tiers.load(number, request, 0, 0.0)
            if loaded:
                tiers.loaded(number)
            tiers.computed(number, request.prompt_tokens)
            tiers.step_ended()
            tiers.ended(number)
        replayed_rate = tiers.counts.hit_tokens / tokens
        assert curve.hit_rate(size) == pytest.approx(replayed_rate, abs=0.025)
    assert curve.hit_rate(10**9) == pytest.approx(curve.highest)
    assert curve.hit_rate(curve.knee()) >= 0.95 * curve.highest


def test_hit_rate_curve_of_a_quarter_of_the_chunks_is_near_the_full_curve() -> None:
    draw = random.Random(1)
    prompts = [(float(i), tuple(100 * draw.randrange(400) + p for p in range(8))) for i in range(3000)]
    trace = trace_of(*prompts)
    whole, sampled = tier_curve(chunk_uses(trace), 1.0), tier_curve(chunk_uses(trace), 0.25)
    assert sampled.rate == 0.25
    for size in (400, 1600, 3200):
        assert sampled.hit_rate(size) == pytest.approx(whole.hit_rate(size), abs=0.05)


def test_tier_below_one_chunk_and_trace_without_hash_ids_are_rejected() -> None:
    with pytest.raises(CacheConfigError, match="hold no chunk"):
        Tiers(TierSetup(CHUNK - 1, TOKEN), 64)
    plain = Trace("t", "log", (TraceRequest(0.0, 10, 1),))
    with pytest.raises(CacheConfigError, match="has no hash_ids"):
        tier_curve(chunk_uses(plain))
