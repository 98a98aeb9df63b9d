"""Adaptive eviction: two lists by class, rules for who enters which, simulations that choose the rule.

**Two lists.** Cached blocks are *cold* or *hot*; each list is in order of release. The next to go is the older
of the two oldest, where a hot block ages ``slowness`` times slower than a cold one: 1 is exactly LRU over both,
infinity takes every cold block first. O(1) a block.

**Nothing is orphaned.** A parent is released after its children, and is hot where a child is hot (law 3 of
`tonnage.cache.prefix`). So in one list no parent stands before its child; a cold parent has only cold children;
and a hot parent is chosen only while it is older than every cold block, as slowness >= 1, hence than its
children.

**Rules.** A block that was hit is hot. A request's new blocks become hot, all of them or none, when it ends,
with probability ``share * mean new blocks / its new blocks``: most of a flood of long prompts then passes
through the cold list and cannot wash out what is kept, and of blocks that would all be evicted before their
second use a part stays long enough to be hit. (Insertion at the eviction end: BIP, Qureshi et al., ISCA 2007;
chance by size: AdaptSize, Berger et al., NSDI 2017.) Rule 0 is LRU. The draw is a function of the content.

**Which rule.** No rule is best for every trace and size, so each is simulated at the side on a sample of the
blocks, with the same share of the capacity (spatial sampling by hash: Waldspurger et al., USENIX ATC 2017), and
the pool follows the one that would have hit most lately, measured over `HORIZON` capacities of look-ups. To be
followed instead of LRU a rule must be better by `MARGIN`: the sample is noisy.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from tonnage.cache.compiled import compiled, inlined
from tonnage.cache.state import (
    BLOCK_SIZE,
    CACHED,
    CLASSES,
    CLOCK,
    CLOCK_MASK,
    COLD,
    FREE,
    GHOST_CHAIN,
    GHOST_KIND,
    GHOST_NEXT,
    GHOST_PREV,
    GHOST_TIME,
    GHOSTS,
    HOT,
    KIND,
    LENGTH,
    MARKING,
    NEXT,
    PUBLISHED,
    RULE,
    SAMPLE_SHIFT,
    TIME,
    Core,
)

Eviction = Literal["adaptive", "lru"]

# (share, slowness) by rule; rule 0 is LRU. Shares four apart: what is kept differs little between them.
RULES = ((np.inf, 1.0), (0.0, 4.0), (0.0, np.inf), (1 / 16, np.inf), (1 / 4, np.inf), (1.0, np.inf))
LRU = 0
HORIZON = 8.0
MARGIN = 1.06
MEAN_OF = 64  # requests that the mean of new blocks looks back over


@inlined
def oldest_to_evict(core: Core) -> int:
    """The cached block to forget; one must be cached."""
    blocks = core.blocks
    size = blocks.shape[1] - CLASSES
    cold, hot = int(blocks[NEXT, size + COLD]), int(blocks[NEXT, size + HOT])
    if cold >= size:
        return hot
    if hot >= size:
        return cold
    now = core.counters[CLOCK]
    cold_age = (now - blocks[TIME, cold]) & CLOCK_MASK
    hot_age = (now - blocks[TIME, hot]) & CLOCK_MASK
    return hot if hot_age > cold_age * core.slowness[core.counters[RULE]] else cold


@compiled
def _chance(value: np.uint64) -> float:
    """A number in [0, 1) from a hash, by bits that the sample does not look at."""
    return np.float64(value >> np.uint64(40)) / 16777216.0


@compiled
def mark_row(core: Core, row: int, table: int) -> None:
    """The row's request ends: decide on the class of its new blocks. ``table``: the anchor group."""
    rows, blocks = core.rows, core.blocks
    count = rows[PUBLISHED, row]
    first = count
    while first > 0 and blocks[KIND, core.tables[table, row, first - 1]] == COLD:
        first -= 1
    new = count - first
    if new == 0:
        return
    core.mean_new[0] += (new - core.mean_new[0]) / MEAN_OF
    if _chance(core.hashes[row, count - 1]) * new < core.shares[core.counters[MARKING]] * core.mean_new[0]:
        for at in range(first, count):
            blocks[KIND, core.tables[table, row, at]] = HOT


