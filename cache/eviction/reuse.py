"""What the pool learns about reuse: how soon, and how often, blocks like these are asked for again.

**History.** Of a sample of the blocks (by hash: Waldspurger et al., USENIX ATC 2017) every release is written
into a ring that reaches back `REACH` capacities, so further than the pool: whether a block was asked for again
is also seen of what has been evicted long ago. Nothing has to be kept for the sake of trying it.

**Model.** Proportional hazards (Cox 1972), fitted to the ring every `EVERY` requests. The chance that a block
is asked for again in the next moment is ``hazard(origin, age) * turn factor * answer factor``. Age is counted
in blocks released since, in a scale of `PER_OCTAVE` steps a doubling; blocks not asked for again yet count as
far as they have lived. The factors are of the request that released the block last: which turn of its
conversation it was (one more than the turn that first wrote the deepest block it shares), how long its answer
was. Origins: *prompts*; *popular* blocks, hit more often than their request has turns (system prompts,
documents); *answers*. What little is seen counts little: factors start as 1, hazards as such that LRU is right.

**Density.** What a block of an age is worth to the pool is the largest share, over all ways to end its stay, of
hits expected per block and time from now on (hit density: Beckmann et al., NSDI 2018). It need not fall with
age: people need time to answer, so that a block may be worth more half a minute after its release than at once.

The hits of the sample are counted twice: those the pool had, and those LRU would have had, whose content is the
youngest part of the ring. `tonnage.cache.eviction.choice` goes back to LRU when the second count is the larger.
"""

from __future__ import annotations

import math

import numpy as np

from tonnage.cache.blocks.state import CLASS_MASK, CLOCK_MASK, Core
from tonnage.cache.compiled import inlined, inner
from tonnage.cache.eviction.model import (
    AGES,
    ANSWERS,
    LEVELS,
    ORIGINS,
    POPULAR,
    PROMPTS,
    SCORES,
    WEIGHT_STEPS,
)

EVERY = 32  # requests
PER_OCTAVE = 4
YOUNGEST = 64  # ages below a 64th of the capacity are one
LOWEST, HIGHEST = 0.25, 8.0  # factors of the first and the last class of an origin
PRIOR_REQUESTS = 15.0  # as many, reused as often as the mean, are mixed into each factor
PRIOR_EVENTS = 1.25  # ... and as many reuses into the hazard of each age
LEVEL_UNTIL = 2.0  # capacities
NEIGHBOURS = 2  # ages that a hazard is averaged over, to each side
HORIZON = 1.0  # capacities of look-ups that the two counts of hits look back over

NEVER, LIVING, REUSED, ENDED = range(4)  # status of an entry: unused, not seen again yet, seen again, replaced


@inlined
def age_level(age: int, blocks: int) -> int:
    """The step of an age in blocks, of a pool of ``blocks``."""
    unit = blocks / YOUNGEST
    if age < unit:
        return 0
    return min(AGES - 1, 1 + int(PER_OCTAVE * math.log2(age / unit)))


@inlined
def _age_start(level: int, blocks: int) -> float:
    return 0.0 if level == 0 else blocks / YOUNGEST * math.pow(2.0, (level - 1) / PER_OCTAVE)


@inlined
def _answer_level(tokens: int) -> int:
    """In steps of four times as many tokens, from 128 on of twice."""
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
    """The class, within an origin, of what is reused ``factor`` times as often as the mean."""
    place = math.log(factor / LOWEST) / math.log(HIGHEST / LOWEST) * (SCORES - 1)
    return min(SCORES - 1, max(0, math.floor(place + 0.5)))


@inlined
def _class_factor(score: int) -> float:
    return LOWEST * math.pow(HIGHEST / LOWEST, score / (SCORES - 1))


# -- the history -----------------------------------------------------------------------------------------------


@inlined
def _find(core: Core, value: np.uint64) -> int:
    """The last release of the block of this hash, or -1."""
    tag = int(value >> np.uint64(33))
    entry = int(core.history_heads[tag & (core.history_heads.size - 1)]) - 1
    while entry >= 0 and core.history[entry].tag != tag:
        entry = int(core.history[entry].link) - 1
    return entry


@inner
def _unlink(core: Core, entry: int) -> None:
    """No longer found, if it was; what it tells of reuse stays."""
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
def _lru_has(core: Core, entry: int) -> bool:
    """Whether the entry is of the youngest part of the ring, which is what LRU would keep."""
    model = core.model[0]
    back = (model.at - 1 - entry) % core.history.size
    return bool(core.history[entry].status == LIVING and back < model.span)


@inner
def _end(core: Core, entry: int, status: int) -> None:
    """A living entry is seen again or replaced."""
    pool, model = core.pool[0], core.model[0]
    if _lru_has(core, entry):
        model.alive -= 1
    age = (pool.clock - core.history[entry].born) & CLOCK_MASK
    core.history[entry].status = status
    core.history[entry].age = age_level(age, pool.num_blocks)


@inner
def _shrink(core: Core) -> None:
    """LRU forgets the oldest of the sample until the rest fits into what running requests leave."""
    pool, model = core.pool[0], core.model[0]
    room = (pool.cached + pool.free) >> model.sample_shift
    while model.alive > room:
        oldest = (model.at - model.span) % core.history.size
        if core.history[oldest].status == LIVING:
            model.alive -= 1
        model.span -= 1


