"""The forecast peak: blocks in use over the coming steps, for given remaining output lengths.

Time is counted in steps from now, and every sequence gains one token per step. A request whose prompt is not
computed yet starts to decode after its prefill steps, and ends later by their number. During prefill it counts
with its whole prompt. A request of n sequences holds ``prompt // block_size`` shared blocks and, for each
sequence, the blocks of its other tokens. The total rises between two ends and falls at an end. The peak is
therefore at one of the ends, where the request that ends still holds all its blocks.

This forecast guarantees nothing; `tonnage.cache.admission.safety` gives a guarantee. If the peak is within
capacity and the lengths are right, no sequence waits for a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tonnage.cache.admission.snapshot import RunningSnapshot

IntArray = npt.NDArray[np.integer]
Int64Array = npt.NDArray[np.int64]

# Blocks are rounded up per sequence. With blocks of more than 16 tokens, the tokens in a sequence's last block
# are first rounded up to sixteenths of a block. That can count one block too many, never one too few.
_CLASSES = 16


@dataclass(frozen=True, slots=True)
class Growth:
    """The blocks that a set of requests will hold over time, as int64 arrays [requests].

    At step t >= 0 a request holds ``fixed + sequences * ceil((tail + t) / block_size)`` blocks in each
    full-attention group, until it ends after step ``end``. ``private`` counts, over all groups, the blocks that
    now belong to the table of one request only.
    """

    fixed: Int64Array
    tail: Int64Array
    sequences: Int64Array
    end: Int64Array
    private: int = 0

    def with_one(self, fixed: int, tail: int, sequences: int, end: int) -> Growth:
        """Return a new `Growth` of these requests and one more, whose values are the arguments."""
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
    """Return the block use over time if each running request produces ``output_left`` more tokens per sequence.

    Blocks that several requests share are left out; a caller adds them once, as ``used - private``.

    Args:
        snapshot: The running requests.
        output_left: int [running]: output tokens that each request will still produce.
        block_size: Tokens per block.
        chunk: Prompt tokens that all requests together compute in a step, in order of admission.
        groups: Number of full-attention groups.
    """
    from tonnage.cache.admission.loops import grow

    out = np.empty((4, len(snapshot)), np.int64)
    private = grow(snapshot.rows, np.asarray(output_left, np.int64), block_size, chunk, groups, out)
    return Growth(out[0], out[1], out[2], out[3], private)


def prompts_missing(snapshot: RunningSnapshot, block_size: int, groups: int) -> int:
    """Return the number of blocks that the uncomputed prompt tokens will need.

    The count is over all ``groups`` full-attention groups.
    """
    from tonnage.cache.admission.loops import missing_blocks

    return missing_blocks(snapshot.rows, block_size, groups)


def peak_of(growth: Growth, block_size: int, since: int = 0) -> int:
    """Return the largest number of blocks (of one full-attention group) held at any step >= ``since``.

    The result is 0 without requests. The time is O(requests * 16), because sequences are counted by the
    remaining slots of their last block.
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
