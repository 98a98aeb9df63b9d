"""The KV pool of one rank: one tensor, allocated and touched once."""

from __future__ import annotations

import torch

from tonnage.planner.layout import KVLayout
from tonnage.server.engines.hf.batch import Int64


class PagedPool:
    """Shape [blocks, layer slots, 2 (K, V), block size, KV heads, head size]. A block belongs to whichever
    group the manager gave it to; layer i of that group lives in layer slot i.
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
