"""The forecast peak: blocks in use over the coming steps, for given remaining output lengths.

Time is counted in steps from now, and every sequence gains one token per step. A request whose prompt is not
computed yet starts to decode after its prefill steps, so it ends that many steps later. During prefill it
counts with its whole prompt. A request of n sequences holds ``prompt // block_size`` shared blocks. In addition
it holds, for each sequence, the blocks of the sequence's other tokens. The total rises between two ends and
falls at an end. The peak is therefore at one of the ends, where the ending request still holds all its blocks.

This forecast guarantees nothing; `tonnage.cache.admission.safety` gives a guarantee. If the peak is within
capacity and the lengths are right, no sequence waits for a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

# Blocks are rounded up per sequence. With blocks of more than 16 tokens, the tokens in a sequence's last block
# are first rounded up to sixteenths of a block. That can count one block too many, never one too few.
_CLASSES = 16


@dataclass(frozen=True, slots=True)
class Growth:
    """The number of KV blocks that each request of a set will hold over time, as int64 arrays [requests].

    At step t >= 0 a request holds ``fixed + sequences * ceil((tail + t) / block_size)`` blocks in each
    full-attention group, until it ends after step ``end``. ``latest_first`` lists the requests by descending
    end.
    """

    fixed: Int64Array
    tail: Int64Array
    sequences: Int64Array
    end: Int64Array
    latest_first: Int64Array = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "latest_first", np.argsort(-self.end))


class Added(NamedTuple):
    """The number of KV blocks of one additional request over time: the fields of `Growth` as single numbers."""

    fixed: int
    tail: int
    sequences: int
    end: int


def peak_of(growth: Growth, block_size: int, since: int = 0, added: Sequence[Added] = ()) -> int:
    """Return the largest number of KV blocks of one full-attention group in use at any step >= ``since``.

    The result is 0 without requests. The time is O(requests * 16), because sequences are counted by the
    remaining slots of their last block. ``added`` has requests in addition to those of ``growth``.
    """
    from tonnage.cache.admission.loops import most_held

    scale = max(1, block_size // _CLASSES)
    counts = np.zeros(block_size // scale + 1, np.int64)
    more = np.array(sorted(added, key=lambda one: -one.end), np.int64).reshape(-1, 4)
    return most_held(
        growth.latest_first, growth.fixed, growth.tail, growth.sequences, growth.end, more,
        block_size, scale, since, counts,
    )  # fmt: skip
