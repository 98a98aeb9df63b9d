"""Common parts of the attention implementations: writing K and V to the pool, and visible block tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from tonnage.server.engines.hf.batch import Batch, Int32
from tonnage.server.engines.hf.pool import PagedPool, on_device


@dataclass(frozen=True, slots=True)
class Pages:
    """The blocks of one KV cache group that the queries of a step can attend to.

    Kernels align queries with the end of the context, so blocks outside the sliding window can be omitted.
    Omitted blocks are never read, because the block manager may have reused them.

    Attributes:
        table: ids of the visible blocks of each sequence, [S, W]; -1 for unused entries.
        length: tokens from the first visible block to the end of the context, [S].
        skipped: number of omitted blocks before the first visible block, [S].
    """

    table: Int32
    length: Int32
    skipped: Int32


def pages(batch: Batch, group: int, window: int | None, block_size: int) -> Pages:
    """Return the blocks of KV cache group ``group`` that the batch's queries can attend to.

    ``window`` is the group's sliding window in tokens, or None for full attention.
    """
    queries = np.diff(batch.query_start)
    first = 0 * batch.kv_len if window is None else np.maximum(0, batch.kv_len - queries - window + 1)
    skipped = first // block_size
    count = -(-batch.kv_len // block_size) - skipped
    column = np.arange(count.max())[None]
    place = np.minimum(skipped[:, None] + column, batch.tables[group].shape[1] - 1)
    table = np.where(column < count[:, None], np.take_along_axis(batch.tables[group], place, 1), -1)
    length = batch.kv_len - skipped * block_size
    return Pages(table.astype(np.int32), length.astype(np.int32), skipped.astype(np.int32))


class PoolAttention(ABC):
    """The attention of one step, called in each layer; a subclass computes it from K and V in the KV pool."""

    def __init__(self, batch: Batch, pool: PagedPool) -> None:
        self.pool, self.device = pool, pool.tensor.device
        self._rows = [on_device(pool.row_index(slots), self.device) for slots in batch.slots]

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
        """Write K and V of one layer to the pool, then return the layer's attention [T, heads, size].

        Args:
            group: index of the layer's KV cache group.
            slot: index of the layer within its KV cache group (layer slot).
            query: [T, heads, size].
            key: [T, KV heads, size].
            value: [T, KV heads, size].
            scaling: factor of the scores.
            softcap: bound of the scores by tanh; None for no bound.
        """
        size = self.pool.layout.block_size
        self.pool.write(self._rows[group] + 2 * slot * size, key)
        self.pool.write(self._rows[group] + (2 * slot + 1) * size, value)
        return self.read(group, slot, query, scaling, softcap)

    @abstractmethod
    def read(
        self, group: int, slot: int, query: torch.Tensor, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        """Return one layer's attention of the step's queries over their context in the KV pool.

        Args:
            group: index of the layer's KV cache group.
            slot: index of the layer within its KV cache group (layer slot).
            query: [T, heads, size].
            scaling: factor of the scores.
            softcap: bound of the scores by tanh; None for no bound.

        Returns:
            The attention, in the shape of ``query``.
        """


class PagedAttention(PoolAttention):
    """The attention of one step by a GPU kernel, which reads the blocks that the step's queries can see."""

    def __init__(self, batch: Batch, pool: PagedPool) -> None:
        super().__init__(batch, pool)
        groups, size = pool.layout.groups, pool.layout.block_size
        self.windows = [group.window for group in groups]
        self.pages = [pages(batch, number, group.window, size) for number, group in enumerate(groups)]
        self.longest_query = int(np.diff(batch.query_start).max())

    def layer(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of layer slot ``slot``: views [blocks, block size, KV heads, size] of the KV pool."""
        return self.pool.tensor[:, slot, 0], self.pool.tensor[:, slot, 1]
