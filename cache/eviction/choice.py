"""The choice of the next cached KV block to evict: by learned reuse, or by LRU where LRU had more hits.

**Lists.** A node is a block in the prefix index. Only nodes without children may be evicted, so no cached child
loses its parent. There is one list per class, in order of release. All blocks of a request get a class when the
request ends (`tonnage.cache.eviction.reuse`). A class combines an origin (prompts, popular blocks, answers)
with one of `SCORES` levels of how often such requests are continued. A node whose last child is evicted enters
its list, at the end that is closer to the node's age.

**Choice.** The value of a block is its hit density: expected hits per unit of time in memory. As a function of
the block's age, it rises once and then falls. The least valuable block of a class is therefore its oldest or
its youngest. The candidate with the lowest density is evicted first; of equal candidates, the oldest. A request
loses its last blocks first and keeps a prefix that can be hit. The cost is O(1) per block: a choice looks at
two blocks of each class and holds for the next `RUN` evictions.

**LRU** evicts the oldest block of all lists. `tonnage.cache.eviction.reuse.choose_rule` chooses between both.
"""

from __future__ import annotations

import math

import numpy as np

from tonnage.cache.blocks.pool import enlist
from tonnage.cache.blocks.state import CLASS_MASK, CLOCK_MASK, NULL_BLOCK, ONE_CHILD, ROOT, Evictable
from tonnage.cache.compiled import inlined, inner
from tonnage.cache.eviction.model import AGES, CLASSES, LEARNED, PER_OCTAVE, YOUNG_PART

RUN = 32
OLDEST, YOUNGEST = 0, 1  # the two ends of an eviction list


@inlined
def age_level(age: int, blocks: int) -> int:
    """Return the level, 0 to AGES - 1, of a cached block's age on a logarithmic scale.

    ``age`` is the number of blocks released since the block's own release; ``blocks`` is the size of the pool.
    """
    unit = blocks / YOUNG_PART
    if age < unit:
        return 0
    return min(AGES - 1, 1 + int(PER_OCTAVE * math.log2(age / unit)))


@inlined
def age_of(core: Evictable, block: int) -> int:
    """Return the age of a cached block: the number of blocks released since its own release."""
    pool = core.pool[0]
    return int((pool.clock - core.stamp[block]) & CLOCK_MASK)


@inner
def choose_list(core: Evictable) -> tuple[int, int, int]:
    """Return the class of the eviction list to evict from, the end to use, and how many blocks to evict there.

    At least one list must not be empty.
    """
    pool, model = core.pool[0], core.model[0]
    lists, learned, size = pool.lists, model.rule == LEARNED, pool.num_blocks
    best, best_end, lowest, oldest = -1, OLDEST, np.inf, -1
    for kind in range(CLASSES):
        if (lists >> kind) & 1 == 0:
            continue
        for end in range(2 if learned else 1):
            age = age_of(core, core.next[size + kind] if end == OLDEST else core.prev[size + kind])
            worth = model.density[kind, age_level(age, size)] if learned else 0.0
            if worth < lowest or (worth == lowest and age > oldest):
                best, best_end, lowest, oldest = kind, end, worth, age
    return best, best_end, RUN if learned else 1


@inlined
def enlist_by_age(core: Evictable, node: int) -> None:
    """Add a cached node without children to its class's eviction list, at the end closer to its age.

    It is called when the node's last child has been evicted.
    """
    size = core.pool[0].num_blocks
    oldest = core.next[size + (core.kind[node] & CLASS_MASK)]
    older = oldest >= size or age_of(core, node) >= age_of(core, oldest)
    enlist(core, node, node, OLDEST if older else YOUNGEST)


@inlined
def leave_parent(core: Evictable, node: int) -> None:
    """Subtract a node from its parent's child count; list the parent for eviction if it may be evicted now."""
    parent = core.parent[node]
    if parent != ROOT:
        core.kind[parent] -= ONE_CHILD
        if core.kind[parent] < ONE_CHILD and core.refs[parent] == 0:
            enlist_by_age(core, parent)


@inlined
def unhash(core: Evictable, node: int) -> None:
    """Remove a node from its hash bucket, if it is in the bucket."""
    bucket = int(core.node_hash[node] & np.uint64(core.heads.size - 1))
    at = int(core.heads[bucket])
    if at == node:
        core.heads[bucket] = core.chain[node]
    else:
        while at != NULL_BLOCK and core.chain[at] != node:
            at = int(core.chain[at])
        if at != NULL_BLOCK:
            core.chain[at] = core.chain[node]
    core.chain[node] = NULL_BLOCK
