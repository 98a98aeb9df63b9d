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
    CLASS_MASK,
    CLOCK_MASK,
    NULL_BLOCK,
    ONE_CHILD,
    Core,
    columns,
)
from tonnage.cache.compiled import inlined
from tonnage.cache.errors import CacheConfigError


@inlined
def push_free(core: Core, block: int) -> None:
    """Onto the free stack: the next to be handed out."""
    pool = core.pool[0]
    core.next[block] = pool.free_head
    pool.free_head = block
    pool.free += 1


@inlined
def enlist(core: Core, block: int, node: int, end: int) -> None:
    """A cached block may be evicted from now on: into the list of its node's class, at its young end (1) or old
    end (0)."""
    pool, kind = core.pool[0], core.kind[node] & CLASS_MASK
    sentinel = pool.num_blocks + kind
    before = core.prev[sentinel] if end == 1 else sentinel
    after = core.next[before]
    core.next[before] = core.prev[after] = block
    core.prev[block], core.next[block] = before, after
    pool.lists |= np.int64(1) << np.int64(kind)


@inlined
def unlink(core: Core, block: int) -> None:
    """Out of the list of its class, if it is in one: cached no more."""
    pool, after = core.pool[0], core.next[block]
    if after != NULL_BLOCK:
        before = core.prev[block]
        core.next[before], core.prev[after] = after, before
        if before == after and before >= pool.num_blocks:
            pool.lists &= ~(np.int64(1) << np.int64(before - pool.num_blocks))
    pool.cached -= 1


@inlined
def uncache(core: Core, block: int) -> None:
    """Cached -> free: the prefix index has forgotten the block."""
    unlink(core, block)
    push_free(core, block)


@inlined
def pop_free(core: Core, full: bool, slot: int) -> int:
    """A free block, reference count 1, for a request's table; ``full``: of a full group."""
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
    """One more reference; a cached block leaves its list."""
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
    """One reference less. The last one makes the block cached where it is in the prefix index, else free.

    A cached block is listed unless its node has children; of a node's blocks in full groups only its own, as
    they are evicted together."""
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
    core.pool[0].used_full += 1
    core.stamp[block] = slot + 1
    core.requests[slot].private += 1


class BlockPool:
    """What may be read of the pool: counts. Its lists: `tonnage.cache.laws.readers`."""

    def __init__(self, core: Core) -> None:
        self._counts = columns(core.pool)
        self.num_blocks = int(core.refs.size)
        self.usable = self.num_blocks - 1
        self.refs = core.refs

    @property
    def free(self) -> int:
        """Blocks without content."""
        return int(self._counts.free[0])

    @property
    def cached(self) -> int:
        """Unreferenced blocks with content, evictable."""
        return int(self._counts.cached[0])

    @property
    def used(self) -> int:
        """Blocks with a reference."""
        return self.usable - self.free - self.cached

    @property
    def used_full(self) -> int:
        """Those of them that stand in tables of full groups."""
        return int(self._counts.used_full[0])


def check_num_blocks(num_blocks: int) -> None:
    """Raises CacheConfigError where a pool leaves no block to use."""
    if num_blocks < 2:
        raise CacheConfigError(
            f"{num_blocks} blocks leave none to use: block 0 is the null block",
            field="num_blocks",
            hint="at least 2; give the KV pool more memory",
        )
