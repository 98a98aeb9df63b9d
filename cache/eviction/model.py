"""What learned eviction remembers and believes: two record types of the block manager, and their sizes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Cached blocks that may be evicted stand in one list for each class: an origin and how often blocks like these
# are reused, see `tonnage.cache.eviction.reuse`.
PROMPTS, POPULAR, ANSWERS, ORIGINS = range(4)
SCORES = 12
CLASSES = ORIGINS * SCORES

LRU, LEARNED = range(2)  # the rules
AGES, LEVELS = 48, 8
WEIGHT_STEPS = 8  # a weight is a power of 2 to the -1/8

# The sample holds at most as many blocks of a full pool, and the history as many times as many. Pools of fewer
# than 131,072 blocks get by with half: 22 bytes an entry are then 6 bytes a block.
SAMPLED, FEW_SAMPLED, FEWER_BELOW = 4096, 2048, 131_072
REACH = 8

i4, i8, u1, f8 = np.int32, np.int64, np.uint8, np.float64

# An entry of the history: one release of one sampled block.
ENTRY = np.dtype(
    [
        ("tag", i4),  # of the block's hash
        ("link", i4),  # 1 + next entry of the bucket, 0: none
        ("born", i4),  # the clock at the release
        ("status", u1),
        ("age", u1),  # level of the age at its end
        ("origin", u1),
        ("turn_level", u1),
        ("answer_level", u1),
        ("weight", u1),  # entry of `weights`
        ("first_turn", u1),  # turn of the request that first wrote the block
        ("hits", u1),
    ]
)
MODEL = np.dtype(
    [
        ("learning", i8),  # 0: least recently used, always
        ("sample_shift", i8),  # one block in 2^shift is in the sample
        ("rule", i8),  # LRU or LEARNED
        ("started", i8),  # requests
        # The ring: where it is written next; its youngest entries, as many as LRU would reach back; how many of
        # those live.
        ("at", i8),
        ("span", i8),
        ("alive", i8),
        ("scores", f8, (2,)),  # hits of late: the pool's, LRU's
        ("factors", f8, (2, LEVELS)),  # of turns, of answers
        ("hazard", f8, (ORIGINS, AGES)),  # reuses per block and time
        ("density", f8, (CLASSES, AGES)),  # hits per block and time
        ("weights", f8, (256,)),  # by an entry's weight
        # scratch of a fit
        ("events", f8, (ORIGINS, AGES)),
        ("lived", f8, (ORIGINS, AGES)),
        ("fitted", f8, (2, LEVELS)),
        ("until", f8, (AGES,)),
        ("widths", f8, (AGES,)),  # blocks between two ages
    ]
)


def new_model(num_blocks: int, learning: bool) -> tuple[npt.NDArray[np.void], int]:
    """A model that knows nothing, and how many entries of history it wants."""
    most = SAMPLED if num_blocks >= FEWER_BELOW else FEW_SAMPLED
    shift = max(0, (num_blocks // most).bit_length() - 1)
    model = np.zeros(1, MODEL)
    model["learning"], model["sample_shift"] = learning, shift
    model["factors"], model["hazard"] = 1.0, 1e-9  # alike until the first fit, and above 0
    model["weights"] = 2.0 ** (-np.arange(256) / WEIGHT_STEPS)
    return model, REACH * ((num_blocks >> shift) + 1) if learning else 1
