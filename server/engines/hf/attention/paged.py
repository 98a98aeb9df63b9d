"""Common parts of GPU kernels that read the pool through block tables: writing K and V, and their tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from tonnage.server.engines.hf.batch import Batch, Int32
from tonnage.server.engines.hf.pool import PagedPool, on_device


@dataclass(frozen=True, slots=True)
class Pages:
    """The blocks of one group that the queries of a step can see.

    Kernels align queries with the end of their context, so blocks that the window has left can be omitted. The
    manager may have reused such a block, and omitted blocks are never read.

    Attributes:
        table: visible blocks of each sequence, [S, W]; -1: unused.
        length: tokens from the first block of the row on, [S].
        skipped: omitted blocks before the first one, [S].
    """

    table: Int32
    length: Int32
    skipped: Int32


def pages(batch: Batch, group: int, window: int | None, block_size: int) -> Pages:
    """Return the visible blocks of ``group``."""
    queries = np.diff(batch.query_start)
    first = 0 * batch.kv_len if window is None else np.maximum(0, batch.kv_len - queries - window + 1)
    skipped = first // block_size
    count = -(-batch.kv_len // block_size) - skipped
    column = np.arange(count.max())[None]
    place = np.minimum(skipped[:, None] + column, batch.tables[group].shape[1] - 1)
    table = np.where(column < count[:, None], np.take_along_axis(batch.tables[group], place, 1), -1)
    length = batch.kv_len - skipped * block_size
    return Pages(table.astype(np.int32), length.astype(np.int32), skipped.astype(np.int32))


class PagedAttention(ABC):
    """The attention of one step, called like ``gather.GatherAttention``; a subclass reads K and V."""

    def __init__(self, batch: Batch, pool: PagedPool) -> None:
        self.pool, self.device = pool, pool.tensor.device
        self._rows = [on_device(pool.row_index(slots), self.device) for slots in batch.slots]
        groups, size = pool.layout.groups, pool.layout.block_size
        self.windows = [group.window for group in groups]
        self.pages = [pages(batch, number, group.window, size) for number, group in enumerate(groups)]
        self.longest_query = int(np.diff(batch.query_start).max())

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
        """Write K and V of one layer, then return the attention [T, heads, size]."""
        size = self.pool.layout.block_size
        self.pool.write(self._rows[group] + 2 * slot * size, key)
        self.pool.write(self._rows[group] + (2 * slot + 1) * size, value)
        return self.read(group, slot, query, scaling, softcap)

    @abstractmethod
    def read(
        self, group: int, slot: int, query: torch.Tensor, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        """Return the attention of ``query`` [T, heads, size], in the same shape, over the pool."""

    def layer(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the layer in ``slot``: views [blocks, block size, KV heads, size] of the pool."""
        return self.pool.tensor[:, slot, 0], self.pool.tensor[:, slot, 1]
