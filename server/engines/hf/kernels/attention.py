"""Attention in place on the blocks of the KV pool, for bfloat16 on a CPU, for decodes and prefill chunks.

The work is divided into items; an item is one sequence, one KV head and up to 32 queries. Each item visits the
blocks of its sequence once with a running softmax (Milakov and Gimelshein, arXiv:1805.02867; FlashAttention,
arXiv:2205.14135). So the full score matrix is never stored. K and V are neither gathered nor repeated for the
query heads that share a KV head. Sums are float32. Slots after the last query of an item are never used, even
if they hold NaN.
"""

from __future__ import annotations

import numpy as np
from numba import prange
from numpy.typing import NDArray

from tonnage.server.engines.hf.kernels import compiled
from tonnage.server.engines.hf.kernels.rows import (
    copy_bytes,
    exp_row,
    fetch_rows,
    scale_floats,
    scale_scores,
    store_sums,
    weighted_sum,
)
from tonnage.server.engines.hf.kernels.vector import dot_tile

ROWS = 32  # query rows (queries x heads) that share one pass over the blocks
CHUNK = 64  # tokens between two rescalings of the running softmax
AHEAD = 32  # tokens to prefetch; the hardware's prefetcher cannot predict the address of the next block
TILE = 16  # tokens per score tile; the block size is a multiple of it

_dots_4 = dot_tile(4, 4, float_out=True)
_dots_2 = dot_tile(2, 8, float_out=True)
_dots_1 = dot_tile(1, 16, float_out=True)
_add_4, _add_2, _add_1 = weighted_sum(4), weighted_sum(2), weighted_sum(1)


