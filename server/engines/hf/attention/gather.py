"""The reference attention in plain torch: gather the slots in each block table, then ordinary attention.

It runs on every device and with every dtype, and the tests compare the kernels with it. It gathers token by
token, so it never reads an unwritten slot in the tail of a block or in a freed block. Such a slot may hold NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from tonnage.planner.engines.runtime.hf import GATHERED_TOKENS
from tonnage.server.engines.hf.attention.paged import PoolAttention
from tonnage.server.engines.hf.batch import Batch, Int64
from tonnage.server.engines.hf.pool import PagedPool, on_device

# The attention of one step, called in each layer: (KV cache group, layer slot, query, key, value, scaling,
# softcap) -> output. See PoolAttention.__call__.
Attention = Callable[[int, int, torch.Tensor, torch.Tensor, torch.Tensor, float, float | None], torch.Tensor]
Backend = Callable[[Batch], Attention]


@dataclass(frozen=True, slots=True)
class Span:
    """Queries of a step whose attention is computed in one batch: consecutive decodes, or one prefill chunk.

    Attributes:
        start: index of the span's first token in the flat batch.
        sequences: number of sequences, B.
        queries: query tokens per sequence.
        rows: pool rows of K in layer slot 0 of each sequence's S context tokens, [B, S]; padding repeats the
            first row.
        mask: True where a query may attend, [B, 1, query heads per KV head * queries, S]; None if every query
            may attend to all S tokens.
    """

    start: int
    sequences: int
    queries: int
    rows: torch.Tensor
    mask: torch.Tensor | None


class GatherAttention(PoolAttention):
    """The attention of one step in plain torch, with indices computed once per step and KV cache group."""

    def __init__(self, batch: Batch, pool: PagedPool, query_heads: int) -> None:
        super().__init__(batch, pool)
        self._repeat = query_heads // pool.layout.kv_heads
        self._by_group = [self._spans(batch, number) for number in range(len(batch.slots))]

    def read(
        self, group: int, slot: int, query: torch.Tensor, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        """Return one layer's attention in plain torch; see `PoolAttention.read` for the arguments."""
        pool = self.pool
        size = pool.layout.block_size
        k_shift, v_shift = 2 * slot * size, (2 * slot + 1) * size
        heads, kv_heads, repeat = query.shape[1], pool.layout.kv_heads, self._repeat
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for span in self._by_group[group]:
            tokens = span.sequences * span.queries
            shape = (span.sequences, span.queries, kv_heads, repeat, query.shape[-1])
            # The query heads that share a KV head become extra queries, so K and V need not be repeated.
            q = query[span.start : span.start + tokens].reshape(shape).permute(0, 2, 3, 1, 4).flatten(2, 3)
            gather = span.rows.flatten()
            kv_shape = (*span.rows.shape, kv_heads, query.shape[-1])
            k = pool.read(gather + k_shift, query.dtype).view(kv_shape).transpose(1, 2)
            v = pool.read(gather + v_shift, query.dtype).view(kv_shape).transpose(1, 2)
            out = attend(q, k, v, span.mask, scaling, softcap)
            out = out.view(*out.shape[:2], repeat, span.queries, -1).permute(0, 3, 1, 2, 4)
            output[span.start : span.start + tokens] = out.reshape(tokens, heads, query.shape[-1])
        return output

    def _spans(self, batch: Batch, number: int) -> list[Span]:
        window = self.pool.layout.groups[number].window
        lengths = np.diff(batch.query_start)
        table = batch.tables[number]
        spans = []
        at = 0
        while at < batch.sequences:
            last = at + 1
            if lengths[at] == 1:  # combine consecutive decodes into one padded batch
                longest = int(batch.kv_len[at])
                while last < batch.sequences and lengths[last] == 1:
                    longest = max(longest, int(batch.kv_len[last]))
                    if (last + 1 - at) * longest > GATHERED_TOKENS:
                        break
                    last += 1
            start = int(batch.query_start[at])
            spans.append(self._span(start, table[at:last], batch.kv_len[at:last], int(lengths[at]), window))
            at = last
        return spans

    def _span(self, start: int, table: Any, kv_len: Int64, queries: int, window: int | None) -> Span:
        size = self.pool.layout.block_size
        first_query = kv_len - queries  # position of each sequence's first query in this step
        first = np.zeros_like(kv_len) if window is None else np.maximum(0, first_query - window + 1)
        width = int((kv_len - first).max())
        position = first[:, None] + np.arange(width)  # [B, S], position of each context token
        valid = position < kv_len[:, None]
        safe = np.where(valid, position, first[:, None])
        slots = np.take_along_axis(table, safe // size, axis=1).astype(np.int64) * size + safe % size
        rows = on_device(self.pool.row_index(slots), self.device)
        if queries == 1 and valid.all():
            return Span(start, len(kv_len), 1, rows, None)
        # The position of each query, [B, Q, 1].
        query = first_query[:, None, None] + np.arange(queries)[None, :, None]
        see = (position[:, None, :] <= query) & valid[:, None, :]
        if window is not None:
            see &= position[:, None, :] > query - window
        mask = on_device(see, self.device)[:, None].repeat(1, 1, self._repeat, 1)
        return Span(start, len(kv_len), queries, rows, mask)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Return softmax attention of ``q`` [B, heads, Q, size] over ``k`` and ``v`` [B, heads, S, size].

    Args:
        q: queries.
        k: keys.
        v: values.
        mask: True where a query may attend; None if every query may attend to all S tokens.
        scaling: factor of the scores.
        softcap: bound of the scores by tanh; None for no bound.
    """
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    scores = torch.matmul(q, k.transpose(2, 3)) * scaling
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)
