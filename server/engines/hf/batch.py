"""The token batch of one step as numpy arrays, passed from scheduler to model runner; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tonnage.cache.manager import BlockCopy

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """The flat (unpadded) token batch of one step: T tokens of S sequences, prefill chunks and decodes.

    ``slots[g]`` has the pool slot (block * block_size + offset) to which KV cache group g writes the K and V of
    each token. ``tables[g]`` has the block tables of the S sequences in group g. ``kv_len`` is each sequence's
    context length after this step.
    """

    token_ids: Int64  # [T], tokens of all sequences, one after another
    positions: Int64  # [T], position of each token in its sequence
    query_start: Int64  # [S + 1], cumulative query lengths
    kv_len: Int64  # [S], context lengths after the step
    slots: tuple[Int64, ...]  # per group [T], pool slot of each token
    tables: tuple[Int32, ...]  # per group [S, max blocks], block ids
    logits_at: Int64  # [L], indices in the flat batch of the tokens that need logits
    copies: tuple[BlockCopy, ...] = ()  # blocks to copy before the step writes K and V (copy-on-write)

    @property
    def sequences(self) -> int:
        """Number of sequences in the step's batch."""
        return len(self.kv_len)


def batch_of(
    token_ids: Int64, starts: Int64, counts: Int64, tables: Sequence[Int32], block_size: int, logits_at: Int64
) -> Batch:
    """Return the batch of a step in which each sequence computes consecutive tokens.

    Args:
        token_ids: tokens of all sequences, one after another, [T].
        starts: position of each sequence's first token in the step, [S].
        counts: number of each sequence's tokens in the step, [S].
        tables: block tables of the sequences for each KV cache group, [S, max blocks].
        block_size: tokens per block.
        logits_at: indices in ``token_ids`` of the tokens that need logits, [L].
    """
    query_start = np.concatenate(([0], np.cumsum(counts)))
    owner = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(query_start[-1]) - query_start[:-1][owner] + starts[owner]
    blocks, offsets = np.divmod(positions, block_size)
    slots = tuple(table[owner, blocks].astype(np.int64) * block_size + offsets for table in tables)
    return Batch(token_ids, positions, query_start, starts + counts, slots, tuple(tables), logits_at)
