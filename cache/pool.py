"""The block pool: who holds which block. Three states, arrays of ints, no object per block.

Every block but the null block is in exactly one state:

- *used*: reference count > 0;
- *cached*: unreferenced, but its content is in the prefix index; in the list of its class, evictable;
- *free*: unreferenced and without content worth keeping; on the free stack, reused first (LIFO).

The functions here are the only ones that change reference counts, lists and who owns a block; blocks of full
groups are counted per request, as `tonnage.cache.snapshot` says. They check nothing: their callers have made
sure that a block is there.
"""

from __future__ import annotations

import numpy as np

from tonnage.cache.compiled import compiled
from tonnage.cache.errors import CacheConfigError
from tonnage.cache.state import (
    CACHED,
    CLASSES,
    CLOCK,
    FREE,
    FREE_HEAD,
    NULL_BLOCK,
    USED_FULL,
    Int32Array,
    Pool,
    State,
)

__all__ = ["NULL_BLOCK", "BlockPool", "Int32Array", "acquire", "pop_free", "push_free", "release", "uncache"]


@compiled
def push_free(pool: Pool, block: int) -> None:
    """Onto the free stack: the next to be handed out."""
    pool.next[block] = pool.counters[FREE_HEAD]
    pool.counters[FREE_HEAD] = block
    pool.counters[FREE] += 1


@compiled
def push_cached(pool: Pool, block: int, kind: int) -> None:
    """To the young end of its class."""
    sentinel = pool.refs.size + kind
    newest = pool.prev[sentinel]
    pool.next[newest] = block
    pool.prev[block] = newest
    pool.next[block] = sentinel
    pool.prev[sentinel] = block
    pool.time[block] = pool.counters[CLOCK] & 0xFFFFFFFF
    pool.counters[CLOCK] += 1
    pool.counters[CACHED] += 1


@compiled
def unlink(pool: Pool, block: int) -> None:
    """Out of the list of its class."""
    before, after = pool.prev[block], pool.next[block]
    pool.next[before] = after
    pool.prev[after] = before
    pool.counters[CACHED] -= 1


@compiled
def uncache(pool: Pool, block: int) -> None:
    """Cached -> free: the prefix index has forgotten the block."""
    unlink(pool, block)
    push_free(pool, block)


@compiled
def pop_free(state: State, full: bool, slot: int) -> int:
    """A free block, reference count 1, for a request's table; ``full``: of a full group."""
    pool = state.pool
    block = int(pool.counters[FREE_HEAD])
    pool.counters[FREE_HEAD] = pool.next[block]
    pool.counters[FREE] -= 1
    pool.refs[block] = 1
    if full:
        _own(state, block, slot)
    return block


@compiled
def acquire(state: State, block: int, full: bool, slot: int) -> None:
    """One more reference; a cached block leaves its list."""
    pool = state.pool
    if pool.refs[block] == 0:
        unlink(pool, block)
        if full:
            _own(state, block, slot)
    elif full and pool.owner[block] != 0 and pool.owner[block] != slot + 1:
        state.requests.private[pool.owner[block] - 1] -= 1
        pool.owner[block] = 0
    pool.refs[block] += 1


@compiled
def release(state: State, block: int, full: bool, slot: int) -> None:
    """One reference less. The last one makes the block cached where it is in the prefix index, else free."""
    pool, index = state.pool, state.index
    pool.refs[block] -= 1
    if pool.refs[block] > 0:
        return
    if full:
        pool.counters[USED_FULL] -= 1
        if pool.owner[block] != 0:
            state.requests.private[slot] -= 1
            pool.owner[block] = 0
    node = index.node_of[block]
    if node != NULL_BLOCK:
        push_cached(pool, block, index.kind[node])
    else:
        push_free(pool, block)


@compiled
def _own(state: State, block: int, slot: int) -> None:
    state.pool.counters[USED_FULL] += 1
    state.pool.owner[block] = slot + 1
    state.requests.private[slot] += 1


class BlockPool:
    """What may be read of the pool: counts without walking anything, lists for checks."""

    def __init__(self, state: State) -> None:
        self._pool = state.pool
        self.num_blocks = int(state.pool.refs.size)
        self.usable = self.num_blocks - 1
        self.refs = state.pool.refs

    @property
    def free(self) -> int:
        """Blocks without content."""
        return int(self._pool.counters[FREE])

    @property
    def cached(self) -> int:
        """Unreferenced blocks with content, evictable."""
        return int(self._pool.counters[CACHED])

    @property
    def used(self) -> int:
        """Blocks with a reference."""
        return self.usable - self.free - self.cached

    @property
    def used_full(self) -> int:
        """Those of them that stand in tables of full groups."""
        return int(self._pool.counters[USED_FULL])

    def cached_blocks(self, kind: int, *, backward: bool = False) -> list[int]:
        """Cached blocks of a class, the oldest first. O(cached): for checks."""
        links = self._pool.prev if backward else self._pool.next
        order: list[int] = []
        block = int(links[self.num_blocks + kind])
        while block < self.num_blocks and len(order) <= self.num_blocks:
            order.append(block)
            block = int(links[block])
        return order

    def all_cached(self) -> list[int]:
        """Cached blocks of all classes. O(cached): for checks."""
        return [block for kind in range(CLASSES) for block in self.cached_blocks(kind)]

    def free_blocks(self) -> Int32Array:
        """Free blocks, the next to be handed out first. O(free): for checks."""
        order: list[int] = []
        block = int(self._pool.counters[FREE_HEAD])
        while block != NULL_BLOCK and len(order) <= self.num_blocks:
            order.append(block)
            block = int(self._pool.next[block])
        return np.array(order, np.int32)


def check_num_blocks(num_blocks: int) -> None:
    """Raises CacheConfigError where a pool leaves no block to use."""
    if num_blocks < 2:
        raise CacheConfigError(
            f"{num_blocks} blocks leave none to use: block 0 is the null block",
            field="num_blocks",
            hint="at least 2; give the KV pool more memory",
        )
