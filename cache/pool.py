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

from tonnage.cache.compiled import inlined
from tonnage.cache.errors import CacheConfigError
from tonnage.cache.state import (
    CACHED,
    CLASSES,
    CLOCK,
    CLOCK_MASK,
    FREE,
    FREE_HEAD,
    KIND,
    NEXT,
    NODE_OF,
    NULL_BLOCK,
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


@inlined
def push_free(core: Core, block: int) -> None:
    """Onto the free stack: the next to be handed out."""
    blocks, counters = core.blocks, core.counters
    blocks[NEXT, block] = counters[FREE_HEAD]
    counters[FREE_HEAD] = block
    counters[FREE] += 1


@inlined
def push_cached(core: Core, block: int, kind: int) -> None:
    """To the young end of its class."""
    blocks, counters = core.blocks, core.counters
    sentinel = blocks.shape[1] - CLASSES + kind
    newest = blocks[PREV, sentinel]
    blocks[NEXT, newest] = block
    blocks[PREV, block] = newest
    blocks[NEXT, block] = sentinel
    blocks[PREV, sentinel] = block
    blocks[TIME, block] = counters[CLOCK] & CLOCK_MASK
    counters[CLOCK] += 1
    counters[CACHED] += 1


@inlined
def unlink(core: Core, block: int) -> None:
    """Out of the list of its class."""
    blocks = core.blocks
    before, after = blocks[PREV, block], blocks[NEXT, block]
    blocks[NEXT, before] = after
    blocks[PREV, after] = before
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
    """One reference less. The last one makes the block cached where it is in the prefix index, else free."""
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
        push_cached(core, block, blocks[KIND, node])
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
