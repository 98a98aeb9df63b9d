"""The block pool: who holds which block. Three states, arrays of ints, no object per block.

Every block but the null block is in exactly one state:

- *used*: reference count > 0;
- *cached*: unreferenced, but its content is in the prefix index; in the list of its class if it may be evicted;
- *free*: unreferenced and without content worth keeping; on the free stack, reused first (LIFO).

The functions here are the only ones that change reference counts, lists and who owns a block; blocks of full
groups are counted per request, as `tonnage.cache.admission.snapshot` says. They check nothing: their callers
have made sure that a block is there.
"""

from __future__ import annotations

import numpy as np

from tonnage.cache.blocks.state import (
    CACHED,
    CLASS_MASK,
    CLASSES,
    CLOCK,
    CLOCK_MASK,
    FREE,
    FREE_HEAD,
    KIND,
    LISTS,
    NEXT,
    NODE_OF,
    NULL_BLOCK,
    ONE_CHILD,
    OWNER,
    PREV,
    PRIVATE,
    REFS,
    TIME,
    USED_FULL,
    Core,
    Int32Array,
    State,
)
from tonnage.cache.compiled import inlined
from tonnage.cache.errors import CacheConfigError


@inlined
def push_free(core: Core, block: int) -> None:
    """Onto the free stack: the next to be handed out."""
    blocks, counters = core.blocks, core.counters
    blocks[NEXT, block] = counters[FREE_HEAD]
    counters[FREE_HEAD] = block
    counters[FREE] += 1


@inlined
def enlist(core: Core, block: int, node: int, end: int) -> None:
    """A cached block may be evicted from now on: into the list of its node's class, at its young end (1) or old
    end (0)."""
    blocks = core.blocks
    kind = blocks[KIND, node] & CLASS_MASK
    sentinel = blocks.shape[1] - CLASSES + kind
    before = blocks[PREV, sentinel] if end == 1 else sentinel
    after = blocks[NEXT, before]
    blocks[NEXT, before] = blocks[PREV, after] = block
    blocks[PREV, block], blocks[NEXT, block] = before, after
    core.counters[LISTS] |= np.int64(1) << np.int64(kind)


@inlined
def unlink(core: Core, block: int) -> None:
    """Out of the list of its class, if it is in one: cached no more."""
    blocks = core.blocks
    after = blocks[NEXT, block]
    if after != NULL_BLOCK:
        before = blocks[PREV, block]
        blocks[NEXT, before], blocks[PREV, after] = after, before
        size = blocks.shape[1] - CLASSES
        if before == after and before >= size:
            core.counters[LISTS] &= ~(np.int64(1) << np.int64(before - size))
    core.counters[CACHED] -= 1


@inlined
def uncache(core: Core, block: int) -> None:
    """Cached -> free: the prefix index has forgotten the block."""
    unlink(core, block)
    push_free(core, block)


@inlined
def pop_free(core: Core, full: bool, slot: int) -> int:
    """A free block, reference count 1, for a request's table; ``full``: of a full group."""
    blocks, counters = core.blocks, core.counters
    block = int(counters[FREE_HEAD])
    counters[FREE_HEAD] = blocks[NEXT, block]
    counters[FREE] -= 1
    blocks[REFS, block] = 1
    blocks[OWNER, block] = 0
    if full:
        _own(core, block, slot)
    return block


@inlined
def acquire(core: Core, block: int, full: bool, slot: int) -> None:
    """One more reference; a cached block leaves its list."""
    blocks = core.blocks
    if blocks[REFS, block] == 0:
        unlink(core, block)
        blocks[OWNER, block] = 0
        if full:
            _own(core, block, slot)
    elif full and blocks[OWNER, block] != 0 and blocks[OWNER, block] != slot + 1:
        core.requests[PRIVATE, blocks[OWNER, block] - 1] -= 1
        blocks[OWNER, block] = 0
    blocks[REFS, block] += 1


@inlined
def release(core: Core, block: int, full: bool, slot: int) -> None:
    """One reference less. The last one makes the block cached where it is in the prefix index, else free.

    A cached block is listed unless its node has children; of a node's blocks in full groups only its own, as
    they are evicted together."""
    blocks = core.blocks
    blocks[REFS, block] -= 1
    if blocks[REFS, block] > 0:
        return
    if full:
        core.counters[USED_FULL] -= 1
        if blocks[OWNER, block] != 0:
            core.requests[PRIVATE, slot] -= 1
            blocks[OWNER, block] = 0
    node = blocks[NODE_OF, block]
    if node != NULL_BLOCK:
        blocks[TIME, block] = core.counters[CLOCK] & CLOCK_MASK
        core.counters[CLOCK] += 1
        core.counters[CACHED] += 1
        if not full or (block == node and blocks[KIND, node] < ONE_CHILD):
            enlist(core, block, node, 1)
        else:
            blocks[NEXT, block] = NULL_BLOCK
    else:
        push_free(core, block)


@inlined
def _own(core: Core, block: int, slot: int) -> None:
    core.counters[USED_FULL] += 1
    core.blocks[OWNER, block] = slot + 1
    core.requests[PRIVATE, slot] += 1


class BlockPool:
    """What may be read of the pool: counts without walking anything, lists for checks."""

    def __init__(self, state: State) -> None:
        self._pool = state.pool
        self._node_of = state.index.node_of
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

    def listed(self, kind: int, *, backward: bool = False) -> list[int]:
        """Blocks of a class that may be evicted, the oldest first. O(cached): for checks."""
        links = self._pool.prev if backward else self._pool.next
        order: list[int] = []
        block = int(links[self.num_blocks + kind])
        while block < self.num_blocks and len(order) <= self.num_blocks:
            order.append(block)
            block = int(links[block])
        return order

    def all_cached(self) -> list[int]:
        """Cached blocks, listed or not. O(pool): for checks."""
        cached: list[int] = np.flatnonzero((self.refs == 0) & (self._node_of != NULL_BLOCK)).tolist()
        return cached

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