def scratch_floats(head_size: int) -> int:
    """Return how many float32 values of working memory one thread of the attention kernel needs.

    The values are scores, sums padded to 32 values, and the maximum and total of each query row.
    """
    return ROWS * (CHUNK + -(-head_size // 32) * 32 + 2)


def cut(
    query_start: NDArray[np.int64], kv_len: NDArray[np.int64], kv_heads: int, group: int, threads: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide a step's attention into work items, and assign each thread items of about equal total cost.

    Args:
        query_start: cumulative query lengths, [S + 1].
        kv_len: context length of each sequence, [S].
        kv_heads: number of KV heads.
        group: query heads per KV head.
        threads: number of threads.

    Returns:
        Items [n, 5]: sequence, first query in the flat batch, number of queries, position of the first query,
            KV head.
        Bounds of each thread's consecutive items, [threads + 1].
    """
    counts = np.diff(query_start)
    pieces = -(-counts // ROWS)
    sequence = np.repeat(np.arange(len(counts)), pieces)
    number = np.arange(len(sequence)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = number * ROWS
    queries = np.minimum(ROWS, counts[sequence] - offset)
    position = (kv_len - counts)[sequence] + offset
    columns = np.stack([sequence, query_start[sequence] + offset, queries, position], axis=1)
    items = np.empty((len(sequence) * kv_heads, 5), np.int64)
    items[:, :4] = np.repeat(columns, kv_heads, axis=0)
    items[:, 4] = np.tile(np.arange(kv_heads), len(sequence))
    cost = np.repeat((queries * group + 4) * (position + queries + CHUNK), kv_heads).cumsum()
    shares = np.searchsorted(cost, cost[-1] * np.arange(threads + 1) / threads)
    shares[0], shares[-1] = 0, len(items)
    return items, shares


@compiled()
def _scores(q: int, stride: int, rows: int, keys: int, token: int, size: int, to: int) -> None:
    """Write the scores [rows, 16] of query rows against one tile of 16 keys.

    ``q``, ``keys`` and ``to`` are addresses. Rows of q are ``stride`` bytes apart, and keys are ``token`` bytes
    apart; ``size`` is the head size. Rows of the float32 scores are CHUNK values apart.
    """
    row = 0
    while row + 4 <= rows:
        for c in range(0, 16, 4):
            _dots_4(
                q + row * stride,
                stride,
                keys + c * token,
                token,
                size,
                to + 4 * (row * CHUNK + c),
                4 * CHUNK,
                0,
            )
        row += 4
    if row + 2 <= rows:
        for c in range(0, 16, 8):
            _dots_2(
                q + row * stride,
                stride,
                keys + c * token,
                token,
                size,
                to + 4 * (row * CHUNK + c),
                4 * CHUNK,
                0,
            )
        row += 2
    if row < rows:
        _dots_1(q + row * stride, stride, keys, token, size, to + 4 * row * CHUNK, 4 * CHUNK, 0)


@compiled()
def _values(p: int, rows: int, values: int, token: int, tokens: int, sums: int, size: int, padded: int) -> None:
    """Add the product of softmax weights and V, over ``tokens`` slots of one tile, to the sums of each row.

    ``p`` (weights), ``values`` (V) and ``sums`` are addresses. V's slots are ``token`` bytes apart; ``size`` is
    the head size and ``padded`` the distance of rows of ``sums``, in values.
    """
    for d in range(0, size, 32):
        row = 0
        while row + 4 <= rows:
            _add_4(
                p + 4 * row * CHUNK, 4 * CHUNK, values + 2 * d, token, tokens, sums + 4 * (row * padded + d),
                4 * padded, size - d,
            )  # fmt: skip
            row += 4
        if row + 2 <= rows:
            _add_2(
                p + 4 * row * CHUNK, 4 * CHUNK, values + 2 * d, token, tokens, sums + 4 * (row * padded + d),
                4 * padded, size - d,
            )  # fmt: skip
            row += 2
        if row < rows:
            _add_1(
                p + 4 * row * CHUNK, 4 * CHUNK, values + 2 * d, token, tokens, sums + 4 * (row * padded + d),
                4 * padded, size - d,
            )  # fmt: skip


@compiled()
def _walk(  # type: ignore[no-untyped-def]
    q, stride, rows, same, first, out, pool, table, block_size, block_bytes, token, values, size, scale, cap,
    window, scratch, work,
):  # fmt: skip
    """Compute the attention of ``rows`` query rows, ``stride`` bytes apart, over one KV head of one sequence.

    The rows are either query heads at one position or queries at consecutive positions. With ``same``, all rows
    are at position ``first``; else row r is at ``first + r``. ``pool`` is the address of the head's K in block
    0, and ``values`` the distance from K to V in bytes. ``scratch`` is the address of the array ``work``.
    """
    padded = (size + 31) // 32 * 32
    sums = scratch + 4 * ROWS * CHUNK
    highest, total = ROWS * (CHUNK + padded), ROWS * (CHUNK + padded) + ROWS
    for i in range(ROWS * CHUNK, ROWS * CHUNK + rows * padded):
        work[i] = 0.0
    for r in range(rows):
        work[highest + r] = -np.inf
        work[total + r] = 0.0
    last = first if same else first + rows - 1
    start = 0 if window == 0 else max(0, first - window + 1)
    for chunk in range(start // TILE * TILE, last + 1, CHUNK):
        end = min(chunk + CHUNK, last + 1)
        wide = (end - chunk + TILE - 1) // TILE * TILE
        for tile in range(chunk, end, TILE):
            at = pool + np.int64(table[tile // block_size]) * block_bytes + tile % block_size * token
            fetch_rows(at + values, token, TILE, 2 * size)
            later = tile + AHEAD
            if later <= last:
                far = pool + np.int64(table[later // block_size]) * block_bytes + later % block_size * token
                fetch_rows(far, token, TILE, 2 * size)
            _scores(q, stride, rows, at, token, size, scratch + 4 * (tile - chunk))
        for r in range(rows):
            position = first if same else first + r
            line = r * CHUNK
            for c in range(max(0, position + 1 - chunk), wide):
                work[line + c] = -np.inf
            if window > 0:
                for c in range(min(wide, position - window + 1 - chunk)):
                    work[line + c] = -np.inf
            best = scale_scores(scratch + 4 * line, wide, scale, cap)
            before = work[highest + r]
            if cap > 0.0:  # mask again, because tanh made -inf finite
                for c in range(max(0, position + 1 - chunk), wide):
                    work[line + c] = -np.inf
                if window > 0:
                    for c in range(min(wide, position - window + 1 - chunk)):
                        work[line + c] = -np.inf
            if best <= before or best == -np.inf:
                best = before
            elif before != -np.inf:
                work[highest + r] = best
                factor = np.float32(np.exp(before - best))
                work[total + r] *= factor
                scale_floats(sums + 4 * r * padded, padded, factor)
            else:
                work[highest + r] = best
            work[total + r] += exp_row(scratch + 4 * line, wide, best if best != -np.inf else np.float32(0.0))
        for tile in range(chunk, end, TILE):
            at = pool + np.int64(table[tile // block_size]) * block_bytes + tile % block_size * token + values
            _values(scratch + 4 * (tile - chunk), rows, at, token, min(TILE, end - tile), sums, size, padded)
    for r in range(rows):
        factor = np.float32(1.0) / work[total + r]
        for d in range(0, size, 32):
            store_sums(sums + 4 * (r * padded + d), out + r * stride + 2 * d, size - d, factor)


@compiled(parallel=True)
def attend(  # type: ignore[no-untyped-def]
    q, k, v, out, pool, write, tables, items, shares, block_size, block_bytes, heads, kv_heads, size, scale,
    cap, window, work,
):  # fmt: skip
    """Write K and V of a step to the pool, then compute the attention of one layer in parallel threads.

    ``q``, ``k``, ``v`` and ``out`` are addresses of bfloat16 rows; ``pool`` is the address of the layer's K in
    block 0. ``write`` has the pool row of each token. ``items`` and ``shares`` come from `cut`, and ``work``
    has `scratch_floats` values per thread.
    """
    threads = len(shares) - 1
    token = 2 * kv_heads * size
    values = block_size * token
    tokens = len(write)
    for thread in prange(threads):
        for t in range(thread * tokens // threads, (thread + 1) * tokens // threads):
            to = pool + write[t] * token
            copy_bytes(to, k + t * token, token)
            copy_bytes(to + values, v + t * token, token)
    group = heads // kv_heads
    row = 2 * size  # bytes of one head of one token
    for thread in prange(threads):
        mine = work[thread]
        scratch = mine.ctypes.data
        for i in range(shares[thread], shares[thread + 1]):
            sequence, flat, queries, position, head = items[i]
            base = (flat * heads + head * group) * row
            keys = pool + head * row
            table = tables[sequence]
            # With one query, the rows are the query heads that share the KV head. With more, they are the
            # queries of one query head.
            one = queries == 1
            stride = row if one else heads * row
            for g in range(0, group, ROWS if one else 1):
                rows = min(ROWS, group - g) if one else queries
                _walk(
                    q + base + g * row, stride, rows, one, position, out + base + g * row, keys, table,
                    block_size, block_bytes, token, values, size, scale, cap, window, scratch, mine,
                )  # fmt: skip
