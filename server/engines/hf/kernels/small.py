"""RMS norm, rotary embedding and argmax of bfloat16 tensors on a CPU, each in one pass."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from tonnage.server.engines.hf.kernels import compiled
from tonnage.server.engines.hf.kernels.rows import rotate_row, scale_row, square_sum

# Below this number of elements one thread does the work, because waking a second one takes about 2 us, longer
# than it saves.
SERIAL = 32768


@compiled()
def norm_rows(
    x: int, weight: int, out: int, first: int, last: int, n: int, epsilon: float, shift: float
) -> None:
    """Write the RMS norm of rows ``first`` to ``last`` of ``x``, each of ``n`` bfloat16 values, to ``out``.

    The factor of each value is its weight plus ``shift``.
    """
    for row in range(first, last):
        mean = square_sum(x + 2 * n * row, n) / np.float32(n)
        factor = np.float32(1.0) / np.sqrt(mean + epsilon)
        scale_row(x + 2 * n * row, weight, out + 2 * n * row, n, factor, shift)


@compiled(parallel=True)
def _norms(
    x: int, weight: int, out: int, rows: int, n: int, epsilon: float, shift: float, threads: int
) -> None:
    """Write the RMS norm of all rows of ``x`` to ``out``, in parallel."""
    for thread in prange(threads):
        norm_rows(x, weight, out, thread * rows // threads, (thread + 1) * rows // threads, n, epsilon, shift)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, shift: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) * (weight + shift) over the last dimension.

    The last dimension is a multiple of 16.
    """
    if not x.is_contiguous():
        x = x.contiguous()
    out = torch.empty_like(x)
    n = x.shape[-1]
    rows = x.numel() // n
    eps, plus = np.float32(epsilon), np.float32(shift)
    if x.numel() < SERIAL:
        norm_rows(x.data_ptr(), weight.data_ptr(), out.data_ptr(), 0, rows, n, eps, plus)
    else:
        threads = torch.get_num_threads()
        _norms(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, n, eps, plus, threads)
    return out


@compiled()
def rotate_rows(
    x: int, heads: int, first: int, last: int, size: int, rotated: int, cosine: int, sine: int
) -> None:
    """Apply the rotary embedding in place to all ``heads`` of tokens ``first`` to ``last``.

    The first ``rotated`` of the ``size`` values of a head are rotated.
    """
    for token in range(first, last):
        for head in range(heads):
            at = x + 2 * size * (token * heads + head)
            rotate_row(at, cosine + 2 * rotated * token, sine + 2 * rotated * token, rotated // 2)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> None:
    """Apply the rotary embedding in place to ``x`` [T, heads, size].

    ``cosine`` and ``sine`` are [T, rotated]; the first ``rotated`` values of each head are rotated.
    """
    tokens, heads, size = x.shape
    rotate_rows(x.data_ptr(), heads, 0, tokens, size, cosine.shape[-1], cosine.data_ptr(), sine.data_ptr())


_INFINITE = np.int16(0x7F80)  # bfloat16 bits of infinity; larger magnitudes are NaN
_HALVES = np.int16(0x7FFF)
CHUNK = 512  # values per chunk of the search for the first maximum


@compiled(parallel=True)
def _peaks(bits, first, finite):  # type: ignore[no-untyped-def]
    rows, columns = bits.shape
    for row in prange(rows):
        values = bits[row]
        best, at, largest = np.int16(-0x8000), 0, np.int16(0)
        for start in range(0, columns, CHUNK):
            top = np.int16(-0x8000)
            for i in range(start, min(start + CHUNK, columns)):
                value = values[i]
                size = np.int16(value & _HALVES)
                largest = max(largest, size)
                # Map the bits of each value to an integer with the same order: negative values are reversed,
                # and -0 becomes 0.
                top = max(top, np.int16(-size) if value < 0 else size)
            if top > best:
                best, at = top, start
        for i in range(at, min(at + CHUNK, columns)):
            value = values[i]
            size = np.int16(value & _HALVES)
            if (np.int16(-size) if value < 0 else size) == best:
                first[row] = i
                break
        finite[row] = largest <= _INFINITE and -_INFINITE < best < _INFINITE


def peaks(logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Find the first maximum of each row of ``logits`` [L, columns], bfloat16 on a CPU.

    Returns:
        The column of each maximum, and whether the row has no NaN and a finite maximum.
    """
    first, finite = np.zeros(len(logits), np.int64), np.zeros(len(logits), np.bool_)
    _peaks(logits.contiguous().view(torch.int16).numpy(), first, finite)
    return first, finite
