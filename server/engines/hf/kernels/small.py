"""RMS norm and rotary embedding of bfloat16 tensors on a CPU, each in one pass with float32 between."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from tonnage.server.engines.hf.kernels.jit import compiled
from tonnage.server.engines.hf.kernels.rows import rotate_row, scale_row, square_sum

# Elements below which a second thread costs more (about 2 us to wake it) than it takes over.
SERIAL = 32768


@compiled()
def _norm(x: int, weight: int, out: int, first: int, last: int, n: int, epsilon: float, shift: float) -> None:
    for row in range(first, last):
        mean = square_sum(x + 2 * n * row, n) / np.float32(n)
        factor = np.float32(1.0) / np.sqrt(mean + epsilon)
        scale_row(x + 2 * n * row, weight, out + 2 * n * row, n, factor, shift)


@compiled(parallel=True)
def _norms(
    x: int, weight: int, out: int, rows: int, n: int, epsilon: float, shift: float, threads: int
) -> None:
    for thread in prange(threads):
        _norm(x, weight, out, thread * rows // threads, (thread + 1) * rows // threads, n, epsilon, shift)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, shift: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * (weight + shift) over the last dimension, a multiple of 16, bfloat16."""
    if not x.is_contiguous():
        x = x.contiguous()
    out = torch.empty_like(x)
    n = x.shape[-1]
    rows = x.numel() // n
    eps, plus = np.float32(epsilon), np.float32(shift)
    if x.numel() < SERIAL:
        _norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), 0, rows, n, eps, plus)
    else:
        threads = torch.get_num_threads()
        _norms(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, n, eps, plus, threads)
    return out


@compiled()
def _rotate(x: int, heads: int, first: int, last: int, size: int, rotated: int, cosine: int, sine: int) -> None:
    for token in range(first, last):
        for head in range(heads):
            at = x + 2 * size * (token * heads + head)
            rotate_row(at, cosine + 2 * rotated * token, sine + 2 * rotated * token, rotated // 2)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> None:
    """Rotary embedding in place on ``x`` [T, heads, size] contiguous; cosine and sine [T, rotated]."""
    tokens, heads, size = x.shape
    _rotate(x.data_ptr(), heads, 0, tokens, size, cosine.shape[-1], cosine.data_ptr(), sine.data_ptr())
