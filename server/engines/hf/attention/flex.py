"""torch's FlexAttention, in place on KV blocks: always available, and compiled where Triton is installed.

FlexAttention sees the pool as one long row of token slots. In each pool block, K of layer slot ``s`` begins
``2 * s`` block sizes after the block's start, and V one block size later. The block mask names the pool blocks
that a tile of queries reads. The mask function selects the slots that a query may attend to.

The tests run FlexAttention uncompiled on a CPU, where torch computes every query against every slot of the
pool. This module is untested on a GPU. A tile has 16 queries of one sequence, so a decode reads each block
once, and a prefill chunk reads each block once per tile. FlashAttention has larger tiles and reads blocks less
often.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tonnage.cache.admission import Limits
from tonnage.planner.engines.runtime.hf import FLEX_TILE
from tonnage.server.engines.hf.attention.paged import PagedAttention
from tonnage.server.engines.hf.batch import Batch
from tonnage.server.engines.hf.pool import PagedPool, on_device

TILE = FLEX_TILE  # queries of one sequence per tile; Triton's matrix product (tl.dot) needs at least 16


class Buffers:
    """Input arrays of FlexAttention, which keep their shape, because a new shape would be compiled again.

    Attributes:
        sequence: index of each query row's sequence, [rows].
        position: position of each query row in its sequence, [rows]; -1 for an unused row.
        table: one array per KV cache group, with the ids of visible blocks at their block table indices,
            [sequences, W]; -1 for no block.
        place: index of each block in its block table, [blocks]. One array serves all groups and sequences: a
            block belongs to one group, and sequences that share a block share all blocks before it.
    """

    def __init__(self, pool: PagedPool, limits: Limits) -> None:
        self.device, self.groups = pool.tensor.device, len(pool.layout.groups)
        self.width = max(2, -(-limits.max_model_len // pool.layout.block_size))
        self.place = self._zeros(len(pool.tensor))
        self._hold(limits.max_num_batched_tokens + limits.max_num_seqs * TILE, limits.max_num_seqs)
        compiled = self.device.type == "cuda"
        self.attend = torch.compile(flex_attention, fullgraph=True) if compiled else flex_attention

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def _hold(self, rows: int, sequences: int) -> None:
        self.sequence, self.position = self._zeros(rows), self._zeros(rows)
        self.table = [self._zeros(sequences, self.width) for _ in range(self.groups)]

    def fit(self, rows: int, sequences: int) -> None:
        """Enlarge the arrays to at least ``rows`` query rows and ``sequences`` sequences.

        The batch of the start-up self-check may exceed the configured limits of a small server.
        """
        if rows > len(self.sequence) or sequences > len(self.table[0]):
            self._hold(max(rows, len(self.sequence)), max(sequences, len(self.table[0])))


class FlexAttention(PagedAttention):
    """The attention of one step, computed by torch's FlexAttention from the KV pool's blocks."""

    def __init__(self, batch: Batch, pool: PagedPool, buffers: Buffers) -> None:
        super().__init__(batch, pool)
        self._buffers = buffers
        queries = np.diff(batch.query_start)
        tiles = -(-queries // TILE)
        tiles[-1] += tiles.sum() == 1  # at least two tiles, because torch compiles a size of 1 separately
        self._sequence = np.repeat(np.arange(len(tiles)), tiles)  # index of each tile's sequence
        row = np.repeat(self._sequence, TILE)
        number = np.arange(len(row)) - ((np.cumsum(tiles) - tiles) * TILE)[row]
        position = np.where(number < queries[row], (batch.kv_len - queries)[row] + number, -1)
        buffers.fit(len(row), len(tiles))
        buffers.sequence[: len(row)] = self._put(row)
        buffers.position[: len(row)] = self._put(position)
        # Index of each query among the padded query rows, [T].
        self._rows_of = on_device(np.flatnonzero(position >= 0), self.device)
        self._last = position.reshape(-1, TILE).max(1)  # last position in each tile; -1 for an unused tile
        self._masks = [self._mask(group, len(row)) for group in range(len(self.pages))]

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return on_device(array.astype(np.int32), self.device)

    def _mask(self, group: int, rows: int) -> BlockMask:
        layout, pages, buffers = self.pool.layout, self.pages[group], self._buffers
        # ``parts`` is the number of K and V blocks of all layers, which lie side by side in a pool block.
        size, parts = layout.block_size, 2 * layout.layer_slots
        sequence, position = buffers.sequence, buffers.position
        table, place, window = buffers.table[group], buffers.place, self.windows[group]
        which, at = np.nonzero(pages.table >= 0)
        block, at = pages.table[which, at], at + pages.skipped[which]
        own = np.full((len(pages.table), buffers.width), -1)
        own[which, at] = block
        table[: len(own)] = self._put(own)
        place[on_device(block.astype(np.int64), self.device)] = self._put(at)

        def sees(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            block, slot = kv // (parts * size), kv % (parts * size)
            key = place[block] * size + slot
            mine = table[sequence[q], place[block]] == block
            seen = (slot < size) & mine & (key <= position[q])
            return seen if window is None else seen & (key > position[q] - window)

        count = np.maximum(0, self._last // size + 1 - pages.skipped[self._sequence])
        read = torch.zeros(1, 1, len(self._sequence), buffers.width, dtype=torch.int32, device=self.device)
        read[..., : pages.table.shape[1]] = self._put(np.maximum(pages.table, 0)[self._sequence] * parts)
        return BlockMask.from_kv_blocks(
            self._put(count)[None, None],
            read,
            BLOCK_SIZE=(TILE, size),
            mask_mod=sees,
            seq_lengths=(rows, ((len(self.pool.tensor) - 1) * parts + 1) * size),
            compute_q_blocks=False,
        )

    def read(
        self, group: int, slot: int, query: torch.Tensor, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        """Return one layer's attention, by FlexAttention; see `PoolAttention.read` for the arguments."""
        mask, size = self._masks[group], self.pool.layout.block_size
        rows, slots = mask.seq_lengths
        padded = query.new_zeros(rows, *query.shape[1:])
        padded[self._rows_of] = query
        padded = padded.transpose(0, 1)[None]
        k, v = (
            self.pool.rows[part * size : part * size + slots].transpose(0, 1)[None]
            for part in (2 * slot, 2 * slot + 1)
        )
        for tensor, dimension in ((padded, 2), (mask.kv_num_blocks, 2), (mask.kv_indices, 2)):
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)
        output = self._buffers.attend(
            padded,
            k,
            v,
            score_mod=None if softcap is None else capped(softcap),
            block_mask=mask,
            scale=scaling,
            enable_gqa=True,
            kernel_options={"BLOCK_M": TILE, "BLOCK_N": math.gcd(size, 64), "FORCE_USE_FLEX_ATTENTION": True},
        )
        return output[0].transpose(0, 1)[self._rows_of]


def capped(softcap: float) -> Callable[..., torch.Tensor]:
    """Return a FlexAttention score function that bounds scores by ``softcap`` x tanh(score / ``softcap``)."""

    def score(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.tanh(score / softcap) * softcap

    return score
