"""Eviction: which cached block goes next. By what the pool has learned, or by age alone where that was better.

**Lists.** Only blocks whose node has no child may go, so no cached child ever loses its parent, whatever the
order. They stand in one list for each class, in order of release. A class is given to all blocks of a request
when it ends (`tonnage.cache.eviction.reuse`): an origin (prompts, popular blocks, answers) and one of `SCORES`
levels of how often such requests are continued. A node whose last child has gone is listed then, at the end
that its age is nearer.

**Next.** Hit density as a function of age rises and falls once, so the block of a class that is worth least is
the oldest or the youngest. The lowest of these, over all lists, goes first; the older where they are equal. A
request whose blocks go loses its last ones first, and keeps a prefix that can be hit. O(1) a block: the choice
looks at two blocks of each class and holds for the next `RUN` evictions.

**LRU** takes the oldest block of all lists. It is the rule until half as many blocks have been evicted as the
pool has: before, too little has been seen. From then on the pool counts on a sample what it hits and what LRU
would have hit; it returns to LRU while its own count of late is the smaller one by more than `SLACK`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from tonnage.cache.blocks.pool import enlist
from tonnage.cache.blocks.state import BY_RESET, CLASS_MASK, CLOCK_MASK, Core
from tonnage.cache.compiled import inlined, inner
from tonnage.cache.eviction.model import CLASSES, LEARNED, LRU
from tonnage.cache.eviction.reuse import age_level

Eviction = Literal["adaptive", "lru"]

RUN = 32
SLACK = 1 / 64  # of the sample of a full pool: what luck with one or two requests makes
OLDEST, YOUNGEST = 0, 1  # ends of a list


@inner
def choose_rule(core: Core) -> None:
    """A request has begun: follow what has been learned, or LRU."""
    pool, model = core.pool[0], core.model[0]
    if model.learning == 0:
        return
    blocks = pool.num_blocks
    evicted = 0
    for cause in range(BY_RESET):
        evicted += pool.evicted[cause]
    slack = SLACK * (blocks >> model.sample_shift)
    ahead = model.scores[0] - model.scores[1]
    if 2 * evicted < blocks or ahead < -slack:
        model.rule = LRU
    elif ahead >= -slack / 2:
        model.rule = LEARNED


@inlined
def age_of(core: Core, block: int) -> int:
    """Blocks released since the cached block was."""
    pool = core.pool[0]
    return int((pool.clock - core.stamp[block]) & CLOCK_MASK)


@inner
def choose_list(core: Core) -> tuple[int, int, int]:
    """(class, end, blocks) to evict from next; one list has a block."""
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
def enlist_by_age(core: Core, node: int) -> None:
    """The node's last child has gone: to the end of its list that its age is nearer."""
    size = core.pool[0].num_blocks
    oldest = core.next[size + (core.kind[node] & CLASS_MASK)]
    older = oldest >= size or age_of(core, node) >= age_of(core, oldest)
    enlist(core, node, node, OLDEST if older else YOUNGEST)
