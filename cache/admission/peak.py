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
    group, until it has ended after step ``end``.
    """

    fixed: Int64Array
    tail: Int64Array
    sequences: Int64Array
    end: Int64Array

    def with_one(self, fixed: int, tail: int, sequences: int, end: int) -> Growth:
        """These and one more."""
        return Growth(
            np.append(self.fixed, fixed),
            np.append(self.tail, tail),
            np.append(self.sequences, sequences),
            np.append(self.end, end),
        )


def growth_of(
    snapshot: RunningSnapshot, output_left: IntArray, block_size: int, chunk: int, groups: int = 1
) -> Growth:
    """Growth of the running requests when each produces ``output_left`` more tokens a sequence.

    ``chunk``: prompt tokens computed in a step by all together, first come first served. ``groups``: full
    groups. Blocks that requests share are left out here; they are ``used - sum(private)``, counted once.
    """
    shared = (snapshot.held - snapshot.private).astype(np.int64)
    prompt = snapshot.prompt.astype(np.int64)
    fixed = prompt // block_size - shared // groups
    tail = prompt % block_size + snapshot.output
    end = output_left.astype(np.int64)
    left = snapshot.prompt_left
    if left.any():
        end = end + np.where(left > 0, -(-np.cumsum(left, dtype=np.int64) // chunk), 0)
    return Growth(fixed, tail, snapshot.sequences.astype(np.int64), end)


def peak_of(growth: Growth, block_size: int, since: int = 0) -> int:
    """Most blocks (of one full group) held at any step >= ``since``; 0 without requests.

    O(requests * 16): the number of requests for which a remainder overflows into one more block is read from a
    running histogram of remainders.
    """
    if not len(growth.end):
        return 0
    latest_first = np.argsort(-growth.end)
    end = growth.end[latest_first]
    count = int(np.count_nonzero(end >= since))
    if count == 0:
        return 0
    chosen, end = latest_first[:count], end[:count]
    tail, sequences = growth.tail[chosen], growth.sequences[chosen]
    scale = max(1, block_size // _CLASSES)
    classes = block_size // scale
    # ceil((tail + end) / size) = whole + turns + 1 + [remainder + rest > size], with 1 <= remainder <= size
    whole = (tail - 1) // block_size
    remainder = -(-(tail - whole * block_size) // scale)
    turns, rest = end // block_size, -(-(end % block_size) // scale)
    histogram = np.zeros((count, classes + 2), dtype=np.int64)
    histogram[np.arange(count), remainder] = sequences
    above = np.cumsum(histogram, axis=0)[:, ::-1].cumsum(axis=1)[:, ::-1]  # [place, r]: remainders >= r
    held = np.cumsum(growth.fixed[chosen] + sequences * whole) + above[:, 0] * (turns + 1)
    held += above[np.arange(count), classes - rest + 1]
    return int(held.max())