@inner
def observe_start(core: Core, row: int, hit: int) -> None:
    """A request begins, ``hit`` blocks of its prompt were found and are not locked yet: which turn it is, and
    which releases have now been seen again."""
    pool, model = core.pool[0], core.model[0]
    if model.learning == 0:
        return
    hashes = core.hashes
    sample = (np.uint64(1) << np.uint64(model.sample_shift)) - np.uint64(1)
    blocks = (core.rows[row].length - 1) // pool.block_size
    table = core.tables[pool.anchor, row]
    _shrink(core)
    looked, own, lru, turn = 0, 0, 0, 0
    known, kept = True, True  # all blocks so far: are in the history, would be there under LRU
    for at in range(blocks):
        if hashes[row, at] & sample != np.uint64(0):
            continue
        looked += 1
        if at < hit:
            own += 1
        elif not known and not kept:
            continue
        entry = _find(core, hashes[row, at])
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
    core.rows[row].turn = turn + 1
    sampled = pool.num_blocks >> model.sample_shift
    decay = math.exp(-looked / (HORIZON * sampled))
    model.scores[0] = (model.scores[0] + own) * decay
    model.scores[1] = (model.scores[1] + lru) * decay
    model.started += 1
    if model.started % EVERY == 0:
        fit(core)


@inner
def observe_end(core: Core, row: int) -> None:
    """A request leaves: its full blocks get their class, and those of the sample go into the history."""
    pool, model = core.pool[0], core.model[0]
    count = int(core.rows[row].published)
    if model.learning == 0 or count == 0:
        return
    prompt = core.requests[core.rows[row].request].prompt
    asked = min(count, int(prompt // pool.block_size))
    turn = max(1, int(core.rows[row].turn))
    turn_level, answer_level = min(turn, LEVELS) - 1, _answer_level(core.rows[row].length - prompt)
    score = _score_class(model.factors[0, turn_level] * model.factors[1, answer_level])
    # One request counts as much as another, however long.
    weight = int(WEIGHT_STEPS * math.log2(asked + 1) + 0.5)
    sample = (np.uint64(1) << np.uint64(model.sample_shift)) - np.uint64(1)
    popular = 0
    for at in range(count - 1, -1, -1):  # as they are released: what LRU forgets first is the oldest
        if core.hashes[row, at] & sample != np.uint64(0):
            continue
        first, hits = turn, 0
        old = _find(core, core.hashes[row, at])
        if old >= 0:
            first, hits = int(core.history[old].first_turn), int(core.history[old].hits)
            if core.history[old].status == LIVING:
                _end(core, old, ENDED)
            _unlink(core, old)
        origin = ANSWERS if at >= asked else POPULAR if hits > turn else PROMPTS
        if origin == POPULAR and popular == 0:
            popular = at + 1
        entry = _write(core, core.hashes[row, at])
        core.history[entry].origin, core.history[entry].turn_level = origin, turn_level
        core.history[entry].answer_level, core.history[entry].weight = answer_level, weight
        core.history[entry].first_turn, core.history[entry].hits = min(first, 255), hits
    table = core.tables[pool.anchor, row]
    for at in range(count):
        origin = ANSWERS if at >= asked else POPULAR if at < popular else PROMPTS
        core.kind[table[at]] = (core.kind[table[at]] & ~CLASS_MASK) | (origin * SCORES + score)


@inner
def _write(core: Core, value: np.uint64) -> int:
    """A living entry in the place of the oldest."""
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


# -- the model -------------------------------------------------------------------------------------------------


@inner
def fit(core: Core) -> None:
    """The model anew from the whole history, starting from the factors of the last time."""
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
        if entry.status == LIVING:  # as far as it has lived
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
def _fit_hazard(core: Core, origin: int, scale: float) -> None:
    """``lived`` [ages]: entries that ended at each age; becomes blocks * time spent at it."""
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
    level = (reused + 0.01) / expected  # above 0 where nothing was reused
    for age in range(AGES):
        seen = spent = 0.0
        for near in range(max(0, age - NEIGHBOURS), min(AGES, age + NEIGHBOURS + 1)):
            seen += events[near]
            spent += lived[near]
        hazard[age] = (seen + PRIOR_EVENTS) / (spent + PRIOR_EVENTS / (level * _lru_hazard(age)))


@inlined
def _lru_hazard(age: int) -> float:
    """The shape assumed before anything is seen: constant up to two capacities, then falling as 1 / age."""
    middle = (math.pow(2.0, (age - 1) / PER_OCTAVE) + math.pow(2.0, age / PER_OCTAVE)) / 2 / YOUNGEST
    return 1.0 / max(LEVEL_UNTIL, middle)


@inner
def _fit_factor(core: Core, factor: int, scale: float) -> None:
    """Reuses seen over those that hazards and the other factor forecast, by level."""
    model = core.model[0]
    factors, seen, forecast = model.factors, model.fitted[0], model.fitted[1]
    seen[:] = PRIOR_REQUESTS
    forecast[:] = PRIOR_REQUESTS
    # The sum of the hazards up to the middle of each age.
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
def _fit_density(core: Core, origin: int, score: int) -> None:
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