# -- the simulations -------------------------------------------------------------------------------------------


@inlined
def _ghost_unlink(core: Core, rule: int, entry: int) -> None:
    before, after = core.ghosts[rule, GHOST_PREV, entry], core.ghosts[rule, GHOST_NEXT, entry]
    core.ghosts[rule, GHOST_NEXT, before] = after
    core.ghosts[rule, GHOST_PREV, after] = before


@inlined
def _ghost_push(core: Core, rule: int, entry: int, kind: int) -> None:
    ghosts = core.ghosts
    sentinel = ghosts.shape[2] - CLASSES + kind
    newest = ghosts[rule, GHOST_PREV, sentinel]
    ghosts[rule, GHOST_NEXT, newest] = entry
    ghosts[rule, GHOST_PREV, entry] = newest
    ghosts[rule, GHOST_NEXT, entry] = sentinel
    ghosts[rule, GHOST_PREV, sentinel] = entry
    ghosts[rule, GHOST_KIND, entry] = kind
    ghosts[rule, GHOST_TIME, entry] = core.ghost_counts[rule, 1] & CLOCK_MASK
    core.ghost_counts[rule, 1] += 1


@inlined
def _ghost_find(core: Core, rule: int, value: np.uint64) -> int:
    mask = np.uint64(core.ghost_heads.shape[1] - 1)
    entry = int(core.ghost_heads[rule, (value >> np.uint64(core.constants[SAMPLE_SHIFT])) & mask])
    while entry != 0 and core.ghost_hash[rule, entry] != value:
        entry = int(core.ghosts[rule, GHOST_CHAIN, entry])
    return entry


@compiled
def _ghost_evict(core: Core, rule: int) -> int:
    """Forget the next entry of the rule; its index."""
    ghosts = core.ghosts
    size = ghosts.shape[2] - CLASSES
    cold, hot = int(ghosts[rule, GHOST_NEXT, size + COLD]), int(ghosts[rule, GHOST_NEXT, size + HOT])
    entry = hot if cold >= size else cold
    if cold < size and hot < size:
        now = core.ghost_counts[rule, 1]
        cold_age = (now - ghosts[rule, GHOST_TIME, cold]) & CLOCK_MASK
        hot_age = (now - ghosts[rule, GHOST_TIME, hot]) & CLOCK_MASK
        entry = hot if hot_age > cold_age * core.slowness[rule] else cold
    _ghost_unlink(core, rule, entry)
    mask = np.uint64(core.ghost_heads.shape[1] - 1)
    bucket = (core.ghost_hash[rule, entry] >> np.uint64(core.constants[SAMPLE_SHIFT])) & mask
    if core.ghost_heads[rule, bucket] == entry:
        core.ghost_heads[rule, bucket] = ghosts[rule, GHOST_CHAIN, entry]
    else:
        before = int(core.ghost_heads[rule, bucket])
        while ghosts[rule, GHOST_CHAIN, before] != entry:
            before = int(ghosts[rule, GHOST_CHAIN, before])
        ghosts[rule, GHOST_CHAIN, before] = ghosts[rule, GHOST_CHAIN, entry]
    core.ghost_counts[rule, 0] -= 1
    return entry


