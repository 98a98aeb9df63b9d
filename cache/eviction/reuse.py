"""Learned reuse: a model of how soon and how often cached KV blocks of a kind are requested again.

**History.** Every release of a sampled block is written to a ring that covers `REACH` times the pool's
capacity. Blocks are sampled by hash (Waldspurger et al., USENIX ATC 2017). Reuse of blocks that were evicted
long ago is therefore observed too, and no block has to be kept in the pool only to observe its reuse.

**Model.** Proportional hazards (Cox 1972), fitted to the ring every `EVERY` requests. The chance that a block
is requested in the next moment is ``hazard(origin, age) * turn factor * answer factor``. The age of a block is
the number of blocks released after it, on a scale of `PER_OCTAVE` steps per doubling. A block that has not
been requested again is a censored observation at its current age.

The two factors depend on the request that released the block last. One factor is for the request's conversation
turn. It is one more than the turn of the request that first wrote the last prefix block found in the ring. The
other factor is for the length of the request's answer.

Origins are *prompts*, *popular* blocks (hit more often than their request has turns: system prompts, documents)
and *answers*. With few observations the factors are 1 and the hazards make LRU optimal.

**Density.** The value of a block of some age is the largest ratio of expected hits to block-time, over all
times at which its stay could end (hit density: Beckmann et al., NSDI 2018). It need not fall with age: users
need time to reply, so a block can be worth more half a minute after its release than at once.

Two counts of hits are kept for the sampled blocks: the pool's own hits, and the hits that LRU would have. The
blocks that LRU would hold are the youngest part of the ring. `choose_rule` returns to LRU when the first count
is smaller by more than `SLACK` times the number of sampled blocks of a full pool. It leaves LRU when the first
count is smaller by at most half of that. LRU is also in effect until the number of evictions reaches half the
pool's blocks, since too little has been observed before.
"""

from __future__ import annotations

import math

import numpy as np

from tonnage.cache.blocks.state import BY_RESET, CLASS_MASK, CLOCK_MASK, Evictable, Int32Array, UInt64Array
from tonnage.cache.compiled import inlined, inner
from tonnage.cache.eviction.choice import age_level
from tonnage.cache.eviction.model import (
    AGES,
    ANSWERS,
    LEARNED,
    LEVELS,
    LRU,
    ORIGINS,
    PER_OCTAVE,
    POPULAR,
    PROMPTS,
    SCORES,
    WEIGHT_STEPS,
    YOUNG_PART,
)

EVERY = 32  # number of requests between two fits of the model
LOWEST, HIGHEST = 0.25, 8.0  # reuse relative to the mean, in the lowest and the highest class
PRIOR_REQUESTS = 15.0  # weight of each factor's prior (mean reuse), as a number of requests
PRIOR_EVENTS = 1.25  # weight of the hazard's prior at each age, as a number of reuses
LEVEL_UNTIL = 2.0  # age, in capacities of the pool, up to which the prior hazard is constant
NEIGHBOURS = 2  # number of ages on each side over which a hazard is averaged
# The hit counts of the pool and of simulated LRU decay by a factor of e while requests look up HORIZON times as
# many blocks as the pool has.
HORIZON = 1.0

# LRU takes over if its simulated hits exceed the pool's own hits by more than this share of the sampled blocks
# of a full pool. That is about as many blocks as 1 or 2 requests have.
SLACK = 1 / 64

# Status of a history entry: unused, released and not requested again, requested again, replaced by a later
# release.
NEVER, LIVING, REUSED, ENDED = range(4)


@inlined
def _age_start(level: int, blocks: int) -> float:
    return 0.0 if level == 0 else blocks / YOUNG_PART * math.pow(2.0, (level - 1) / PER_OCTAVE)


@inlined
def _answer_level(tokens: int) -> int:
    """Return the level, 0 to 6, of an answer's length.

    The limits of the levels grow by a factor of 4 up to 128 tokens, and of 2 from there on.
    """
    if tokens < 2:
        return 0
    if tokens < 8:
        return 1
    if tokens < 32:
        return 2
    if tokens < 128:
        return 3
    return 4 if tokens < 256 else 5 if tokens < 512 else 6


@inlined
def _score_class(factor: float) -> int:
    """Return the class, 0 to SCORES - 1, of blocks that are reused ``factor`` times as often as the mean."""
    place = math.log(factor / LOWEST) / math.log(HIGHEST / LOWEST) * (SCORES - 1)
    return min(SCORES - 1, max(0, math.floor(place + 0.5)))


