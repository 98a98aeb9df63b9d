"""Learned eviction in vLLM's own block pool: `install` puts a `LearnedQueue` in the place of its free queue.

vLLM's manager stays what it is: it asks its pool for blocks, and the pool asks its queue which of the free
ones to hand out. Blocks without content go first, as in vLLM; then the one that `tonnage.cache.eviction` would
evict, where vLLM takes the one released longest ago. The queue sees which blocks leave and join it; when
requests begin and end, and what they hold then, five wrapped methods of vLLM's manager and pool tell it.

What goes wrong in here never reaches a request: from the first exception on the queue is vLLM's again.
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

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only

# What vLLM 0.30 to 0.33 call of a free queue, and how they call the manager's allocate_slots.
QUEUE = {
    *("popleft", "popleft_n", "remove", "append", "prepend_n", "append_n"),
    *("get_all_free_blocks", "iter_blocks_after"),
}
ALLOCATE = ["request", "num_new_tokens", "num_new_computed_tokens", "new_computed_blocks"]
# Blocks chosen in one call: a decode asks for one, and a call of compiled code costs more than the choice.
AHEAD = 32


class NotUnderstood(Exception):
    """vLLM's manager is not as this module knows it, or has nothing to learn from."""


@dataclass(frozen=True, slots=True)
class EvictionStats:
    """``learned``: the learned rule is followed now, and not LRU; ``evicted``: blocks with content that it
    has chosen, the next few to go among them; ``fallbacks``: exceptions of ours so far, 0 or 1."""

    learned: bool
    evicted: int
    fallbacks: int


def install(manager: Any) -> LearnedQueue | None:
    """Learned eviction for vLLM's KVCacheManager ``manager``, which has handed out nothing yet.

    None, and a warning in vLLM's log, where it stays as it is: no prefix caching, no full-attention group,
    another interface than that of vLLM 0.30 to 0.33.
    """
    try:
        queue = LearnedQueue(manager)
    except Exception as error:
        why = error if isinstance(error, NotUnderstood) else repr(error)
        logger.warning("Tonnage leaves eviction to vLLM (least recently used): %s", why)
        return None
    manager.block_pool.free_block_queue = queue
    _wrap(manager, queue)
    logger.info("Tonnage eviction: learned, %d blocks", queue.num_free_blocks)
    return queue


def _wrap(manager: Any, queue: LearnedQueue) -> None:
    """Tell ``queue`` of what it cannot see."""
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
    """A KV cache group, number ``at``; ``scale``: hashes of a request to one of its blocks."""

    at: int
    tables: dict[str, Any]  # request id -> its blocks
    cached: dict[str, int]  # request id -> leading blocks that can be hit
    block_size: int
    scale: int
    full: bool

    def hashes(self, request: Any, count: int) -> UInt64Array:
        """uint64 [blocks]: the first bytes of the hashes of the request's first ``count`` full blocks."""
        hashes = request.block_hashes[self.scale - 1 : count * self.scale : self.scale]
        if not hashes:
            return np.zeros(0, np.uint64)
        digests = np.frombuffer(b"".join(hashes), np.uint8).reshape(len(hashes), -1)
        return np.ascontiguousarray(digests[:, :8]).view(np.uint64)[:, 0]


def _read(manager: Any) -> tuple[_Group, list[_Group]]:
    """(the first full-attention group, the others). Raises NotUnderstood."""
    pool = manager.block_pool
    methods = {name for name in vars(type(pool.free_block_queue)) if not name.startswith("_")}
    if methods != QUEUE:
        raise NotUnderstood(f"its free queue has other methods: {', '.join(sorted(methods ^ QUEUE))}")
    if list(inspect.signature(manager.allocate_slots).parameters)[: len(ALLOCATE)] != ALLOCATE:
        raise NotUnderstood("its allocate_slots takes other arguments")
    if not manager.enable_caching:
        raise NotUnderstood("prefix caching is off")
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
        raise NotUnderstood("no KV cache group with full attention, so no prefix to learn from")
    return anchor, [group for group in groups if group is not anchor]


