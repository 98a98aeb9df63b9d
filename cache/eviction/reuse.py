"""What the pool learns about reuse: how soon, and how often, blocks like these are asked for again.

**History.** Of a sample of the blocks (by hash: Waldspurger et al., USENIX ATC 2017) every release is written
into a ring that reaches back `REACH` capacities, so further than the pool: whether a block was asked for again
is also seen of what has been evicted long ago. Nothing has to be kept for the sake of trying it.

**Model.** Proportional hazards (Cox 1972), fitted to the ring every `EVERY` requests. The chance that a block
is asked for again in the next moment is ``hazard(origin, age) * turn factor * answer factor``. Age is counted
in blocks released since, in a scale of `PER_OCTAVE` steps a doubling; blocks not asked for again yet count as
far as they have lived. The factors are of the request that released the block last: which turn of its
conversation it was (one more than the turn that first wrote the deepest block it shares), how long its answer
was. Families: *prompts*; *popular* blocks, hit more often than their request has turns (system prompts,
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

from tonnage.cache.blocks.state import (
    AGE,
    AGES,
    ANCHOR,
    ANSWER_LEVEL,
    ANSWERS,
    BLOCK_SIZE,
    BORN,
    CACHED,
    CLASS_MASK,
    CLASSES,
    CLOCK,
    CLOCK_MASK,
    FIRST_TURN,
    FREE,
    HISTORY_ALIVE,
    HISTORY_AT,
    HISTORY_SPAN,
    HITS,
    KIND,
    LEARNING,
    LENGTH,
    LEVELS,
    LINK,
    ORIGIN,
    ORIGINS,
    POPULAR,
    PROMPT,
    PROMPTS,
    PUBLISHED,
    REFS,
    REQUEST,
    SAMPLE_SHIFT,
    SCORES,
    STARTED,
    STATUS,
    TAG,
    TURN,
    TURN_LEVEL,
    WEIGHT,
    WEIGHT_STEPS,
    Core,
)
from tonnage.cache.compiled import compiled, inlined

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
    while entry >= 0 and core.history[TAG, entry] != tag:
        entry = int(core.history[LINK, entry]) - 1
    return entry


@compiled
def _unlink(core: Core, entry: int) -> None:
    """No longer found, if it was; what it tells of reuse stays."""
    heads, history = core.history_heads, core.history
    bucket = history[TAG, entry] & (heads.size - 1)
    at = int(heads[bucket]) - 1
    if at == entry:
        heads[bucket] = history[LINK, entry]
        return
    while at >= 0:
        after = int(history[LINK, at]) - 1
        if after == entry:
            history[LINK, at] = history[LINK, entry]
            return
        at = after


@inlined
def _lru_has(core: Core, entry: int) -> bool:
    """Whether the entry is of the youngest part of the ring, which is what LRU would keep."""
    size, counters = core.history.shape[1], core.counters
    back = (counters[HISTORY_AT] - 1 - entry) % size
    return bool(core.traits[STATUS, entry] == LIVING and back < counters[HISTORY_SPAN])


@compiled
def _end(core: Core, entry: int, status: int) -> None:
    """A living entry is seen again or replaced."""
    counters = core.counters
    if _lru_has(core, entry):
        counters[HISTORY_ALIVE] -= 1
    age = (counters[CLOCK] - core.history[BORN, entry]) & CLOCK_MASK
    core.traits[STATUS, entry] = status
    core.traits[AGE, entry] = age_level(age, core.blocks.shape[1] - CLASSES)


@compiled
def _shrink(core: Core) -> None:
    """LRU forgets the oldest of the sample until the rest fits into what running requests leave."""
    counters = core.counters
    room = (counters[CACHED] + counters[FREE]) >> core.constants[SAMPLE_SHIFT]
    while counters[HISTORY_ALIVE] > room:
        oldest = (counters[HISTORY_AT] - counters[HISTORY_SPAN]) % core.history.shape[1]
        if core.traits[STATUS, oldest] == LIVING:
            counters[HISTORY_ALIVE] -= 1
        counters[HISTORY_SPAN] -= 1


@compiled
def observe_start(core: Core, row: int, hit: int) -> None:
    """A request begins, ``hit`` blocks of its prompt were found and are not locked yet: which turn it is, and
    which releases have now been seen again."""
    if core.constants[LEARNING] == 0:
        return
    rows, hashes, counters, traits = core.rows, core.hashes, core.counters, core.traits
    sample = (np.uint64(1) << np.uint64(core.constants[SAMPLE_SHIFT])) - np.uint64(1)
    blocks = (rows[LENGTH, row] - 1) // core.constants[BLOCK_SIZE]
    table = core.tables[core.constants[ANCHOR], row]
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
        held = at < hit and core.blocks[REFS, table[at]] > 0
        kept = kept and (held or (entry >= 0 and _lru_has(core, entry)))
        if kept:
            lru += 1
        known = known and entry >= 0
        if known:
            turn = int(traits[FIRST_TURN, entry])
            traits[HITS, entry] = min(255, int(traits[HITS, entry]) + 1)
            if traits[STATUS, entry] == LIVING:
                _end(core, entry, REUSED)
    rows[TURN, row] = turn + 1
    sampled = (core.blocks.shape[1] - CLASSES) >> core.constants[SAMPLE_SHIFT]
    decay = math.exp(-looked / (HORIZON * sampled))
    core.scores[0] = (core.scores[0] + own) * decay
    core.scores[1] = (core.scores[1] + lru) * decay
    counters[STARTED] += 1
    if counters[STARTED] % EVERY == 0:
        fit(core)


@compiled
def observe_end(core: Core, row: int) -> None:
    """A request leaves: its full blocks get their class, and those of the sample go into the history."""
    rows, count = core.rows, int(core.rows[PUBLISHED, row])
    if core.constants[LEARNING] == 0 or count == 0:
        return
    prompt = core.requests[PROMPT, rows[REQUEST, row]]
    asked = min(count, int(prompt // core.constants[BLOCK_SIZE]))
    turn = max(1, int(rows[TURN, row]))
    turn_level, answer_level = min(turn, LEVELS) - 1, _answer_level(rows[LENGTH, row] - prompt)
    score = _score_class(core.factors[0, turn_level] * core.factors[1, answer_level])
    # One request counts as much as another, however long.
    weight = int(WEIGHT_STEPS * math.log2(asked + 1) + 0.5)
    sample = (np.uint64(1) << np.uint64(core.constants[SAMPLE_SHIFT])) - np.uint64(1)
    popular = 0
    for at in range(count - 1, -1, -1):  # as they are released: what LRU forgets first is the oldest
        if core.hashes[row, at] & sample != np.uint64(0):
            continue
        first, hits = turn, 0
        old = _find(core, core.hashes[row, at])
        if old >= 0:
            first, hits = int(core.traits[FIRST_TURN, old]), int(core.traits[HITS, old])
            if core.traits[STATUS, old] == LIVING:
                _end(core, old, ENDED)
            _unlink(core, old)
        origin = ANSWERS if at >= asked else POPULAR if hits > turn else PROMPTS
        if origin == POPULAR and popular == 0:
            popular = at + 1
        entry = _write(core, core.hashes[row, at])
        traits = core.traits
        traits[ORIGIN, entry], traits[TURN_LEVEL, entry] = origin, turn_level
        traits[ANSWER_LEVEL, entry], traits[WEIGHT, entry] = answer_level, weight
        traits[FIRST_TURN, entry], traits[HITS, entry] = min(first, 255), hits
    blocks, table = core.blocks, core.tables[core.constants[ANCHOR], row]
    for at in range(count):
        origin = ANSWERS if at >= asked else POPULAR if at < popular else PROMPTS
        blocks[KIND, table[at]] = (blocks[KIND, table[at]] & ~CLASS_MASK) | (origin * SCORES + score)


@compiled
def _write(core: Core, value: np.uint64) -> int:
    """A living entry in the place of the oldest."""
    counters, history, heads = core.counters, core.history, core.history_heads
    size, entry = history.shape[1], int(counters[HISTORY_AT])
    if core.traits[STATUS, entry] != NEVER:
        _unlink(core, entry)
    if counters[HISTORY_SPAN] == size:
        if core.traits[STATUS, entry] == LIVING:
            counters[HISTORY_ALIVE] -= 1
        counters[HISTORY_SPAN] -= 1
    tag = int(value >> np.uint64(33))
    bucket = tag & (heads.size - 1)
    history[TAG, entry], history[LINK, entry] = tag, heads[bucket]
    history[BORN, entry] = counters[CLOCK] & CLOCK_MASK
    heads[bucket] = entry + 1
    core.traits[STATUS, entry] = LIVING
    counters[HISTORY_AT] = (entry + 1) % size
    counters[HISTORY_SPAN] += 1
    counters[HISTORY_ALIVE] += 1
    return entry


# -- the model -------------------------------------------------------------------------------------------------


@compiled
def fit(core: Core) -> None:
    """The model anew from the whole history, starting from the factors of the last time."""
    traits, factors, events, lived = core.traits, core.factors, core.events, core.lived
    blocks = core.blocks.shape[1] - CLASSES
    for age in range(AGES):
        core.widths[age] = _age_start(age + 1, blocks) - _age_start(age, blocks)
    events[:] = 0.0
    lived[:] = 0.0
    for entry in range(traits.shape[1]):
        if traits[STATUS, entry] == NEVER:
            continue
        if traits[STATUS, entry] == LIVING:  # as far as it has lived
            traits[AGE, entry] = age_level(
                (core.counters[CLOCK] - core.history[BORN, entry]) & CLOCK_MASK, blocks
            )
        origin, age, weight = traits[ORIGIN, entry], traits[AGE, entry], core.weights[traits[WEIGHT, entry]]
        if traits[STATUS, entry] == REUSED:
            events[origin, age] += weight
        if origin != POPULAR:
            weight *= factors[0, traits[TURN_LEVEL, entry]] * factors[1, traits[ANSWER_LEVEL, entry]]
        lived[origin, age] += weight
    scale = float(1 << core.constants[SAMPLE_SHIFT])
    for origin in range(ORIGINS):
        _fit_hazard(core, origin, scale)
    for factor in range(2):
        _fit_factor(core, factor, scale)
    for origin in range(ORIGINS):
        for score in range(SCORES):
            _fit_density(core, origin, score)


@compiled
def _fit_hazard(core: Core, origin: int, scale: float) -> None:
    """``lived`` [ages]: entries that ended at each age; becomes blocks * time spent at it."""
    events, lived, hazard = core.events[origin], core.lived[origin], core.hazard[origin]
    beyond = reused = expected = 0.0
    for age in range(AGES - 1, -1, -1):
        ended = lived[age] * scale
        lived[age] = (beyond + 0.5 * ended) * core.widths[age]
        beyond += ended
        events[age] *= scale
        reused += events[age]
        expected += lived[age] * _lru_hazard(age)
    if expected == 0.0:
        return
    level = (reused + 0.01) / expected
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


@compiled
def _fit_factor(core: Core, factor: int, scale: float) -> None:
    """Reuses seen over those that hazards and the other factor forecast, by level."""
    traits, factors, seen, forecast = core.traits, core.factors, core.fitted[0], core.fitted[1]
    seen[:] = PRIOR_REQUESTS
    forecast[:] = PRIOR_REQUESTS
    mine, other = (TURN_LEVEL, ANSWER_LEVEL) if factor == 0 else (ANSWER_LEVEL, TURN_LEVEL)
    # The sum of the hazards up to the middle of each age.
    until, total = core.until, 0.0
    for age in range(AGES):
        risk = core.hazard[PROMPTS, age] * core.widths[age]
        until[age] = total + 0.5 * risk
        total += risk
    for entry in range(traits.shape[1]):
        if traits[STATUS, entry] == NEVER or traits[ORIGIN, entry] != PROMPTS:
            continue
        weight, level = scale * core.weights[traits[WEIGHT, entry]], traits[mine, entry]
        forecast[level] += weight * until[traits[AGE, entry]] * factors[1 - factor, traits[other, entry]]
        if traits[STATUS, entry] == REUSED:
            seen[level] += weight
    for level in range(LEVELS):
        factors[factor, level] = seen[level] / forecast[level]


@compiled
def _fit_density(core: Core, origin: int, score: int) -> None:
    widths, survive, density = core.widths, core.until, core.density[origin * SCORES + score]
    factor = _class_factor(score)
    for age in range(AGES):
        survive[age] = math.exp(-core.hazard[origin, age] * factor * widths[age])
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
