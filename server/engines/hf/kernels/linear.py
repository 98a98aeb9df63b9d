"""Linear layers y = x W^T for bfloat16 on a CPU, which read W [out, in] as stored in the checkpoint.

Each output is a dot product of a row of W and a row of x. So W is neither repacked nor copied, and an output
layer that shares its weight with the embedding needs no second copy. An output depends only on its own row of
x, so it does not change with the rest of the batch.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from tonnage.server.engines.hf.kernels import compiled
from tonnage.server.engines.hf.kernels.rows import gate_row
from tonnage.server.engines.hf.kernels.vector import dot_tile

_ZERO = np.float32(0)

# A panel is a set of rows of x that are multiplied with one block of columns before the next block. It has at
# most 64 rows and 128 KiB.
PANEL, PANEL_BYTES = 64, 1 << 17

# Kernels that compute one tile of a block. A block has 16 columns of the output (16 rows of W), which stay in
# the first-level cache while all rows of x are multiplied. The number after "tile" is the tile's number of rows
# of x. The third argument is how many rows of the next block's W the kernel prefetches; all tiles of a block
# together prefetch 16.
_tile_4 = dot_tile(4, 4)
_tile_4_ahead_1 = dot_tile(4, 4, 1)
_tile_4_ahead_2 = dot_tile(4, 4, 2)
_tile_4_ahead_4 = dot_tile(4, 4, 4)
_tile_2 = dot_tile(2, 8)
_tile_2_ahead = dot_tile(2, 8, 8)
_tile_1 = dot_tile(1, 16)
_tile_1_ahead = dot_tile(1, 16, 16)


@compiled()
def block_of_columns(x: int, w: int, out: int, rows: int, k: int, stride: int) -> None:
    """Compute 16 columns of ``out`` from ``rows`` rows of ``x`` and 16 rows of ``w``, all given as addresses.

    ``k`` is the row length of x and w in values, ``stride`` the bytes per row of out.
    """
    size = 2 * k
    row = 0
    while row + 4 <= rows:
        for c in range(0, 16, 4):
            xr, wr, to = x + row * size, w + c * size, out + row * stride + 2 * c
            if rows >= 16 and row < 16:
                _tile_4_ahead_1(xr, size, wr, size, k, to, stride, w + (16 + row + c // 4) * size)
            elif 8 <= rows < 16 and row < 8:
                _tile_4_ahead_2(xr, size, wr, size, k, to, stride, w + (16 + 2 * row + c // 2) * size)
            elif rows < 8:
                _tile_4_ahead_4(xr, size, wr, size, k, to, stride, w + (16 + c) * size)
            else:
                _tile_4(xr, size, wr, size, k, to, stride, 0)
        row += 4
    if row + 2 <= rows:
        for c in range(0, 16, 8):
            xr, wr, to = x + row * size, w + c * size, out + row * stride + 2 * c
            if row == 0:
                _tile_2_ahead(xr, size, wr, size, k, to, stride, w + (16 + c) * size)
            else:
                _tile_2(xr, size, wr, size, k, to, stride, 0)
        row += 2
    if row < rows:
        xr, to = x + row * size, out + row * stride
        # With one row of x, computing a block of 16 columns takes about as long as a memory access. So the
        # prefetch is two blocks ahead.
        if row == 0:
            _tile_1_ahead(xr, size, w, size, k, to, stride, w + 32 * size)
        else:
            _tile_1(xr, size, w, size, k, to, stride, 0)


@compiled()
def share(thread: int, threads: int, rows: int, blocks: int) -> tuple[int, int, int, int]:
    """Return one thread's part of a matrix product: (first row, last row, first block, last block).

    Threads divide the columns, in blocks of 16. With at least `PANEL` rows per thread they divide the rows
    instead, so that a thread's rows of x stay in its cache.
    """
    if rows >= PANEL * threads:
        return thread * rows // threads, (thread + 1) * rows // threads, 0, blocks
    return 0, rows, thread * blocks // threads, (thread + 1) * blocks // threads


@compiled()
def panel_rows(k: int) -> int:
    """Return how many rows of x, of length ``k``, to multiply per block of columns.

    These rows fit the second-level cache.
    """
    return max(16, min(PANEL, PANEL_BYTES // (2 * k) // 16 * 16))


@compiled(parallel=True)
def matmul(
    x: int, w: int, up: int, out: int, scratch: int, rows: int, columns: int, k: int, linear: float,
    cubic: float, threads: int,
) -> None:  # fmt: skip
    """Compute out = x w^T, or, if ``up`` is not 0, the gated product out = act(x w^T) * (x up^T).

    ``x``, ``w``, ``up``, ``out`` and ``scratch`` are addresses. ``linear`` and ``cubic`` are the coefficients
    of act as in ``rows.gate_row``. With ``up``, ``scratch`` needs 32 bytes per thread and row of a panel
    (`PANEL`).
    """
    panel = panel_rows(k)
    for thread in prange(threads):
        ups = scratch + 32 * PANEL * thread
        top, bottom, first, last = share(thread, threads, rows, columns // 16)
        for row in range(top, bottom, panel):
            height = min(panel, bottom - row)
            for block in range(first, last):
                to = out + 2 * columns * row + 32 * block
                block_of_columns(x + 2 * k * row, w + 32 * block * k, to, height, k, 2 * columns)
                if up:
                    block_of_columns(x + 2 * k * row, up + 32 * block * k, ups, height, k, 32)
                    for r in range(height):
                        gate_row(to + 2 * columns * r, ups + 32 * r, 16, linear, cubic)


def gate_values(threads: int) -> int:
    """Return the size of the scratch memory that a gated `matmul` needs, in bfloat16 values."""
    return 16 * PANEL * threads


def serves(weight: torch.Tensor) -> bool:
    """Return whether the linear-layer kernel can read the tensor ``weight``.

    The tensor must be contiguous bfloat16 on the CPU, and its number of rows a multiple of 16.
    """
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and weight.shape[0] % 16 == 0
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the linear layer x weight^T + bias for bfloat16 ``x`` [..., in] and ``weight`` [out, in].

    `serves` must accept the weight.
    """
    columns, k = weight.shape
    if not x.is_contiguous():
        x = x.contiguous()
    out = torch.empty((*x.shape[:-1], columns), dtype=torch.bfloat16)
    rows = x.numel() // k
    matmul(
        x.data_ptr(), weight.data_ptr(), 0, out.data_ptr(), 0, rows, columns, k, _ZERO, _ZERO,
        torch.get_num_threads(),
    )  # fmt: skip
    return out if bias is None else out.add_(bias)


def gated(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: tuple[float, float]
) -> torch.Tensor:
    """Return the gated product act(x gate^T) * (x up^T) of an MLP.

    ``activation`` has the coefficients (linear, cubic) of act, as in ``rows.gate_row``.
    """
    columns, k = gate.shape
    if not x.is_contiguous():
        x = x.contiguous()
    threads = torch.get_num_threads()
    rows = x.numel() // k
    out = torch.empty((*x.shape[:-1], columns), dtype=torch.bfloat16)
    scratch = torch.empty(gate_values(threads), dtype=torch.bfloat16)
    matmul(
        x.data_ptr(), gate.data_ptr(), up.data_ptr(), out.data_ptr(), scratch.data_ptr(), rows, columns, k,
        np.float32(activation[0]), np.float32(activation[1]), threads,
    )  # fmt: skip
    return out