class LearnedQueue:
    """vLLM's FreeKVCacheBlockQueue (v1/core/kv_cache_utils.py, 0.30 to 0.33) in our order."""

    def __init__(self, manager: Any) -> None:
        self._anchor, self._others = _read(manager)
        pool = manager.block_pool
        free = pool.free_block_queue.get_all_free_blocks()
        if len(free) != len(pool.blocks) - 1 or pool.null_block.block_id != 0:
            raise NotUnderstood("blocks of its pool are in use already")
        size = self._anchor.block_size
        _warm(size)
        smallest = min(group.block_size for group in (self._anchor, *self._others))
        self._order = EvictionOrder(len(pool.blocks), size, ceil_div(manager.max_model_len, smallest))
        self.num_free_blocks = len(free)
        self.ahead = AHEAD
        self.live: dict[str, int] = {}  # requests that hold blocks -> turn of their conversation
        self._blocks = pool.blocks
        self._stack: list[Any] = free[::-1]  # blocks without content, the next to be handed out last
        self._chosen: list[int] = []  # to go next, the first last; vLLM still finds what they hold
        self._taken: list[int] = []  # blocks that have left, which the order has not been told yet
        self._starting: tuple[Any, list[int]] | None = None  # a request that gets its first blocks, its hit
        self._forgotten: set[int] = set()  # blocks in use that have lost their content
        self._plain: FreeKVCacheBlockQueue | None = None  # vLLM's, once we have failed
        for block in free:
            block.prev_free_block = block.next_free_block = None

    @property
    def stats(self) -> EvictionStats:
        """Counts for metrics."""
        failed = self._plain is not None
        return EvictionStats(self._order.learned and not failed, self._order.evicted, int(failed))

    # -- vLLM's pool calls these -----------------------------------------------------------------------------

    def popleft(self) -> Any:
        """The next free block. Raises ValueError, as vLLM's, where there is none."""
        if self.num_free_blocks == 0:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """The next ``n`` free blocks."""
        if n == 0:
            return []
        assert self.num_free_blocks >= n
        self.num_free_blocks -= n
        if self._plain is None:
            try:
                self._tell()
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
        """A free block is used again: somebody has hit it."""
        self.num_free_blocks -= 1
        if self._plain is not None:
            self._plain.remove(block)
        elif block.block_hash is None and (at := _place(block, self._stack)) is not None:
            del self._stack[at]
        else:
            self._taken.append(block.block_id)

    def append(self, block: Any) -> None:
        """As `append_n`."""
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        """Nobody uses the blocks any more; they keep their content."""
        if not blocks:
            return
        self.num_free_blocks += len(blocks)
        if self._plain is None:
            try:
                self._tell()
                self._order.release([block.block_id for block in blocks])
            except Exception:
                self._fail()  # all that nobody references are in vLLM's queue now
        else:
            self._plain.append_n(_outside(blocks))

    def prepend_n(self, blocks: list[Any]) -> None:
        """Nobody uses the blocks any more, and they have nothing that anybody could hit."""
        if not blocks:
            return
        self.num_free_blocks += len(blocks)
        if self._plain is not None:
            self._plain.prepend_n(_outside(blocks))
        elif self._forgotten.isdisjoint(block.block_id for block in blocks):
            self._stack += blocks[::-1]
        else:
            try:
                self._tell()
                kept = self._forgotten.intersection(block.block_id for block in blocks)
                self._forgotten -= kept
                self._order.release(list(kept))
                self._stack += [block for block in blocks[::-1] if block.block_id not in kept]
            except Exception:
                self._fail()

    def get_all_free_blocks(self) -> list[Any]:
        """All free blocks: those without content as they go, then by their release; O(pool)."""
        if self._plain is None:
            try:
                self._tell()
                cached = self._chosen[::-1] + self._order.blocks()
                return self._stack[::-1] + [self._blocks[at] for at in cached]
            except Exception:
                self._fail()
        assert self._plain is not None
        return list(self._plain.get_all_free_blocks())

    def iter_blocks_after(self, cursor: Any) -> Iterator[Any]:
        """The free blocks behind ``cursor`` (None: all), for connectors that copy what goes soon; O(pool)."""
        blocks = self.get_all_free_blocks()
        at = _place(cursor, blocks)
        return iter(blocks if at is None else blocks[at + 1 :])

    # -- the wrapped methods call these ----------------------------------------------------------------------

    def starting(self, request: Any, hit_tokens: int, computed: Any) -> None:
        """vLLM is asked for the first blocks of a request, which it may refuse before it changes anything."""
        if self._plain is not None:
            return
        try:
            self._tell()
            found = hit_tokens // self._anchor.block_size
            blocks = computed.blocks[self._anchor.at][:found] if found and computed is not None else ()
            self._starting = request, [block.block_id for block in blocks]
        except Exception:
            self._fail()

    def started(self, granted: bool) -> None:
        """... and has answered."""
        if self._plain is None and granted:
            try:
                self._begin()  # where it has neither taken nor given back a block
            except Exception:
                self._fail()
        self._starting = None

    def ended(self, request: Any) -> None:
        """A request gives back its blocks: what they are worth is known now."""
        turn = self.live.pop(request.request_id, None)
        if turn is None or self._plain is not None:
            return
        try:
            self._tell()
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
        """vLLM has forgotten everything cached; all blocks are free."""
        if self._plain is not None:
            return
        try:
            self._tell()
            self._stack += [self._blocks[at] for at in self._order.reset() + self._chosen]
            self._chosen = []
            self._forgotten.clear()
        except Exception:
            self._fail()

    def forget(self, block_ids: Iterable[int]) -> None:
        """vLLM has forgotten what these blocks hold."""
        if self._plain is not None:
            return
        try:
            self._tell()
            self._order.forget(list(block_ids))
            self._forgotten.update(at for at in block_ids if self._blocks[at].ref_cnt > 0)
        except Exception:
            self._fail()

    # -- inside ----------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """The order hears of what has happened since, in order: a request has begun, its hit has been taken."""
        if self._starting is not None:
            self._begin()
        if self._taken:
            taken, self._taken = self._taken, []
            self._order.take(taken)
            if self._chosen:
                out = set(taken)
                self._chosen = [block for block in self._chosen if block not in out]

    def _choose(self, count: int) -> None:
        """At least ``count`` entries of ``_chosen``."""
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
        """The request's blocks, of a full group those that have been cached; 0 where there is none any more."""
        blocks = group.tables.get(id, ())
        held = [block.block_id for block in (blocks[: group.cached.get(id, 0)] if group.full else blocks)]
        if not self._forgotten:
            return held
        return [0 if block in self._forgotten else block for block in held]

    def _fail(self) -> None:
        """From now on vLLM's own queue, of all blocks that nobody references."""
        logger.exception("Tonnage's eviction failed: from now on vLLM evicts what was used longest ago")
        stamp = self._order.core.stamp
        free = [block for block in self._blocks if block.ref_cnt == 0 and not block.is_null]
        free.sort(key=lambda block: -1 if block.block_hash is None else int(stamp[block.block_id]))
        self._plain = FreeKVCacheBlockQueue(free)
        self._starting = None
        self._stack, self._chosen, self._taken = [], [], []


_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, as in Fibonacci hashing
_NO_HASHES = np.zeros(0, np.uint64)


def _outside(blocks: list[Any]) -> list[Any]:
    """Those not in vLLM's queue yet: of two calls in one release the first may have failed, and entered all."""
    return [block for block in blocks if block.next_free_block is None]


def _place(block: Any, blocks: list[Any]) -> int | None:
    """Where it is; `list.index` would compare vLLM's blocks field by field."""
    return next((at for at, each in enumerate(blocks) if each is block), None)


@cache
def _warm(block_size: int) -> None:
    """Compile, or read from disk, what the order runs, before the first request pays for it."""
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
