"""The KV pool of one rank: a tensor, plus scales for some dtypes, with all its memory allocated at start."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tonnage.planner.model.dtypes import KV_SCALE_BYTES
from tonnage.planner.model.layout import KVLayout
from tonnage.server.engines.hf.batch import Int64

# Each value of --kv-cache-dtype, and the dtype in which the pool stores K and V.
STORED = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_per_token_head": torch.float8_e4m3fn,
    "int8_per_token_head": torch.int8,
}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max}


def on_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy a numpy array in host memory to a tensor on ``device``.

    The copy to a GPU goes through pinned memory, so it does not wait for the GPU's current work. The pinned
    memory stays allocated until the copy is done.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class PagedPool:
    """The KV pool, a tensor [blocks, layer slots, 2 (K, V), block size, KV heads, head size].

    The block manager gives each block to one KV cache group. In a block of that group, the group's layer i uses
    layer slot i.

    ``scales`` [blocks, layer slots, 2, block size, KV heads] float32 exists for dtypes with a scale per token
    and head. A stored value times its scale is the original value. fp8 without scales is clipped at 448, as in
    vLLM without calibrated scales.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.dtype = STORED[layout.dtype]
        shape = (num_blocks, layout.layer_slots, 2, layout.block_size, layout.kv_heads, layout.head_size)
        self.tensor = torch.empty(shape, dtype=self.dtype, device=device)
        # One row per token, layer, and K or V. Rows of 8-bit values are viewed as uint8, because torch cannot
        # index or fill 8-bit floats on every device.
        rows = self.tensor.view(-1, layout.kv_heads, layout.head_size)
        self.rows = rows.view(torch.uint8) if self.dtype.itemsize == 1 else rows
        self.rows.zero_()  # touch every page, so that the planned memory is resident
        self.scales: torch.Tensor | None = None
        if layout.dtype in KV_SCALE_BYTES:
            self.scales = torch.zeros(shape[:-1], dtype=torch.float32, device=device)
        self.place = {
            layer: (number, slot)
            for number, group in enumerate(layout.groups)
            for slot, layer in enumerate(group.layers)
        }

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the KV pool's tensor and its scales."""
        scales = 0 if self.scales is None else self.scales.untyped_storage().nbytes()
        return self.tensor.untyped_storage().nbytes() + scales

    def row_index(self, slots: Int64) -> Int64:
        """Return the pool row with K of layer slot 0 for each token slot (block * block_size + offset).

        A slot of -1 (padding) gives row -1.
        """
        size = self.layout.block_size
        return (slots // size) * (self.layout.layer_slots * 2 * size) + slots % size

    def write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Store K or V ``values`` [T, KV heads, head size] in the pool rows ``rows`` [T], in the pool's dtype.

        For a dtype with scales, the pool stores each value divided by its scale, and separately the scales.
        """
        largest = _LARGEST.get(self.dtype)
        if largest is None:
            self.rows[rows] = values.to(self.dtype)
            return
        values = values.float()
        if self.scales is not None:
            scale = values.abs().amax(-1).div_(largest).clamp_(min=torch.finfo(torch.float32).tiny)
            self.scales.view(-1, self.layout.kv_heads)[rows] = scale
            values = values / scale[..., None]
        if self.dtype == torch.int8:
            values = values.round()
        self.rows[rows] = values.clamp_(-largest, largest).to(self.dtype).view(torch.uint8)

    def read(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return K or V [T, KV heads, head size] of the pool rows ``rows`` [T], converted to ``dtype``."""
        stored = self.rows.index_select(0, rows)
        if stored.dtype != self.dtype:
            stored = stored.view(self.dtype)
        if self.scales is None:
            return stored.to(dtype)
        scale = self.scales.view(-1, self.layout.kv_heads).index_select(0, rows)
        return (stored.float() * scale[..., None]).to(dtype)

    def clear(self, slots: Int64) -> None:
        """Write zeros to K and V of every layer in the token slots ``slots`` (block * block_size + offset)."""
        size = self.layout.block_size
        blocks, offsets = (on_device(part, self.tensor.device) for part in (slots // size, slots % size))
        rows = self.rows.view(len(self.tensor), -1, size, *self.rows.shape[1:])
        rows[blocks, :, offsets] = 0
        if self.scales is not None:
            self.scales.view(len(self.tensor), -1, size, self.layout.kv_heads)[blocks, :, offsets] = 0

    def copy_blocks(self, source: Int64, destination: Int64) -> None:
        """Copy KV block ``source[i]`` to block ``destination[i]``, in all layers at once (copy-on-write)."""
        if not len(source):
            return
        to, start = (on_device(array, self.tensor.device) for array in (destination, source))
        blocks = self.rows.view(len(self.tensor), -1)
        blocks[to] = blocks[start]
        if self.scales is not None:
            self.scales[to] = self.scales[start]
