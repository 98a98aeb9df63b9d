"""Tests of the learned order of KV tiers, of its admission, and of the optimum."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import combinations, count, takewhile

import pytest

from tonnage.cache.eviction.chunk_order import LearnedChunkOrder
from tonnage.cache.replay.chunk_store import ChunkStore, ChunkUse
from tonnage.cache.replay.tier_curve import chunk_uses, optimum, tier_curve
from tonnage.cache.replay.tiers import chunk_keys
from tonnage.cache.replay.trace import Trace, TraceRequest


def serve(store: ChunkStore, keys: Sequence[int]) -> int:
    """Run one request through a store and return the number of chunks that it hits."""
    use, hit = ChunkUse(tuple(keys)), 0
    while hit < len(keys) and store.lookup(keys[hit]):
        hit += 1
    store.load(use, 0, hit)
    store.loaded(use, 0, hit)
    if new := store.store(use, hit, len(keys)):
        store.written(new)
    store.finish(use)
    return hit


def conversations(requests: int) -> list[tuple[int, ...]]:
    """Return prompts of which a fifth belong to conversations that continue, and the others never return."""
    draw, fresh, prompts = random.Random(4), count(1), list[tuple[int, ...]]()
    live = [[next(fresh) for _ in range(4)] for _ in range(12)]
    for _ in range(requests):
        if draw.random() < 0.2:
            prompt = draw.choice(live)
            prompt.append(next(fresh))
            if len(prompt) > 12:
                prompt[:] = [next(fresh) for _ in range(4)]
            prompts.append(tuple(prompt))
        else:
            prompts.append(tuple(next(fresh) for _ in range(5)))
    return prompts


def test_learned_tier_policy_hits_more_chunks_than_lru_and_stores_fewer() -> None:
    prompts, hits, stores = conversations(3000), {}, {}
    for policy in ("lru", "arc", "learned"):
        stores[policy] = ChunkStore(128, policy)
        hits[policy] = sum(serve(stores[policy], prompt) for prompt in prompts)
    assert hits["learned"] > 1.2 * hits["lru"]
    assert hits["learned"] >= 0.99 * hits["arc"]
    assert stores["learned"].declined > 0
    assert stores["learned"].stored < 0.8 * stores["lru"].stored


def test_first_chunks_of_a_prompt_longer_than_the_tier_stay_in_it() -> None:
    learned, lru = ChunkStore(8, "learned"), ChunkStore(8)
    prompt = tuple(range(20))
    for store in (learned, lru):
        use = ChunkUse(prompt)
        for start in range(0, 20, 4):  # in prefill steps of four chunks
            if new := store.store(use, start, start + 4):
                store.written(new)
        store.finish(use)
    assert [learned.lookup(key) for key in range(9)] == [True] * 8 + [False]
    assert not lru.lookup(0)


def test_conversation_longer_than_the_tier_still_hits_its_first_chunks_in_every_turn() -> None:
    """Chunks that a turn has loaded stay until it ends: new ones, which no hit reaches, evict none of them."""
    store = ChunkStore(16, "learned")
    assert [serve(store, range(length)) for length in range(12, 40)] == [0, *range(12, 16), *[16] * 23]


def test_chunks_of_running_requests_do_not_shrink_the_lru_tier_that_learned_eviction_simulates() -> None:
    """LRU would also evict chunks of running requests, so these do not make its simulated tier smaller."""
    store, long = ChunkStore(100, "learned"), ChunkUse(tuple(range(60)))
    serve(store, long.keys)
    store.load(long, 0, 60)  # a request that runs until the end of the test
    store.loaded(long, 0, 60)
    for start in range(100, 140, 10):
        serve(store, range(start, start + 10))
    serve(store, range(100, 110))
    assert isinstance(store.order, LearnedChunkOrder)
    assert store.order._order.arrays.model["alive"][0] == 100


@pytest.mark.parametrize("learned", [False, True])
def test_learned_policy_in_a_tier_smaller_than_the_running_requests_hits_like_lru(learned: bool) -> None:
    """Twelve requests of 8 chunks run at once in a tier of 40; the chunks of the others give way."""
    draw, fresh, hits = random.Random(1), count(1), dict[str, int]()
    chats = [[next(fresh) for _ in range(6)] for _ in range(3)]
    prompts = [
        (chats[draw.randrange(3)] if draw.random() < 0.5 else [])[:5] + [next(fresh) for _ in range(3)]
        for _ in range(400)
    ]
    for policy in ("lru", "learned"):
        store, live, hits[policy] = ChunkStore(40, policy), list[ChunkUse](), 0
        if policy == "learned" and not learned:
            assert isinstance(store.order, LearnedChunkOrder)
            store.order._order.arrays.model["learning"] = 0
        for prompt in prompts:
            use, hit = ChunkUse(tuple(prompt)), 0
            while hit < len(prompt) and store.lookup(prompt[hit]):
                hit += 1
            store.load(use, 0, hit)
            store.loaded(use, 0, hit)
            store.written(store.store(use, hit, len(prompt)) or [])
            hits[policy] += hit
            live.append(use)
            if len(live) > 12:
                store.finish(live.pop(0))
    assert hits["learned"] >= 0.99 * hits["lru"] > 100


def test_chunks_of_running_requests_and_pinned_chunks_are_not_evicted() -> None:
    order: LearnedChunkOrder[int] = LearnedChunkOrder(4)
    for key in range(4):
        order.insert(key)
    assert order.evict(1, set(), {}) is None
    order.finish((0, 1), set())
    assert order.evict(2, {0}, {}) is None
    assert order.evict(1, set(), {}) == [1]
    assert 0 in order
    order.finish((0, 2, 3), {0})
    assert order.evict(1, set(), {3: 1}) == [2]
    order.remove(3)
    assert len(order) == 1
    order.clear()
    assert len(order) == 0


def test_chunks_beyond_the_longest_learned_prompt_length_can_be_evicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tonnage.cache.eviction.chunk_order._LONGEST", 4)
    order: LearnedChunkOrder[int] = LearnedChunkOrder(6)
    for key in range(6):
        order.insert(key)
    order.finish(range(6), set())
    assert order.evict(6, set(), {}) == [5, 4, 3, 2, 1, 0]
    assert len(order) == 0


def trace_of(*prompts: Sequence[int]) -> Trace:
    return Trace("t", "log", tuple(
        TraceRequest(float(at), 64 * len(ids), 1, hash_ids=tuple(ids), hash_block=64)
        for at, ids in enumerate(prompts)
    ))  # fmt: skip


def most_hits(requests: Iterable[tuple[int, ...]], size: int) -> int:
    """Return the most chunks hit as whole prefixes, by trying every content between two requests."""
    reached = {frozenset[int](): 0}
    for keys in requests:
        following: dict[frozenset[int], int] = {}
        for content, hits in reached.items():
            found = hits + len(list(takewhile(content.__contains__, keys)))
            offered = content | set(keys)
            for length in range(min(size, len(offered)) + 1):
                for kept in map(frozenset, combinations(offered, length)):
                    following[kept] = max(following.get(kept, 0), found)
        reached = following
    return max(reached.values())


@pytest.mark.parametrize("seed", range(6))
def test_optimal_tier_hits_equal_an_exhaustive_search_over_all_eviction_decisions(seed: int) -> None:
    draw = random.Random(seed)
    prompts = [[10 * draw.randrange(3) + place for place in range(draw.randrange(1, 3))] for _ in range(12)]
    trace = trace_of(*prompts)
    uses = chunk_uses(trace)
    chunks = [(key,) for key in uses.keys.tolist()]
    tokens = sum(request.prompt_tokens for request in trace.requests)
    for size in (1, 2, 3):
        assert optimum(uses, size) == pytest.approx(most_hits(chunks, size) * 64 / tokens)


@pytest.mark.parametrize("seed", range(6))
def test_bounds_of_hits_equal_the_definitions_of_kvcache_calculator(seed: int) -> None:
    """The definitions stand in docs/correctness_guide.en.md of github.com/openanolis/kvcache-calculator.

    The content upper bound counts chunks whose prefix an earlier request had. The relaxed upper bound is the
    most hits if the cache may change between two chunks and hits need not be a prefix. The exact strict-prefix
    bound is the most hits of prefixes, with a content that changes between requests.
    """
    draw = random.Random(seed)
    prompts = [[10 * draw.randrange(3) + place for place in range(draw.randrange(1, 3))] for _ in range(10)]
    trace = trace_of(*prompts)
    uses, known = chunk_uses(trace), dict[tuple[int, int], int]()
    paths = [chunk_keys(request, known) for request in trace.requests]
    tokens = sum(request.prompt_tokens for request in trace.requests)
    seen, content = set[int](), 0
    for path in paths:
        content += len(seen & set(path))
        seen |= set(path)
    assert tier_curve(uses).highest == pytest.approx(content * 64 / tokens)
    for size in (1, 2, 3):
        relaxed, exact = most_hits([(key,) for key in uses.keys.tolist()], size), most_hits(paths, size)
        assert exact == relaxed <= content
        assert optimum(uses, size) == pytest.approx(exact * 64 / tokens)


def test_optimal_hit_rate_is_at_least_that_of_lru_and_at_most_that_of_an_unlimited_tier() -> None:
    uses = chunk_uses(trace_of(*conversations(400)))
    curve = tier_curve(uses)
    for size in (16, 64, 256):
        assert curve.hit_rate(size) <= optimum(uses, size) <= curve.highest + 1e-9
    assert optimum(uses, uses.distinct) == pytest.approx(curve.highest)