@inlined
def _class_factor(score: int) -> float:
    return LOWEST * math.pow(HIGHEST / LOWEST, score / (SCORES - 1))


# -- the history -------------------------------------------------------------------------------------------


@inlined
def _find(core: Evictable, value: np.uint64) -> int:
    """Return the history index of the last release of the block with hash ``value``, or -1 if there is none."""
    tag = int(value >> np.uint64(33))
    entry = int(core.history_heads[tag & (core.history_heads.size - 1)]) - 1
    while entry >= 0 and core.history[entry].tag != tag:
        entry = int(core.history[entry].link) - 1
    return entry


@inner
def _unlink(core: Evictable, entry: int) -> None:
    """Remove an entry of the release history from its hash bucket, if it is there; keep its other fields."""
    heads = core.history_heads
    bucket = core.history[entry].tag & (heads.size - 1)
    at = int(heads[bucket]) - 1
    if at == entry:
        heads[bucket] = core.history[entry].link
        return
    while at >= 0:
        after = int(core.history[at].link) - 1
        if after == entry:
            core.history[at].link = core.history[entry].link
            return
        at = after


@inlined
def _lru_has(core: Evictable, entry: int) -> bool:
    """Return whether LRU eviction would still cache the block whose release is recorded in ``entry``."""
    model = core.model[0]
    back = (model.at - 1 - entry) % core.history.size
    return bool(core.history[entry].status == LIVING and back < model.span)


@inner
def _end(core: Evictable, entry: int, status: int) -> None:
    """Set status and final age of a release-history entry whose block was requested or released again."""
    pool, model = core.pool[0], core.model[0]
    if _lru_has(core, entry):
        model.alive -= 1
    age = (pool.clock - core.history[entry].born) & CLOCK_MASK
    core.history[entry].status = status
    core.history[entry].age = age_level(age, pool.num_blocks)


@inner
def _shrink(core: Evictable) -> None:
    """Drop the oldest blocks from LRU's simulated cache until the rest fits the blocks not in use."""
    pool, model = core.pool[0], core.model[0]
    room = (pool.cached + pool.free) >> model.sample_shift
    while model.alive > room:
        oldest = (model.at - model.span) % core.history.size
        if core.history[oldest].status == LIVING:
            model.alive -= 1
        model.span -= 1


@inner
def observe_start(core: Evictable, hashes: UInt64Array, table: Int32Array, length: int, hit: int) -> int:
    """Record the start of a request for the model of block reuse, and return the request's conversation turn.

    History entries of earlier releases of its blocks are marked as reused. The turn is 0 while learning is off.

    Args:
        core: The arrays of eviction.
        hashes: uint64 [full blocks]: hashes of the full blocks of the prompt.
        table: int32 [hit]: cached blocks of the prefix hit, before the request references them.
        length: Length of the prompt in tokens.
        hit: Number of blocks of the prefix hit.
    """
    pool, model = core.pool[0], core.model[0]
    if model.learning == 0:
        return 0
    sample = (np.uint64(1) << np.uint64(model.sample_shift)) - np.uint64(1)
    blocks = (length - 1) // pool.block_size
    _shrink(core)
    looked, own, lru, turn = 0, 0, 0, 0
    # ``known``: all blocks so far are in the history; ``kept``: LRU would still have all of them cached
    known, kept = True, True
    for at in range(blocks):
        if hashes[at] & sample != np.uint64(0):
            continue
        looked += 1
        if at < hit:
            own += 1
        elif not known and not kept:
            continue
        entry = _find(core, hashes[at])
        held = at < hit and core.refs[table[at]] > 0
        kept = kept and (held or (entry >= 0 and _lru_has(core, entry)))
        if kept:
            lru += 1
        known = known and entry >= 0
        if known:
            turn = int(core.history[entry].first_turn)
            core.history[entry].hits = min(255, int(core.history[entry].hits) + 1)
            if core.history[entry].status == LIVING:
                _end(core, entry, REUSED)
    sampled = pool.num_blocks >> model.sample_shift
    decay = math.exp(-looked / (HORIZON * sampled))
    model.scores[0] = (model.scores[0] + own) * decay
    model.scores[1] = (model.scores[1] + lru) * decay
    model.started += 1
    if model.started % EVERY == 0:
        fit(core)
    return turn + 1


@inner
def choose_rule(core: Evictable) -> None:
    """Choose between learned eviction and LRU by their hits so far, at the start of a request."""
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