@compiled
def observe_start(core: Core, row: int) -> None:
    """A request begins: would each rule have had its prompt? Then choose the rule to follow."""
    if core.constants[GHOSTS] == 0:
        return
    rows, scores, hashes = core.rows, core.scores, core.hashes
    sample = (np.uint64(1) << np.uint64(core.constants[SAMPLE_SHIFT])) - np.uint64(1)
    blocks = (rows[LENGTH, row] - 1) // core.constants[BLOCK_SIZE]
    looked = 0
    for at in range(blocks):
        value = hashes[row, at]
        if value & sample != np.uint64(0):
            continue
        looked += 1
        for rule in range(core.constants[GHOSTS]):
            entry = _ghost_find(core, rule, value)
            if entry != 0:
                scores[rule] += 1.0
                _ghost_unlink(core, rule, entry)
                _ghost_push(core, rule, entry, HOT)
    keep = np.exp(-looked / (HORIZON * (core.ghosts.shape[2] - CLASSES - 1)))
    best, marking = LRU, 1
    for rule in range(core.constants[GHOSTS]):
        scores[rule] *= keep
        if scores[rule] > scores[best]:
            best = rule
        if rule != LRU and scores[rule] > scores[marking]:
            marking = rule
    core.counters[MARKING] = marking
    current = core.counters[RULE]
    if scores[current] < MARGIN * scores[LRU]:
        current = LRU
    if scores[best] > MARGIN * max(scores[LRU], scores[current]) and scores[best] > scores[LRU] + 16.0:
        current = best
    core.counters[RULE] = current


@compiled
def observe_end(core: Core, row: int) -> None:
    """A request ends: each simulation gets its full blocks, the last one first."""
    if core.constants[GHOSTS] == 0:
        return
    ghosts, counts, hashes = core.ghosts, core.ghost_counts, core.hashes
    shift = np.uint64(core.constants[SAMPLE_SHIFT])
    sample = (np.uint64(1) << shift) - np.uint64(1)
    blocks = core.rows[PUBLISHED, row]
    if blocks == 0:
        return
    # What running requests hold cannot be cached: the simulations have the rest, as it is now.
    room = max(1, (core.counters[CACHED] + core.counters[FREE]) >> core.constants[SAMPLE_SHIFT])
    room = min(room, ghosts.shape[2] - CLASSES - 1)
    for rule in range(core.constants[GHOSTS]):
        counts[rule, 4] = 0
    for at in range(blocks):
        if hashes[row, at] & sample == np.uint64(0):
            for rule in range(core.constants[GHOSTS]):
                if _ghost_find(core, rule, hashes[row, at]) == 0:
                    counts[rule, 4] += 1
    chance = _chance(hashes[row, blocks - 1])
    for rule in range(core.constants[GHOSTS]):
        new, most = counts[rule, 4] << core.constants[SAMPLE_SHIFT], core.shares[rule] * core.mean_new[0]
        counts[rule, 4] = HOT if chance * new < most else COLD
    for at in range(blocks - 1, -1, -1):
        if hashes[row, at] & sample == np.uint64(0):
            for rule in range(core.constants[GHOSTS]):
                _ghost_keep(core, rule, hashes[row, at], counts[rule, 4])
    for rule in range(core.constants[GHOSTS]):
        while counts[rule, 0] > room:
            entry = _ghost_evict(core, rule)
            ghosts[rule, GHOST_CHAIN, entry] = counts[rule, 2]
            counts[rule, 2] = entry


@compiled
def _ghost_keep(core: Core, rule: int, value: np.uint64, kind: int) -> None:
    """The block is released: to the young end of its class."""
    ghosts, counts = core.ghosts, core.ghost_counts
    entry = _ghost_find(core, rule, value)
    if entry != 0:
        _ghost_unlink(core, rule, entry)
        _ghost_push(core, rule, entry, max(kind, ghosts[rule, GHOST_KIND, entry]))
        return
    if counts[rule, 0] >= ghosts.shape[2] - CLASSES - 1:
        entry = _ghost_evict(core, rule)
    elif counts[rule, 2] != 0:  # an entry given back when the room had shrunk
        entry = int(counts[rule, 2])
        counts[rule, 2] = ghosts[rule, GHOST_CHAIN, entry]
    else:
        counts[rule, 3] += 1
        entry = int(counts[rule, 3])
    counts[rule, 0] += 1
    core.ghost_hash[rule, entry] = value
    shift, mask = np.uint64(core.constants[SAMPLE_SHIFT]), np.uint64(core.ghost_heads.shape[1] - 1)
    bucket = (value >> shift) & mask
    ghosts[rule, GHOST_CHAIN, entry] = core.ghost_heads[rule, bucket]
    core.ghost_heads[rule, bucket] = entry
    _ghost_push(core, rule, entry, kind)
