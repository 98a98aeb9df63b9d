"""The reference attention in plain torch: gather the slots each block table names, then ordinary attention.

It serves every device and dtype, and the tests hold the kernels against it. Slots are gathered token by token,
so a slot that was never written (the tail of a block, a freed block) is never read: poisoning it with NaN
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from tonnage.planner.engines.runtime.hf import GATHERED_TOKENS
from tonnage.server.engines.hf.batch import Batch, Int64
from tonnage.server.engines.hf.pool import PagedPool, on_device

# (group, layer slot, query, key, value, scaling, softcap) -> output; see GatherAttention.__call__
Attention = Callable[[int, int, torch.Tensor, torch.Tensor, torch.Tensor, float, float | None], torch.Tensor]
Backend = Callable[[Batch], Attention]


@dataclass(frozen=True, slots=True)
class Span:
    """Queries that attend together: all decodes of the step, or one prefill chunk.

    ``rows`` [B, S] are pool rows of K in layer slot 0 (padding repeats the first row), ``mask``
    [B, 1, groups * queries, S] is True where a query may look, None where it sees all.
    """

    start: int
    sequences: int
    queries: int  # per sequence
    rows: torch.Tensor
    mask: torch.Tensor | None


class GatherAttention:
    """Attention of one step; what every layer of a group shares is worked out once."""

    def __init__(self, batch: Batch, pool: PagedPool, query_heads: int) -> None:
        self._pool = pool
        self._repeat = query_heads // pool.layout.kv_heads
        self._device = pool.tensor.device
        self._write_rows = [self._put(pool.row_index(slots)) for slots in batch.slots]
        self._by_group = [self._spans(batch, number) for number in range(len(batch.slots))]

    def __call__(
        self,
        group: int,
        slot: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """``query`` [T, heads, size], ``key`` and ``value`` [T, KV heads, size]: write K and V of the layer in
        ``slot`` of ``group``, return the attention [T, heads, size]."""
        pool = self._pool
        size = pool.layout.block_size
        k_shift, v_shift = 2 * slot * size, (2 * slot + 1) * size
        rows = self._write_rows[group]
        pool.write(rows + k_shift, key)
        pool.write(rows + v_shift, value)

        heads, kv_heads = query.shape[1], pool.layout.kv_heads
        repeat = heads // kv_heads
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for span in self._by_group[group]:
            tokens = span.sequences * span.queries
            shape = (span.sequences, span.queries, kv_heads, repeat, query.shape[-1])
            # A KV head's query heads become extra queries, so K and V are never repeated.
            q = query[span.start : span.start + tokens].reshape(shape).permute(0, 2, 3, 1, 4).flatten(2, 3)
            gather = span.rows.flatten()
            kv_shape = (*span.rows.shape, kv_heads, query.shape[-1])
            k = pool.read(gather + k_shift, query.dtype).view(kv_shape).transpose(1, 2)
            v = pool.read(gather + v_shift, query.dtype).view(kv_shape).transpose(1, 2)
            out = attend(q, k, v, span.mask, scaling, softcap)
            out = out.view(*out.shape[:2], repeat, span.queries, -1).permute(0, 3, 1, 2, 4)
            output[span.start : span.start + tokens] = out.reshape(tokens, heads, query.shape[-1])
        return output

    def _put(self, array: Any) -> torch.Tensor:
        return on_device(array, self._device)

    def _spans(self, batch: Batch, number: int) -> list[Span]:
        window = self._pool.layout.groups[number].window
        lengths = np.diff(batch.query_start)
        table = batch.tables[number]
        spans = []
        at = 0
        while at < batch.sequences:
            last = at + 1
            if lengths[at] == 1:  # neighbouring decodes form one padded batch
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
        size = self._pool.layout.block_size
        first_query = kv_len - queries  # position of the first query
        first = np.zeros_like(kv_len) if window is None else np.maximum(0, first_query - window + 1)
        width = int((kv_len - first).max())
        position = first[:, None] + np.arange(width)  # [B, S]
        valid = position < kv_len[:, None]
        safe = np.where(valid, position, first[:, None])
        slots = np.take_along_axis(table, safe // size, axis=1).astype(np.int64) * size + safe % size
        rows = self._put(self._pool.row_index(slots))
        if queries == 1 and valid.all():
            return Span(start, len(kv_len), 1, rows, None)
        query = first_query[:, None, None] + np.arange(queries)[None, :, None]  # [B, Q, 1]
        see = (position[:, None, :] <= query) & valid[:, None, :]
        if window is not None:
            see &= position[:, None, :] > query - window
        mask = self._put(see)[:, None].repeat(1, 1, self._repeat, 1)
        return Span(start, len(kv_len), queries, rows, mask)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Softmax attention on [B, heads, Q, size] x [B, heads, S, size], scores capped where the model does."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    scores = torch.matmul(q, k.transpose(2, 3)) * scaling
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)
