"""One step's work as arrays: what the scheduler hands to the model runner. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tonnage.cache.manager import BlockCopy

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """A flat (unpadded) token batch of S sequences and T tokens; prefill chunks and decodes mixed.

    ``slots[g]`` is where group g writes each token's K/V (block * block_size + offset), ``tables[g]`` the
    block tables of the S sequences, ``kv_len`` the context after this step (its own tokens included).
    """

    token_ids: Int64  # [T]
    positions: Int64  # [T]
    query_start: Int64  # [S + 1], cumulative query lengths
    kv_len: Int64  # [S]
    slots: tuple[Int64, ...]  # per group [T]
    tables: tuple[Int32, ...]  # per group [S, max blocks]
    logits_at: Int64  # [L], flat indices of the tokens whose logits are wanted
    copies: tuple[BlockCopy, ...] = ()  # copy-on-write, to be done before anything is written

    @property
    def sequences(self) -> int:
        return len(self.kv_len)
