"""Attention that the CPU kernel of ``kernels.attention`` computes in place on the KV pool's blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tonnage.server.engines.hf.batch import Batch
from tonnage.server.engines.hf.kernels.attention import TILE, attend, cut, scratch_floats
from tonnage.server.engines.hf.kernels.linear import gate_values
from tonnage.server.engines.hf.pool import PagedPool


def serves(pool: PagedPool) -> bool:
    """Return whether the CPU attention kernel can read a KV pool.

    The pool must be bfloat16 on the CPU, with a block size that is a multiple of 16.
    """
    return (
        pool.tensor.dtype == torch.bfloat16
        and pool.tensor.device.type == "cpu"
        and pool.layout.block_size % TILE == 0
    )


class Scratch:
    """Working memory of the CPU attention kernel's threads, reused in every step."""

    def __init__(self, pool: PagedPool, threads: int) -> None:
        self.threads = threads
        self.work = np.empty((threads, scratch_floats(pool.layout.head_size)), np.float32)


class InPlaceAttention:
    """The attention of one step, computed by the CPU kernel from the KV pool's blocks.

    It is called like a `PoolAttention`, but the kernel itself writes K and V.
    """

    def __init__(self, batch: Batch, pool: PagedPool, query_heads: int, scratch: Scratch) -> None:
        layout = pool.layout
        self._pool, self._scratch = pool, scratch
        self._write = [pool.row_index(slots) for slots in batch.slots]
        self._tables = [np.ascontiguousarray(table) for table in batch.tables]
        self._items, self._shares = cut(
            batch.query_start, batch.kv_len, layout.kv_heads, query_heads // layout.kv_heads, scratch.threads
        )
        self._windows = [group.window or 0 for group in layout.groups]
        self._token = layout.kv_heads * layout.head_size * 2  # bytes of K of one token in one layer
        self._block = layout.layer_slots * 2 * layout.block_size * self._token
        self._base = pool.tensor.data_ptr()
        self._memory: torch.Tensor | None = None

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
        """Write K and V of one layer to the pool, then return the layer's attention [T, heads, size]."""
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        output = torch.empty_like(query)
        attend(
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            output.data_ptr(),
            *self.arguments(group, slot, query.shape[1], scaling, softcap),
        )
        return output

    def arguments(
        self, group: int, slot: int, heads: int, scaling: float, softcap: float | None
    ) -> tuple[Any, ...]:
        """Return the arguments of ``kernels.attention.attend`` after q, k, v and out, for one layer."""
        layout = self._pool.layout
        return (
            self._base + slot * 2 * layout.block_size * self._token,
            self._write[group],
            self._tables[group],
            self._items,
            self._shares,
            layout.block_size,
            self._block,
            heads,
            layout.kv_heads,
            layout.head_size,
            np.float32(scaling),
            np.float32(softcap or 0.0),
            self._windows[group],
            self._scratch.work,
        )

    def memory(self, values: int) -> tuple[int, int]:
        """Return the addresses of ``values`` bfloat16 values and of `linear.matmul`'s scratch memory.

        All layers of the step use the same memory.
        """
        gates = gate_values(self._scratch.threads)
        if self._memory is None or len(self._memory) < values + gates:
            self._memory = torch.empty(values + gates, dtype=torch.bfloat16)
        address = self._memory.data_ptr()
        return address + 2 * gates, address
