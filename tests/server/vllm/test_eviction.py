"""Tests of learned eviction in vLLM's KVCacheManager: invariants, and the same choices as our own pool."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from order_invariants import check_order
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    FreeKVCacheBlockQueue,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request
from vllm_steps import World as Steps
from vllm_steps import config, scheduler
from vllm_steps import request as steps_request

from tonnage.server.engines.vllm import eviction
from tonnage.server.engines.vllm.eviction import LearnedQueue, install
from tonnage.server.engines.vllm.scheduler import TonnageScheduler

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
BLOCK, LENGTH = 16, 512


def full(block_size: int = BLOCK) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32)


def sliding(window: int) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=window
    )


GROUPS: dict[str, list[KVCacheSpec]] = {
    "full": [full()],
    "full and sliding": [full(), sliding(40)],
    "sliding first, two full": [sliding(24), full(), full()],
    "blocks of two sizes": [full(2 * BLOCK), sliding(40)],
}


def manager_of(specs: list[KVCacheSpec], blocks: int, **options: Any) -> Any:
    groups = [KVCacheGroupSpec([f"layer {at}"], spec) for at, spec in enumerate(specs)]
    largest = max(spec.block_size for spec in specs)
    return KVCacheManager(
        KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=LENGTH,
        scheduler_block_size=largest,
        hash_block_size=BLOCK,
        **{"enable_caching": True, "enable_kv_cache_events": True, **options},
    )


@dataclass
class World:
    """vLLM's manager with learned eviction, driven at random by the calls of vLLM's scheduler."""

    manager: Any
    queue: LearnedQueue
    random: random.Random
    running: list[Any] = field(default_factory=list)
    deferred: list[list[Any]] = field(default_factory=list)  # blocks of requests that are gone already
    found: Counter[Any] = field(default_factory=Counter)  # hashes that KV events have told of
    written: dict[int, bytes] = field(default_factory=dict)  # block -> hash of what is written in it
    started: int = 0
    hits: int = 0

    def act(self) -> None:
        """Make one call, or all calls for one request in one step."""
        lot = self.random.random()
        if lot < 0.35:
            self.start()
        elif lot < 0.8 and self.running:
            self.decode(self.random.choice(self.running))
        elif lot < 0.93 and self.running:
            self.end(self.running.pop(self.random.randrange(len(self.running))))
        elif lot < 0.95 and self.deferred:
            self.manager.block_pool.free_blocks(reversed(self.deferred.pop(0)))
        elif lot < 0.97:
            blocks = self.manager.block_pool.blocks
            cached = [block.block_id for block in blocks if block.block_hash is not None]
            self.manager.evict_blocks(set(self.random.sample(cached, min(2, len(cached)))))
        elif lot < 0.98:
            self.manager.reset_prefix_cache()

    def start(self) -> None:
        self.started += 1
        pieces = [self.random.choice((1, 1, 2, 3)) for _ in range(self.random.randint(1, 5))]
        prompt = [piece * 100 + at for piece in pieces for at in range(2 * BLOCK)]
        del prompt[-self.random.randint(1, 20) :]
        request = Request(
            request_id=str(self.started), prompt_token_ids=prompt, pooling_params=None,
            sampling_params=SamplingParams(max_tokens=100), block_hasher=HASHER,
        )  # fmt: skip
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        for group, each in enumerate(blocks.blocks):
            size = self.manager.coordinator.single_type_managers[group].block_size // BLOCK
            for at, block in enumerate(each):
                if not block.is_null:
                    assert self.written[block.block_id] == request.block_hashes[(at + 1) * size - 1]
        chunk = self.random.randint(1, request.num_tokens - hit)
        if self.manager.allocate_slots(request, chunk, hit, blocks) is None:
            return
        self.hits += hit
        request.num_computed_tokens = hit + chunk
        self.running.append(request)

    def decode(self, request: Any) -> None:
        left = request.num_tokens - request.num_computed_tokens
        if left == 0:
            request.append_output_token_ids(self.random.randint(1, 3))
        new = self.random.randint(1, max(1, left))
        if self.manager.allocate_slots(request, new) is None:  # preempted, as by vLLM's scheduler
            self.running.remove(request)
            self.manager.free(request)
            return
        request.num_computed_tokens += new

    def end(self, request: Any) -> None:
        if self.random.random() < 0.2:
            self.deferred.append(self.manager.pop_blocks_for_free(request))
        else:
            self.manager.free(request)

    def stop(self) -> None:
        """End all running requests."""
        while self.running:
            self.manager.free(self.running.pop())
        while self.deferred:
            self.manager.block_pool.free_blocks(reversed(self.deferred.pop()))

    def check(self) -> None:
        """Assert that vLLM's bookkeeping and ours agree."""
        pool, queue = self.manager.block_pool, self.manager.block_pool.free_block_queue
        assert queue is self.queue
        free = [block for block in pool.blocks if block.ref_cnt == 0 and not block.is_null]
        listed = queue.get_all_free_blocks()
        assert sorted(block.block_id for block in listed) == [block.block_id for block in free]
        assert pool.get_num_free_blocks() == queue.num_free_blocks == len(free)
        held: Counter[int] = Counter(block.block_id for blocks in self.deferred for block in blocks)
        for each in self.manager.coordinator.single_type_managers:
            held.update(block.block_id for blocks in each.req_to_blocks.values() for block in blocks)
        del held[pool.null_block.block_id]
        used = [block for block in pool.blocks if block.ref_cnt and not block.is_null]
        assert held == {block.block_id: block.ref_cnt for block in used}
        for event in pool.take_events():
            if isinstance(event, BlockStored):
                self.found.update((event.group_idx, each) for each in event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.found.subtract((event.group_idx, each) for each in event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self.found.clear()
        cached = [block for block in pool.blocks if block.block_hash is not None]
        keys = [block.block_hash for block in cached]  # the group's number is the last 4 bytes
        keys += [key for more in pool.cached_block_hashes_by_block.values() for key in more]
        told = [(int.from_bytes(key[-4:], "big"), maybe_convert_block_hash(key[:-4])) for key in keys]
        assert +self.found == Counter(told)
        self.written = {block.block_id: block.block_hash[:-4] for block in cached}
        if queue.stats.fallbacks == 0:
            check_order(queue._order)


HASHER: Any = None


@pytest.fixture(autouse=True, scope="module")
def _hashes() -> None:
    global HASHER
    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    HASHER = get_request_block_hasher(BLOCK, function)


def world_of(groups: str, seed: int, blocks: int = 60) -> World:
    manager = manager_of(GROUPS[groups], blocks)
    queue = install(manager)
    assert queue is not None
    return World(manager, queue, random.Random(seed))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("seed", range(4))
def test_block_pool_invariants_hold_in_random_runs_with_learned_eviction(groups: str, seed: int) -> None:
    world = world_of(groups, seed)
    world.check()
    for _ in range(500):
        world.act()
        world.check()
    assert world.hits > 0
    assert world.queue.stats.evicted > 30
    world.stop()
    world.check()
    assert world.queue.num_free_blocks == 59
    assert world.queue.stats.fallbacks == 0


@pytest.mark.parametrize("where", ["pop", "release", "take", "start", "end", "reset", "forget", "blocks"])
def test_exception_in_learned_eviction_falls_back_to_lru(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whichever call it comes, no block is lost, requests continue, and one log line reports it."""
    said: list[str] = []
    monkeypatch.setattr(eviction.logger, "exception", said.append)
    world = world_of("full and sliding", 5)
    for _ in range(200):
        world.act()
        world.check()

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("made for the test")

    monkeypatch.setattr(type(world.queue._order), where, broken)
    for _ in range(200):
        world.act()
        world.check()
    world.stop()
    world.check()
    assert world.manager.reset_prefix_cache()
    world.check()
    assert world.queue.stats.fallbacks == 1
    assert len(said) == 1


def test_blocks_without_cached_content_are_evicted_first() -> None:
    manager = manager_of([full()], 12)
    queue = install(manager)
    assert queue is not None
    pool = manager.block_pool
    first = pool.get_new_blocks(2)
    assert [block.block_id for block in first] == [1, 2]
    pool.free_blocks(first)
    assert [block.block_id for block in pool.get_new_blocks(3)] == [1, 2, 3]
    with pytest.raises(ValueError, match="Cannot get 9"):
        pool.get_new_blocks(9)
    pool.get_new_blocks(8)
    with pytest.raises(ValueError, match="No free blocks"):
        queue.popleft()


def test_kv_connectors_can_iterate_the_free_block_queue() -> None:
    world = world_of("full", 1)
    for _ in range(100):
        world.act()
        world.check()
    world.stop()
    blocks = world.queue.get_all_free_blocks()
    assert list(world.queue.iter_blocks_after(None)) == blocks
    assert list(world.queue.iter_blocks_after(blocks[3])) == blocks[4:]


def test_request_whose_block_allocation_failed_is_not_counted_as_running() -> None:
    manager = manager_of([full()], 4)
    queue = install(manager)
    assert queue is not None
    request = Request(
        request_id="1", prompt_token_ids=list(range(4 * BLOCK)), pooling_params=None,
        sampling_params=SamplingParams(max_tokens=1), block_hasher=HASHER,
    )  # fmt: skip
    blocks, hit, _ = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, 4 * BLOCK, hit, blocks) is None
    assert not queue.live
    assert manager.allocate_slots(request, 3 * BLOCK, hit, blocks) is not None
    assert list(queue.live) == ["1"]
    manager.free(request)
    assert not queue.live


class _OtherQueue(FreeKVCacheBlockQueue):
    def popright(self) -> None:
        """Stand in for a method that only a future vLLM would have."""


def test_vllm_with_an_unknown_block_pool_interface_keeps_its_own_eviction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(eviction.logger, "warning", lambda message, *values: said.append(message % values))
    in_use = manager_of([full()], 8)
    in_use.block_pool.get_new_blocks(1)
    other = manager_of([full()], 8)
    other.block_pool.free_block_queue = _OtherQueue(other.block_pool.blocks[1:])
    for manager, why in (
        (manager_of([full()], 8, enable_caching=False), "prefix caching is off"),
        (manager_of([sliding(40)], 8), "no KV cache group has full attention"),
        (in_use, "already in use"),
        (other, "unknown methods"),
    ):
        assert install(manager) is None
        assert why in said.pop()
        assert isinstance(manager.block_pool.free_block_queue, FreeKVCacheBlockQueue)
        assert "allocate_slots" not in vars(manager)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_tonnages_scheduler_installs_learned_eviction_in_vllm(asynchronous: bool) -> None:
    """Conversations run through vLLM's scheduler with our admission in a pool that cannot hold all of them."""
    ended = {}
    for kind in ("lru", "learned"):
        made = config(80, mode="predictive", asynchronous=asynchronous, eviction=kind)
        w = Steps(scheduler(TonnageScheduler, made, [full(), sliding(64)]))
        assert (w.scheduler.eviction is not None) == (kind == "learned")
        lots = random.Random(3)
        for number in range(60):
            chat, turns = lots.randint(0, 5), lots.randint(1, 6)
            prompt = [chat * 1000 + at for at in range(turns * 40)]
            w.add(steps_request(str(number), prompt, 60), lots.randint(1, 50))
        w.run()
        ended[kind] = w.produced
        pool = w.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == len(pool.free_block_queue.get_all_free_blocks()) == 79
        if kind == "learned":
            assert not w.scheduler.eviction.live
            assert w.scheduler.eviction.stats.fallbacks == 0
            assert w.scheduler.eviction.stats.evicted > 0
            check_order(w.scheduler.eviction._order)
    assert ended["lru"] == ended["learned"]


def test_scheduler_reports_an_exception_in_learned_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Steps(scheduler(TonnageScheduler, config(80, mode="predictive", eviction="learned")))
    w.add(steps_request("first", 40, 60), 50)
    w.step()
    assert w.scheduler._admission_stats(w.scheduler._report).failures == 0
    monkeypatch.setattr(w.scheduler.eviction._order, "release", None)
    w.run()
    told = w.scheduler._admission_stats(w.scheduler._report)
    assert (told.mode, told.failures) == ("predictive", 1)


@pytest.mark.parametrize(("kind", "blocks", "running"), [("zipf", 2000, 1), ("shift", 2000, 3)])
def test_learned_eviction_in_vllm_equals_that_of_tonnages_own_block_pool(
    kind: str, blocks: int, running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request finds as many blocks in vLLM's manager as in ours, and equally many are evicted.

    The rule is the learned one, since LRU finds fewer blocks.
    """
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    traces, adapters, driver = (import_module(name) for name in ("traces", "adapters", "kv_manager"))
    loads = [each for each in traces.synthetic(kind, 250) if each.prompt_tokens < 10_000]
    # vLLM publishes a last block that its last token fills; ours waits until that token is computed.
    loads = [
        traces.TraceRequest(each.pieces, each.prompt_tokens, n + ((each.prompt_tokens + n) % BLOCK == 0))
        for each in loads
        for n in [min(each.output_tokens, 40)]
    ]
    tokens = traces.Tokens(loads)

    def hits(cache: Any) -> list[int]:
        found: list[int] = []
        admit = cache.admit

        def admitted(*values: Any) -> int | None:
            hit: int | None = admit(*values)
            if hit is not None:
                found.append(hit)
            return hit

        cache.admit = admitted
        driver.replay(cache, loads, running, 16_384, tokens=tokens)
        return found

    ours, theirs = adapters.Tonnage(blocks, running), adapters.Vllm(blocks, running)
    queue = install(theirs.manager)
    assert queue is not None
    queue.ahead = 1  # decides as often as our pool
    learned = hits(theirs)
    assert learned == hits(ours)
    assert queue.stats.evicted == ours.manager.stats().evictions > blocks
    plain = adapters.Vllm(blocks, running)
    assert sum(learned) > sum(hits(plain))
