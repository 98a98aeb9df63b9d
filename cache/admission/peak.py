"""The future peak: blocks in use over the coming steps when each running request ends after a given number.

Time is counted in steps from now; every sequence of a request gains one token a step. A request with prompt
still to compute starts to decode only after its prefill steps, so it ends that much later; until then it is
counted with its whole prompt. The blocks of a request of n sequences are ``prompt // block_size`` shared ones
and, for each sequence, what the rest of its tokens takes, so the total rises step by step between two ends and
falls at an end: the peak is at one of the ends, where the request that ends still holds everything.

This forecasts and guarantees nothing (see `tonnage.cache.admission.safety` for what does): a peak within
capacity means that nobody would have to stall if lengths come as given.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tonnage.cache.admission.snapshot import RunningSnapshot

IntArray = npt.NDArray[np.integer]
Int64Array = npt.NDArray[np.int64]

# Blocks are rounded up sequence by sequence. With blocks of more than 16 tokens the remainders are rounded up
# to sixteenths of a block, which can expect a block too many and never one too few.
_CLASSES = 16


@dataclass(frozen=True, slots=True)
class Growth:
    """What a set of requests will hold; int64 arrays [requests], all groups of one token range together.

    At step t >= 0 a request holds ``fixed + sequences * ceil((tail + t) / block_size)`` blocks in each full
    group, until it has ended after step ``end``. ``private``: blocks, of all groups, that are now in the
    tables of one of them only.
    """

    fixed: Int64Array
    tail: Int64Array
    sequences: Int64Array
    end: Int64Array
    private: int = 0

    def with_one(self, fixed: int, tail: int, sequences: int, end: int) -> Growth:
        """These and one more."""
        return Growth(
            np.append(self.fixed, fixed),
            np.append(self.tail, tail),
            np.append(self.sequences, sequences),
            np.append(self.end, end),
            self.private,
        )


def growth_of(
    snapshot: RunningSnapshot, output_left: IntArray, block_size: int, chunk: int, groups: int = 1
) -> Growth:
    """Growth of the running requests when each produces ``output_left`` more tokens a sequence.

    ``chunk``: prompt tokens computed in a step by all together, first come first served. ``groups``: full
    groups. Blocks that requests share are left out here; they are ``used - private``, counted once.
    """
    from tonnage.cache.admission.loops import grow

    out = np.empty((4, len(snapshot)), np.int64)
    private = grow(snapshot.rows, np.asarray(output_left, np.int64), block_size, chunk, groups, out)
    return Growth(out[0], out[1], out[2], out[3], private)


def prompts_missing(snapshot: RunningSnapshot, block_size: int, groups: int) -> int:
    """Blocks of ``groups`` full groups that the prompts still take."""
    from tonnage.cache.admission.loops import missing_blocks

    return missing_blocks(snapshot.rows, block_size, groups)


def peak_of(growth: Growth, block_size: int, since: int = 0) -> int:
    """Most blocks (of one full group) held at any step >= ``since``; 0 without requests.

    O(requests * 16): for how many requests the remainders take one more block is read from running counts.
    """
    if not len(growth.end):
        return 0
    from tonnage.cache.admission.loops import most_held

    scale = max(1, block_size // _CLASSES)
    counts = np.zeros(block_size // scale + 1, np.int64)
    return most_held(
        np.argsort(-growth.end), growth.fixed, growth.tail, growth.sequences, growth.end,
        block_size, scale, since, counts,
    )  # fmt: skip
