"""The record types and sizes of learned eviction: the history of released blocks, and the fitted model."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# There is one eviction list per class. A class combines an origin (prompts, popular blocks, answers) with a
# level of how often such blocks are reused (`tonnage.cache.eviction.reuse`).
PROMPTS, POPULAR, ANSWERS, ORIGINS = range(4)
SCORES = 12
CLASSES = ORIGINS * SCORES

LRU, LEARNED = range(2)  # the two eviction rules
AGES, LEVELS = 48, 8
# The age of a block is a number of released blocks. The scale of ages has PER_OCTAVE levels per doubling. Ages
# below (blocks of the pool) / YOUNG_PART share level 0.
PER_OCTAVE, YOUNG_PART = 4, 64
WEIGHT_STEPS = 8  # the weight of a history entry is a power of 2^(-1/8)

# At most SAMPLED blocks of a full pool are sampled, and the history has REACH times as many entries. Pools
# below 131,072 blocks use FEW_SAMPLED: at 22 bytes per entry the history then takes 6 bytes per block.
SAMPLED, FEW_SAMPLED, FEWER_BELOW = 4096, 2048, 131_072
REACH = 8

i4, i8, u1, f8 = np.int32, np.int64, np.uint8, np.float64

# Record of a history entry, which describes one release of one sampled block.
ENTRY = np.dtype(
    [
        ("tag", i4),  # high bits of the block's hash
        ("link", i4),  # 1 + next history entry of the hash bucket, 0: none
        ("born", i4),  # time of the release, as the number of blocks released before (the clock)
        ("status", u1),
        ("age", u1),  # level of the block's age when it was reused or released again
        ("origin", u1),
        ("turn_level", u1),
        ("answer_level", u1),
        ("weight", u1),  # index into the model's `weights`
        ("first_turn", u1),  # conversation turn of the request that first wrote the block
        ("hits", u1),
    ]
)
MODEL = np.dtype(
    [
        ("learning", i8),  # 1: eviction learns; 0: LRU only
        ("sample_shift", i8),  # one block in 2^shift is in the sample
        ("rule", i8),  # eviction rule in effect: LRU or LEARNED
        ("started", i8),  # number of requests that have started.
        # The next three fields describe the history, a ring: the next entry to write, the number of youngest
        # entries that LRU would still hold, and the number of these whose block was not requested again.
        ("at", i8),
        ("span", i8),
        ("alive", i8),
        ("scores", f8, (2,)),  # recent hits of the pool, and hits that LRU would have had
        ("factors", f8, (2, LEVELS)),  # hazard factors by conversation turn and by answer length.
        # Time is counted in blocks that the pool releases. The hazard is the rate at which a block of an origin
        # and age is reused; the density is the expected hits of a block of a class and age per unit of time.
        ("hazard", f8, (ORIGINS, AGES)),
        ("density", f8, (CLASSES, AGES)),
        ("weights", f8, (256,)),  # weight in the fit, by the weight index that a history entry stores.
        # The next five fields are scratch arrays of a fit.
        ("events", f8, (ORIGINS, AGES)),
        ("lived", f8, (ORIGINS, AGES)),
        ("fitted", f8, (2, LEVELS)),
        ("until", f8, (AGES,)),
        ("widths", f8, (AGES,)),  # width of each level of age, as a number of released blocks
    ]
)


class OrderArrays(NamedTuple):
    """The arrays of an eviction order (`EvictionOrder`), named like those of the block manager (`Core`)."""

    pool: npt.NDArray[np.void]
    refs: npt.NDArray[np.int32]
    next: npt.NDArray[np.int32]
    prev: npt.NDArray[np.int32]
    stamp: npt.NDArray[np.int32]
    node_of: npt.NDArray[np.int32]
    parent: npt.NDArray[np.int32]
    kind: npt.NDArray[np.int32]
    chain: npt.NDArray[np.int32]
    node_hash: npt.NDArray[np.uint64]
    heads: npt.NDArray[np.int32]
    history: npt.NDArray[np.void]
    history_heads: npt.NDArray[np.int32]
    model: npt.NDArray[np.void]


def history_buckets(history: int) -> int:
    """Return the number of hash buckets, a power of two, for a history of ``history`` released blocks."""
    return 1 << max(0, (history // 2).bit_length() - 1)


def new_model(num_blocks: int, learning: bool) -> tuple[npt.NDArray[np.void], int]:
    """Return an untrained model of block reuse, and the number of release-history entries that it needs."""
    most = SAMPLED if num_blocks >= FEWER_BELOW else FEW_SAMPLED
    shift = max(0, (num_blocks // most).bit_length() - 1)
    model = np.zeros(1, MODEL)
    model["learning"], model["sample_shift"] = learning, shift
    model["factors"], model["hazard"] = (
        1.0,
        1e-9,
    )  # the initial hazard is positive, and equal for every class
    model["weights"] = 2.0 ** (-np.arange(256) / WEIGHT_STEPS)
    return model, REACH * ((num_blocks >> shift) + 1) if learning else 1