@inner
def worth_of_new(core: Evictable, hashes: UInt64Array) -> float:
    """Return the hit density that the new blocks of a running request will have when the request ends.

    ``hashes`` are those of the full blocks of its prompt. The conversation turn is derived from the leading
    blocks that are in the release history, as in `observe_start`. The answer's length is not known yet.
    """
    model = core.model[0]
    sample = (np.uint64(1) << np.uint64(model.sample_shift)) - np.uint64(1)
    turn = 0
    for at in range(hashes.size):
        if hashes[at] & sample != np.uint64(0):
            continue
        entry = _find(core, hashes[at])
        if entry < 0:
            break
        turn = int(core.history[entry].first_turn)
    score = _score_class(model.factors[0, min(turn + 1, LEVELS) - 1])
    return float(model.density[PROMPTS * SCORES + score, 0])


@inner
def observe_end(
    core: Evictable, hashes: UInt64Array, table: Int32Array, count: int, prompt: int, length: int, turn: int
) -> None:
    """Assign eviction classes to the full blocks of a request that ends; add its sampled blocks to the history.

    Args:
        core: The arrays of eviction.
        hashes: uint64 [count]: hashes of the request's full blocks.
        table: int32 [count]: the request's full blocks.
        count: Number of full blocks.
        prompt: Length of the prompt in tokens.
        length: Length of prompt and output in tokens.
        turn: Conversation turn, the result of `observe_start`.
    """
    pool, model = core.pool[0], core.model[0]
    if model.learning == 0 or count == 0:
        return
    asked = min(count, int(prompt // pool.block_size))
    turn = max(1, int(turn))
    turn_level, answer_level = min(turn, LEVELS) - 1, _answer_level(length - prompt)
    score = _score_class(model.factors[0, turn_level] * model.factors[1, answer_level])
    # The weight makes all requests count equally in the fit, however many blocks they have.
    weight = int(WEIGHT_STEPS * math.log2(asked + 1) + 0.5)
    sample = (np.uint64(1) << np.uint64(model.sample_shift)) - np.uint64(1)
    popular = 0
    # in order of release (last block first), as LRU evicts the block released first
    for at in range(count - 1, -1, -1):
        if hashes[at] & sample != np.uint64(0):
            continue
        first, hits = turn, 0
        old = _find(core, hashes[at])
        if old >= 0:
            first, hits = int(core.history[old].first_turn), int(core.history[old].hits)
            if core.history[old].status == LIVING:
                _end(core, old, ENDED)
            _unlink(core, old)
        origin = ANSWERS if at >= asked else POPULAR if hits > turn else PROMPTS
        if origin == POPULAR and popular == 0:
            popular = at + 1
        entry = _write(core, hashes[at])
        core.history[entry].origin, core.history[entry].turn_level = origin, turn_level
        core.history[entry].answer_level, core.history[entry].weight = answer_level, weight
        core.history[entry].first_turn, core.history[entry].hits = min(first, 255), hits
    for at in range(count):
        origin = ANSWERS if at >= asked else POPULAR if at < popular else PROMPTS
        core.kind[table[at]] = (core.kind[table[at]] & ~CLASS_MASK) | (origin * SCORES + score)


@inner
def _write(core: Evictable, value: np.uint64) -> int:
    """Replace the oldest history entry by one for a block that is released now, and return its index."""
    pool, model = core.pool[0], core.model[0]
    heads = core.history_heads
    size, entry = core.history.size, int(model.at)
    if core.history[entry].status != NEVER:
        _unlink(core, entry)
    if model.span == size:
        if core.history[entry].status == LIVING:
            model.alive -= 1
        model.span -= 1
    tag = int(value >> np.uint64(33))
    bucket = tag & (heads.size - 1)
    core.history[entry].tag, core.history[entry].link = tag, heads[bucket]
    core.history[entry].born = pool.clock & CLOCK_MASK
    heads[bucket] = entry + 1
    core.history[entry].status = LIVING
    model.at = (entry + 1) % size
    model.span += 1
    model.alive += 1
    return entry


# -- the model ---------------------------------------------------------------------------------------------


@inner
def fit(core: Evictable) -> None:
    """Fit the model of block reuse to the whole release history, starting from the factors of the last fit."""
    pool, model = core.pool[0], core.model[0]
    factors, events, lived = model.factors, model.events, model.lived
    blocks = pool.num_blocks
    for age in range(AGES):
        model.widths[age] = _age_start(age + 1, blocks) - _age_start(age, blocks)
    events[:] = 0.0
    lived[:] = 0.0
    for at in range(core.history.size):
        entry = core.history[at]
        if entry.status == NEVER:
            continue
        if entry.status == LIVING:  # a block that was not requested again is censored at its current age
            entry.age = age_level((pool.clock - entry.born) & CLOCK_MASK, blocks)
        origin, age, weight = entry.origin, entry.age, model.weights[entry.weight]
        if entry.status == REUSED:
            events[origin, age] += weight
        if origin != POPULAR:
            weight *= factors[0, entry.turn_level] * factors[1, entry.answer_level]
        lived[origin, age] += weight
    scale = float(1 << model.sample_shift)
    for origin in range(ORIGINS):
        _fit_hazard(core, origin, scale)
    for factor in range(2):
        _fit_factor(core, factor, scale)
    for origin in range(ORIGINS):
        for score in range(SCORES):
            _fit_density(core, origin, score)


@inner
def _fit_hazard(core: Evictable, origin: int, scale: float) -> None:
    """Fit the hazard of one origin at each age: the number of reuses divided by the block-time at that age.

    ``scale`` is the number of blocks per sampled block. The model's array ``lived`` [ages] holds the weight of
    history entries that ended at each age. The function overwrites it by the block-time spent at that age.
    """
    model = core.model[0]
    events, lived, hazard = model.events[origin], model.lived[origin], model.hazard[origin]
    beyond = reused = expected = 0.0
    for age in range(AGES - 1, -1, -1):
        ended = lived[age] * scale
        lived[age] = (beyond + 0.5 * ended) * model.widths[age]
        beyond += ended
        events[age] *= scale
        reused += events[age]
        expected += lived[age] * _lru_hazard(age)
    if expected == 0.0:
        return
    level = (reused + 0.01) / expected  # 0.01 keeps the hazard above 0 even if no block was reused
    for age in range(AGES):
        seen = spent = 0.0
        for near in range(max(0, age - NEIGHBOURS), min(AGES, age + NEIGHBOURS + 1)):
            seen += events[near]
            spent += lived[near]
        hazard[age] = (seen + PRIOR_EVENTS) / (spent + PRIOR_EVENTS / (level * _lru_hazard(age)))


@inlined
def _lru_hazard(age: int) -> float:
    """Return the hazard of block reuse before any reuse is seen: constant at low ages, then 1 / age."""
    middle = (math.pow(2.0, (age - 1) / PER_OCTAVE) + math.pow(2.0, age / PER_OCTAVE)) / 2 / YOUNG_PART
    return 1.0 / max(LEVEL_UNTIL, middle)


@inner
def _fit_factor(core: Evictable, factor: int, scale: float) -> None:
    """Fit the hazard factors of conversation turns (``factor`` 0) or of answer lengths (1).

    A level's factor is its observed reuses divided by the reuses that the model predicts without the factor.
    """
    model = core.model[0]
    factors, seen, forecast = model.factors, model.fitted[0], model.fitted[1]
    seen[:] = PRIOR_REQUESTS
    forecast[:] = PRIOR_REQUESTS
    # The loop sums the hazard up to the middle of each age.
    until, total = model.until, 0.0
    for age in range(AGES):
        risk = model.hazard[PROMPTS, age] * model.widths[age]
        until[age] = total + 0.5 * risk
        total += risk
    for at in range(core.history.size):
        entry = core.history[at]
        if entry.status == NEVER or entry.origin != PROMPTS:
            continue
        weight = scale * model.weights[entry.weight]
        level = entry.turn_level if factor == 0 else entry.answer_level
        other = entry.answer_level if factor == 0 else entry.turn_level
        forecast[level] += weight * until[entry.age] * factors[1 - factor, other]
        if entry.status == REUSED:
            seen[level] += weight
    for level in range(LEVELS):
        factors[factor, level] = seen[level] / forecast[level]


@inner
def _fit_density(core: Evictable, origin: int, score: int) -> None:
    model = core.model[0]
    widths, survive, density = model.widths, model.until, model.density[origin * SCORES + score]
    factor = _class_factor(score)
    for age in range(AGES):
        survive[age] = math.exp(-model.hazard[origin, age] * factor * widths[age])
    for start in range(AGES):
        best = hits = time = 0.0
        living = 1.0
        for age in range(start, AGES):
            after = living * survive[age]
            hits += living - after
            time += 0.5 * (living + after) * widths[age]
            living = after
            best = max(best, hits / time)
        density[start] = best
