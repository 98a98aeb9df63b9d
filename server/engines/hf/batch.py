"""The token batch of one step as arrays, passed from the scheduler to the model runner. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tonnage.cache.manager import BlockCopy

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """A flat (unpadded) batch of S sequences and T tokens, with prefill chunks and decodes mixed.

    ``slots[g]`` is where group g writes each token's K and V (block * block_size + offset). ``tables[g]`` has
    the block tables of the S sequences. ``kv_len`` is the context length after this step.
    """

    token_ids: Int64  # [T]
    positions: Int64  # [T]
    query_start: Int64  # [S + 1], cumulative query lengths
    kv_len: Int64  # [S]
    slots: tuple[Int64, ...]  # per group [T]
    tables: tuple[Int32, ...]  # per group [S, max blocks]
    logits_at: Int64  # [L], flat indices of the tokens that need logits
    copies: tuple[BlockCopy, ...] = ()  # copy-on-write, before any write of the step

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return len(self.kv_len)
