"""The block pool: reference counts, the free stack, the eviction lists and the owner of each block.

Every block except the null block is in exactly one state:

- *used*: its reference count is above 0;
- *cached*: unreferenced, and its content is in the prefix index; if it may be evicted, it is in the eviction
  list of its class;
- *free*: unreferenced and without content; it is on the free stack and reused first (LIFO).

Only the functions here change reference counts, lists and owners. Blocks of full-attention groups are counted
per request (`tonnage.cache.admission.snapshot`). The functions check nothing: their callers guarantee that a
block is available. There is no object per block, only arrays of ints.
"""

from __future__ import annotations

import numpy as np

from tonnage.cache.blocks.state import (
    CLASS_MASK,
    CLOCK_MASK,
    NULL_BLOCK,
    ONE_CHILD,
    Core,
    Evictable,
    columns,
)
from tonnage.cache.compiled import inlined
from tonnage.cache.errors import CacheConfigError


@inlined
def push_free(core: Core, block: int) -> None:
    """Push a block onto the free stack, as the next block to be handed out."""
    pool = core.pool[0]
    core.next[block] = pool.free_head
    pool.free_head = block
    pool.free += 1


@inlined
def enlist(core: Evictable, block: int, node: int, end: int) -> None:
    """Insert a cached block into its class's eviction list, at the young end (``end`` 1) or old end (0)."""
    pool, kind = core.pool[0], core.kind[node] & CLASS_MASK
    sentinel = pool.num_blocks + kind
    before = core.prev[sentinel] if end == 1 else sentinel
    after = core.next[before]
    core.next[before] = core.prev[after] = block
    core.prev[block], core.next[block] = before, after
    pool.lists |= np.int64(1) << np.int64(kind)


@inlined
def unlink(core: Evictable, block: int) -> None:
    """Remove a cached block from its eviction list, if any, and from the number of cached blocks."""
    pool, after = core.pool[0], core.next[block]
    if after != NULL_BLOCK:
        before = core.prev[block]
        core.next[before], core.prev[after] = after, before
        if before == after and before >= pool.num_blocks:
            pool.lists &= ~(np.int64(1) << np.int64(before - pool.num_blocks))
    pool.cached -= 1


@inlined
def uncache(core: Core, block: int) -> None:
    """Turn a cached block that has left the prefix index into a free block."""
    unlink(core, block)
    push_free(core, block)


@inlined
def pop_free(core: Core, full: bool, slot: int) -> int:
    """Pop a block from the free stack for the request with index ``slot``; set its reference count to 1.

    ``full`` says that the block is for a full-attention group, whose blocks are counted per request.
    """
    pool = core.pool[0]
    block = int(pool.free_head)
    pool.free_head = core.next[block]
    pool.free -= 1
    core.refs[block] = 1
    core.stamp[block] = 0
    if full:
        _own(core, block, slot)
        core.requests[slot].held += 1
    return block


@inlined
def acquire(core: Core, block: int, full: bool, slot: int) -> None:
    """Add one to a block's reference count; a cached block leaves its eviction list."""
    if core.refs[block] == 0:
        unlink(core, block)
        core.stamp[block] = 0
        if full:
            _own(core, block, slot)
    elif full and core.stamp[block] != 0 and core.stamp[block] != slot + 1:
        core.requests[core.stamp[block] - 1].private -= 1
        core.stamp[block] = 0
    core.refs[block] += 1


@inlined
def release(core: Core, block: int, full: bool, slot: int) -> None:
    """Subtract one from a block's reference count; at 0 the block becomes cached or free.

    It becomes cached if it is in the prefix index. A node is an entry of that index. A cached block is listed
    for eviction unless its node has child nodes. The blocks of a node in several full-attention groups are
    evicted together, so only the node's first block is listed.
    """
    core.refs[block] -= 1
    if core.refs[block] > 0:
        return
    pool = core.pool[0]
    if full:
        pool.used_full -= 1
        if core.stamp[block] != 0:
            core.requests[slot].private -= 1
            core.stamp[block] = 0
    node = core.node_of[block]
    if node != NULL_BLOCK:
        core.stamp[block] = pool.clock & CLOCK_MASK
        pool.clock += 1
        pool.cached += 1
        if not full or (block == node and core.kind[node] < ONE_CHILD):
            enlist(core, block, node, 1)
        else:
            core.next[block] = NULL_BLOCK
    else:
        push_free(core, block)


@inlined
def _own(core: Core, block: int, slot: int) -> None:
    """Count a newly used block of a full-attention group as held only by the request with index ``slot``."""
    core.pool[0].used_full += 1
    core.stamp[block] = slot + 1
    core.requests[slot].private += 1


class BlockPool:
    """A read-only view of the pool's numbers of free, cached and used KV blocks."""

    def __init__(self, core: Core) -> None:
        self._counts = columns(core.pool)
        self.num_blocks = int(core.refs.size)
        self.usable = self.num_blocks - 1
        self.refs = core.refs

    @property
    def free(self) -> int:
        """Number of the pool's blocks that hold no K/V, neither in use nor cached."""
        return int(self._counts.free[0])

    @property
    def cached(self) -> int:
        """Number of the pool's blocks that only the prefix cache holds, so that they can be evicted."""
        return int(self._counts.cached[0])

    @property
    def used(self) -> int:
        """Number of the pool's blocks that at least one sequence references."""
        return self.usable - self.free - self.cached


def check_num_blocks(num_blocks: int) -> None:
    """Raise CacheConfigError if a pool of ``num_blocks`` KV blocks has none beside the null block."""
    if num_blocks < 2:
        raise CacheConfigError(
            f"a pool of {num_blocks} blocks has no usable block: block 0 is the null block",
            field="num_blocks",
            hint="at least 2 blocks; give the KV pool more memory",
        )
