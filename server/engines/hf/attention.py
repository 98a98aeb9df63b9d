"""Attention over the paged pool, registered with transformers under one name.

The K/V of a step's tokens are written to their slots, then every query attends to the slots its block table
names. Slots are gathered token by token, so a slot that was never written (the tail of a block, a freed block)
is never read: poisoning it with NaN changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from tonnage.planner.layout import KVLayout
from tonnage.server.engines.hf.batch import Batch, Int64

NAME = "tonnage_paged"


class PagedPool:
    """The KV pool of one rank: one tensor, allocated and touched once.

    Shape [blocks, layer slots, 2 (K, V), block size, KV heads, head size]; a block belongs to whichever group
    the manager gave it to, layer i of that group lives in layer slot i.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        shape = (num_blocks, layout.layer_slots, 2, layout.block_size, layout.kv_heads, layout.head_size)
        self.tensor = torch.empty(shape, dtype=dtype, device=device)
        self.tensor.zero_()  # touch every page now: what the plan promised is really held
        self.rows = self.tensor.view(-1, layout.kv_heads, layout.head_size)  # one row a token, layer and K or V
        self.place = {
            layer: (number, slot)
            for number, group in enumerate(layout.groups)
            for slot, layer in enumerate(group.layers)
        }

    @property
    def nbytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()

    def row_index(self, slots: Int64) -> Int64:
        """Row of K in layer slot 0 for each slot number (block * block_size + offset); -1 stays negative."""
        size = self.layout.block_size
        return (slots // size) * (self.layout.layer_slots * 2 * size) + slots % size

    def copy_blocks(self, source: Int64, destination: Int64) -> None:
        """Copy whole blocks (copy-on-write), every layer slot at once."""
        if len(source):
            self.tensor[torch.from_numpy(destination)] = self.tensor[torch.from_numpy(source)]


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


class PagedBatch:
    """A :class:`Batch` as tensors, with what every layer of a group shares worked out once."""

    def __init__(self, batch: Batch, pool: PagedPool, query_heads: int) -> None:
        self.pool = pool
        self.calls = 0
        self._repeat = query_heads // pool.layout.kv_heads
        self._device = pool.tensor.device
        self.write_rows = [self._tensor(pool.row_index(slots)) for slots in batch.slots]
        self.spans = [self._spans(batch, number) for number in range(len(batch.slots))]

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _spans(self, batch: Batch, number: int) -> list[Span]:
        window = self.pool.layout.groups[number].window
        lengths = np.diff(batch.query_start)
        table = batch.tables[number]
        spans = []
        at = 0
        while at < batch.sequences:
            last = at + 1
            if lengths[at] == 1:  # neighbouring decodes form one padded batch
                while last < batch.sequences and lengths[last] == 1:
                    last += 1
            spans.append(self._span(table[at:last], batch.kv_len[at:last], int(lengths[at]), window))
            at = last
        starts = batch.query_start
        at = 0
        placed = []
        for span in spans:
            placed.append(Span(int(starts[at]), span.sequences, span.queries, span.rows, span.mask))
            at += span.sequences
        return placed

    def _span(self, table: Any, kv_len: Int64, queries: int, window: int | None) -> Span:
        size = self.pool.layout.block_size
        first_query = kv_len - queries  # position of the first query
        first = np.zeros_like(kv_len) if window is None else np.maximum(0, first_query - window + 1)
        width = int((kv_len - first).max())
        position = first[:, None] + np.arange(width)  # [B, S]
        valid = position < kv_len[:, None]
        safe = np.where(valid, position, first[:, None])
        slots = np.take_along_axis(table, safe // size, axis=1).astype(np.int64) * size + safe % size
        rows = self._tensor(self.pool.row_index(slots))
        if queries == 1 and valid.all():
            return Span(0, len(kv_len), 1, rows, None)
        query = first_query[:, None, None] + np.arange(queries)[None, :, None]  # [B, Q, 1]
        see = (position[:, None, :] <= query) & valid[:, None, :]
        if window is not None:
            see &= position[:, None, :] > query - window
        mask = self._tensor(see)[:, None].repeat(1, 1, self._repeat, 1)
        return Span(0, len(kv_len), queries, rows, mask)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    paged_batch: PagedBatch | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls in each layer.

    ``query`` [1, heads, T, size], ``key`` and ``value`` [1, KV heads, T, size];
    returns [1, T, heads, size]. Windows come from the layout, not from the keyword of the same name.
    """
    if paged_batch is None:
        raise RuntimeError("this model does not hand its keyword arguments down to attention")
    pool = paged_batch.pool
    number, slot = pool.place[module.layer_idx]  # type: ignore[index]
    paged_batch.calls += 1
    size = pool.layout.block_size
    k_shift, v_shift = 2 * slot * size, (2 * slot + 1) * size
    rows = paged_batch.write_rows[number]
    pool.rows[rows + k_shift] = key[0].transpose(0, 1)
    pool.rows[rows + v_shift] = value[0].transpose(0, 1)

    heads, kv_heads = query.shape[1], pool.layout.kv_heads
    group = heads // kv_heads
    flat = query[0].transpose(0, 1)  # [T, heads, size]
    output = torch.empty_like(flat, memory_format=torch.contiguous_format)
    for span in paged_batch.spans[number]:
        tokens = span.sequences * span.queries
        shape = (span.sequences, span.queries, kv_heads, group, flat.shape[-1])
        # A KV head's query heads become extra queries, so K and V are never repeated.
        q = flat[span.start : span.start + tokens].view(shape).permute(0, 2, 3, 1, 4).flatten(2, 3)
        gather = span.rows.flatten()
        kv_shape = (*span.rows.shape, kv_heads, flat.shape[-1])
        k = pool.rows.index_select(0, gather + k_shift).view(kv_shape).transpose(1, 2)
        v = pool.rows.index_select(0, gather + v_shift).view(kv_shape).transpose(1, 2)
        out = attend(q, k, v, span.mask, scaling, softcap)
        out = out.unflatten(2, (group, span.queries)).permute(0, 3, 1, 2, 4)
        output[span.start : span.start + tokens] = out.reshape(tokens, heads, flat.shape[-1])
    return output[None], None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Softmax attention on [B, heads, Q, size] x [B, heads, S, size], scores capped where the model does."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


def no_mask(*_: Any, **__: Any) -> None:
    """Masks are built from block tables, once a step; transformers need not build its own."""
    return None


def register() -> None:
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, no_mask)
