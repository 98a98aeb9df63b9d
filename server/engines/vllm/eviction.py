"""Learned eviction in vLLM's block pool: `install` replaces the pool's free queue by a `LearnedQueue`.

vLLM's KV cache manager asks its block pool for blocks, and the pool asks its free queue which free block to
hand out next. Blocks without content still go first. Next goes the block that the learned order of
`tonnage.cache.eviction` evicts, instead of the least recently released block. The queue sees which blocks leave
and join it. Five wrapped methods of vLLM's manager and pool report when requests begin and end, and which
blocks they hold.

An exception in this module never fails a request: after the first one, vLLM's own queue is used again.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from tonnage.cache.blocks.state import UInt64Array
from tonnage.cache.eviction.order import EvictionOrder
from tonnage.planner.units import ceil_div

# This logger is a child of the "vllm" logger, because vLLM configures only its own loggers.
logger = init_logger(f"vllm.{__name__}")

# Interface that this module was written for: the methods that vLLM 0.30 to 0.33 call on a free queue, and the
# first arguments of KVCacheManager.allocate_slots.
QUEUE = {
    *("popleft", "popleft_n", "remove", "append", "prepend_n", "append_n"),
    *("get_all_free_blocks", "iter_blocks_after"),
}
ALLOCATE = ["request", "num_new_tokens", "num_new_computed_tokens", "new_computed_blocks"]
# Free blocks that one call of compiled code chooses in advance. A decode step needs only one block, and calling
# compiled code takes longer than choosing a block.
AHEAD = 32


class UnsupportedManager(Exception):
    """An error that says why learned eviction does not support this vLLM manager."""


@dataclass(frozen=True, slots=True)
class EvictionStats:
    """Counts of learned eviction in vLLM's block pool, for metrics.

    Attributes:
        learned: whether blocks are evicted in the learned order now; False means LRU.
        evicted: number of cached blocks chosen for eviction, including the few that were chosen in advance and
            are not handed out yet.
        fallbacks: exceptions in our code so far, 0 or 1; after one, vLLM's own queue is used.
    """

    learned: bool
    evicted: int
    fallbacks: int


def install(manager: Any) -> LearnedQueue | None:
    """Install learned eviction in a vLLM KVCacheManager that has not handed out a block yet.

    Returns:
        The new queue, or None (with a warning in vLLM's log) if vLLM's own eviction is kept. vLLM's own is kept
            without prefix caching, without a full-attention group, and if the manager's interface is not that
            of vLLM 0.30 to 0.33.
    """
    try:
        queue = LearnedQueue(manager)
    except Exception as error:
        why = error if isinstance(error, UnsupportedManager) else repr(error)
        logger.warning("Tonnage's learned eviction is off, vLLM evicts least recently used blocks: %s", why)
        return None
    manager.block_pool.free_block_queue = queue
    _wrap(manager, queue)
    logger.info("Tonnage eviction: learned, %d blocks", queue.num_free_blocks)
    return queue


def _wrap(manager: Any, queue: LearnedQueue) -> None:
    """Wrap methods of vLLM's KV cache manager and block pool, so that they report to `queue`.

    The methods report which requests begin and end, and which cached content is dropped. A free queue alone
    cannot see this.
    """
    pool = manager.block_pool
    allocate, free, take_out = manager.allocate_slots, manager.free, manager.pop_blocks_for_free
    reset, evict = pool.reset_prefix_cache, pool.evict_blocks
    live = queue.live

    def allocate_slots(
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        *args: Any,
        **named: Any,
    ) -> Any:
        new = request.request_id not in live
        if new:
            queue.starting(request, num_new_computed_tokens, new_computed_blocks)
        got = allocate(request, num_new_tokens, num_new_computed_tokens, new_computed_blocks, *args, **named)
        if new:
            queue.started(got is not None)
        return got

    def free_request(request: Any) -> None:
        queue.ended(request)
        free(request)

    def pop_blocks_for_free(request: Any) -> Any:
        queue.ended(request)
        return take_out(request)

    def reset_prefix_cache() -> Any:
        done = reset()
        if done:
            queue.reset()
        return done

    def evict_blocks(block_ids: set[int]) -> None:
        evict(block_ids)
        queue.forget(block_ids)

    manager.allocate_slots, manager.free = allocate_slots, free_request
    manager.pop_blocks_for_free = pop_blocks_for_free
    pool.reset_prefix_cache, pool.evict_blocks = reset_prefix_cache, evict_blocks


@dataclass(frozen=True, slots=True)
class _Group:
    """One of vLLM's KV cache groups, with the block tables of its requests.

    Attributes:
        at: index of the group.
        tables: block table of each request, by request id.
        cached: number of leading blocks of each request that are in the prefix cache, by request id.
        block_size: tokens per block.
        scale: number of request hashes per block of this group, because hashes may be made for smaller blocks.
        full: whether the group has full attention and prefix caching.
    """

    at: int
    tables: dict[str, Any]
    cached: dict[str, int]
    block_size: int
    scale: int
    full: bool

    def hashes(self, request: Any, count: int) -> UInt64Array:
        """Return the first 8 bytes of the hashes of a request's first `count` full blocks, uint64 [count]."""
        hashes = request.block_hashes[self.scale - 1 : count * self.scale : self.scale]
        if not hashes:
            return np.zeros(0, np.uint64)
        digests = np.frombuffer(b"".join(hashes), np.uint8).reshape(len(hashes), -1)
        return np.ascontiguousarray(digests[:, :8]).view(np.uint64)[:, 0]


def _read(manager: Any) -> tuple[_Group, list[_Group]]:
    """Return the first full-attention KV cache group of vLLM's manager, and its other groups.

    Raises:
        UnsupportedManager: the manager's interface is unknown, or prefix caching or full attention is missing.
    """
    pool = manager.block_pool
    methods = {name for name in vars(type(pool.free_block_queue)) if not name.startswith("_")}
    if methods != QUEUE:
        raise UnsupportedManager(f"unknown methods of vLLM's free queue: {', '.join(sorted(methods ^ QUEUE))}")
    if list(inspect.signature(manager.allocate_slots).parameters)[: len(ALLOCATE)] != ALLOCATE:
        raise UnsupportedManager("unknown arguments of KVCacheManager.allocate_slots")
    if not manager.enable_caching:
        raise UnsupportedManager("prefix caching is off")
    groups = []
    for at, each in enumerate(manager.coordinator.single_type_managers):
        whole = each.block_size % pool.hash_block_size == 0
        full = isinstance(each, FullAttentionManager) and each.kv_cache_spec.prefix_cacheable and whole
        groups.append(
            _Group(
                at,
                each.req_to_blocks,
                each.num_cached_block,
                each.block_size,
                each.block_size // pool.hash_block_size,
                full and each.block_pool is pool,
            )
        )
    anchor = next((group for group in groups if group.full), None)
    if anchor is None:
        raise UnsupportedManager("no KV cache group has full attention, so there is no prefix to learn from")
    return anchor, [group for group in groups if group is not anchor]


class LearnedQueue:
    """A replacement for vLLM's FreeKVCacheBlockQueue that evicts cached blocks in an order learned from reuse.

    It has the interface of v1/core/kv_cache_utils.py in vLLM 0.30 to 0.33.
    """

    def __init__(self, manager: Any) -> None:
        self._anchor, self._others = _read(manager)
        pool = manager.block_pool
        free = pool.free_block_queue.get_all_free_blocks()
        if len(free) != len(pool.blocks) - 1 or pool.null_block.block_id != 0:
            raise UnsupportedManager("some blocks of vLLM's pool are already in use")
        size = self._anchor.block_size
        _warm(size)
        smallest = min(group.block_size for group in (self._anchor, *self._others))
        self._order = EvictionOrder(len(pool.blocks), size, ceil_div(manager.max_model_len, smallest))
        self.num_free_blocks = len(free)
        self.ahead = AHEAD
        # Turn number of the conversation of each request that holds blocks, by request id.
        self.live: dict[str, int] = {}
        self._blocks = pool.blocks
        self._stack: list[Any] = free[::-1]  # free blocks without content; the last is handed out first.
        # Ids of cached blocks chosen for eviction; the last is evicted first. Until then a prefix can hit them.
        self._chosen: list[int] = []
        # Ids of blocks that a prefix hit took from the queue, not yet reported to the eviction order.
        self._taken: list[int] = []
        # The request for which vLLM is allocating the first blocks, and the block ids of its prefix hit.
        self._starting: tuple[Any, list[int]] | None = None
        self._forgotten: set[int] = set()  # ids of blocks in use that left the prefix cache.
        # vLLM's own queue, used after an exception in our code.
        self._plain: FreeKVCacheBlockQueue | None = None
        for block in free:
            block.prev_free_block = block.next_free_block = None

    @property
    def stats(self) -> EvictionStats:
        """Return whether eviction is learned now, and the numbers of evicted blocks and of exceptions."""
        failed = self._plain is not None
        return EvictionStats(self._order.learned and not failed, self._order.evicted, int(failed))

    # -- methods that vLLM's pool calls
    # --------------------------------------------------------------------------

    def popleft(self) -> Any:
        """Remove and return the next free block of vLLM's pool.

        Raises:
            ValueError: no block is free (as in vLLM).
        """
        if self.num_free_blocks == 0:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """Remove and return the next `n` free blocks of vLLM's pool."""
        if n == 0:
            return []
        assert self.num_free_blocks >= n
        self.num_free_blocks -= n
        if self._plain is None:
            try:
                self._report_events()
                stack = self._stack
                if n > len(stack):
                    self._choose(n - len(stack))
            except Exception:
                self._fail()
            else:
                found = stack[-n:]
                del stack[-n:]
                found.reverse()
                if short := n - len(found):
                    chosen = self._chosen[-short:]
                    del self._chosen[-short:]
                    chosen.reverse()
                    found += map(self._blocks.__getitem__, chosen)
                return found
        assert self._plain is not None
        return list(self._plain.popleft_n(n))

    def remove(self, block: Any) -> None:
        """Remove a cached block from the free queue, because a prefix hit uses it again."""
        self.num_free_blocks -= 1
        if self._plain is not None:
            self._plain.remove(block)
        elif block.block_hash is None and (at := _index_of(block, self._stack)) is not None:
            del self._stack[at]
        else:
            self._taken.append(block.block_id)

    def append(self, block: Any) -> None:
        """Add to the queue a block that no request references any more; it keeps its cached content."""
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        """Add to the queue blocks that no request references any more; they keep their cached content."""
        if not blocks:
            return
        self.num_free_blocks += len(blocks)
        if self._plain is None:
            try:
                self._report_events()
                self._order.release([block.block_id for block in blocks])
            except Exception:
                self._fail()  # this puts all unreferenced blocks, including `blocks`, in vLLM's own queue
        else:
            self._plain.append_n(_not_queued(blocks))

    def prepend_n(self, blocks: list[Any]) -> None:
        """Add to the queue unreferenced blocks whose content no prefix can hit."""
        if not blocks:
            return
        self.num_free_blocks += len(blocks)
        if self._plain is not None:
            self._plain.prepend_n(_not_queued(blocks))
        elif self._forgotten.isdisjoint(block.block_id for block in blocks):
            self._stack += blocks[::-1]
        else:
            try:
                self._report_events()
                kept = self._forgotten.intersection(block.block_id for block in blocks)
                self._forgotten -= kept
                self._order.release(list(kept))
                self._stack += [block for block in blocks[::-1] if block.block_id not in kept]
            except Exception:
                self._fail()

    def get_all_free_blocks(self) -> list[Any]:
        """Return all free blocks: first those without content, then cached ones by release time; O(pool)."""
        if self._plain is None:
            try:
                self._report_events()
                cached = self._chosen[::-1] + self._order.blocks()
                return self._stack[::-1] + [self._blocks[at] for at in cached]
            except Exception:
                self._fail()
        assert self._plain is not None
        return list(self._plain.get_all_free_blocks())

    def iter_blocks_after(self, cursor: Any) -> Iterator[Any]:
        """Iterate over the free blocks after the block `cursor`, or over all if it is None; O(pool).

        vLLM's KV connectors use it to copy blocks that will be evicted soon.
        """
        blocks = self.get_all_free_blocks()
        at = _index_of(cursor, blocks)
        return iter(blocks if at is None else blocks[at + 1 :])

    # -- methods that the wrapped methods of vLLM's manager and pool call
    # ----------------------------------------

    def starting(self, request: Any, hit_tokens: int, computed: Any) -> None:
        """Record that vLLM is about to allocate the first blocks of a request.

        The allocation may still fail without any change. `started` reports the outcome.

        Args:
            request: vLLM's request.
            hit_tokens: prompt tokens found in the prefix cache.
            computed: the cached blocks of these tokens, or None.
        """
        if self._plain is not None:
            return
        try:
            self._report_events()
            found = hit_tokens // self._anchor.block_size
            blocks = computed.blocks[self._anchor.at][:found] if found and computed is not None else ()
            self._starting = request, [block.block_id for block in blocks]
        except Exception:
            self._fail()

    def started(self, granted: bool) -> None:
        """Record whether vLLM allocated the first blocks of the request last passed to `starting`."""
        if self._plain is None and granted:
            try:
                # Report the request to the eviction order, unless an earlier call has already reported it.
                self._begin()
            except Exception:
                self._fail()
        self._starting = None

    def ended(self, request: Any) -> None:
        """Report a request's blocks to the learned eviction order when the request returns them to the pool."""
        turn = self.live.pop(request.request_id, None)
        if turn is None or self._plain is not None:
            return
        try:
            self._report_events()
            id, anchor = request.request_id, self._anchor
            blocks = self._held(anchor, id)
            hashes = anchor.hashes(request, len(blocks))
            self._order.end(hashes, blocks, request.num_prompt_tokens, request.num_tokens, turn)
            for group in self._others:
                blocks = self._held(group, id)
                hashes = group.hashes(request, len(blocks)) if group.full else _NO_HASHES
                key = group.at * _GOLDEN % 2**64
                self._order.follow(hashes, blocks, group.block_size, key, full=group.full)
        except Exception:
            self._fail()

    def reset(self) -> None:
        """Count all blocks as free and without content, because vLLM has dropped its prefix cache."""
        if self._plain is not None:
            return
        try:
            self._report_events()
            self._stack += [self._blocks[at] for at in self._order.reset() + self._chosen]
            self._chosen = []
            self._forgotten.clear()
        except Exception:
            self._fail()

    def forget(self, block_ids: Iterable[int]) -> None:
        """Count the blocks `block_ids` as having no content, because vLLM has dropped their cached content."""
        if self._plain is not None:
            return
        try:
            self._report_events()
            self._order.forget(list(block_ids))
            self._forgotten.update(at for at in block_ids if self._blocks[at].ref_cnt > 0)
        except Exception:
            self._fail()

    # -- internal methods
    # ----------------------------------------------------------------------------------------

    def _report_events(self) -> None:
        """Report to the learned eviction order a request that has begun, then the blocks of its prefix hit."""
        if self._starting is not None:
            self._begin()
        if self._taken:
            taken, self._taken = self._taken, []
            self._order.take(taken)
            if self._chosen:
                out = set(taken)
                self._chosen = [block for block in self._chosen if block not in out]

    def _choose(self, count: int) -> None:
        """Choose cached blocks to evict next, until `_chosen` has at least `count` block ids."""
        short = count - len(self._chosen)
        if short > 0:
            more = self._order.pop(min(max(short, self.ahead), self._order.cached))
            self._chosen = more[::-1] + self._chosen

    def _begin(self) -> None:
        if self._starting is None:
            return
        (request, hit), self._starting = self._starting, None
        hashes = self._anchor.hashes(request, request.num_tokens // self._anchor.block_size)
        turn = self._order.start(hashes, hit, request.num_tokens, len(self._stack) + len(self._chosen))
        self.live[request.request_id] = turn

    def _held(self, group: _Group, id: str) -> list[int]:
        """Return the ids of a request's blocks in a KV cache group, with 0 for blocks without content.

        In a group with full attention, only the cached blocks are returned.
        """
        blocks = group.tables.get(id, ())
        held = [block.block_id for block in (blocks[: group.cached.get(id, 0)] if group.full else blocks)]
        if not self._forgotten:
            return held
        return [0 if block in self._forgotten else block for block in held]

    def _fail(self) -> None:
        """Switch to vLLM's own free queue after an exception in our code; put all unreferenced blocks in it."""
        logger.exception("Tonnage's learned eviction failed: vLLM evicts by LRU from now on")
        stamp = self._order.arrays.stamp
        free = [block for block in self._blocks if block.ref_cnt == 0 and not block.is_null]
        free.sort(key=lambda block: -1 if block.block_hash is None else int(stamp[block.block_id]))
        self._plain = FreeKVCacheBlockQueue(free)
        self._starting = None
        self._stack, self._chosen, self._taken = [], [], []


# Factor that spreads the index of a KV cache group over 64 bits (Fibonacci hashing): 2^64 divided by the golden
# ratio, which is about 1.618
_GOLDEN = 0x9E3779B97F4A7C15
_NO_HASHES = np.zeros(0, np.uint64)


def _not_queued(blocks: list[Any]) -> list[Any]:
    """Return those of ``blocks`` that vLLM's own free queue does not hold yet.

    vLLM returns a request's blocks in two calls. If the first call failed in our code, the fallback has already
    queued all blocks.
    """
    return [block for block in blocks if block.next_free_block is None]


def _index_of(block: Any, blocks: list[Any]) -> int | None:
    """Return the index of the object `block` in `blocks`, or None if it is not there.

    The comparison is by identity, because `list.index` would compare vLLM's blocks field by field.
    """
    return next((at for at, each in enumerate(blocks) if each is block), None)


@cache
def _warm(block_size: int) -> None:
    """Compile the functions of the learned eviction order, or load them from disk, before the first request."""
    order = EvictionOrder(8, block_size, 4)
    hashes = np.arange(1, 4, dtype=np.uint64)
    for turn in range(2):
        order.start(hashes, [], 3 * block_size + 1, 7)
        order.end(hashes, [1, 2, 3], 2 * block_size, 3 * block_size + 1, turn)
        order.follow(hashes, [4, 5, 6], block_size, 1, full=True)
        order.release([3, 2, 1, 6, 5, 4])
        order.take([1])
        order.forget([1, 3])
        order.release([1])
        order.pop(2)
        order.reset()
