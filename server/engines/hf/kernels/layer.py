"""A kernel that computes a whole decoder layer in one call, composed of the kernels that replace its modules.

It runs norms, projections, rotary embedding, attention on the pool's blocks, gated MLP and both residual sums
without a return to Python. With a few rows, a return to Python takes longer than a small matrix product, and
meanwhile the compute threads fall asleep. The kernel rounds where the modules round, so results are
bit-identical.
"""

from __future__ import annotations

from numba import prange

from tonnage.server.engines.hf.kernels import compiled
from tonnage.server.engines.hf.kernels.attention import attend
from tonnage.server.engines.hf.kernels.linear import block_of_columns, matmul, panel_rows, share
from tonnage.server.engines.hf.kernels.rows import add_row
from tonnage.server.engines.hf.kernels.small import SERIAL, norm_rows, rotate_rows

# Names of the weights in the order of the array of weight addresses. The address of a weight that the layer
# does not have is 0.
WEIGHTS = (
    "input norm",
    "q",
    "k",
    "v",
    "q bias",
    "k bias",
    "v bias",
    "q norm",
    "k norm",
    "o",
    "attention norm",  # weight of a norm that is applied to the attention's output before the residual sum
    "mlp norm",
    "gate",
    "up",
    "down",
    "output norm",  # weight of a norm that is applied to the MLP's output before the residual sum
)
INPUT_NORM, Q, K, V, Q_BIAS, K_BIAS, V_BIAS, Q_NORM, K_NORM = range(9)
OUT, ATTENTION_NORM, MLP_NORM, GATE, UP, DOWN, OUTPUT_NORM = range(9, len(WEIGHTS))


def work_values(hidden: int, heads: int, kv_heads: int, size: int, inner: int) -> int:
    """Return the working memory of one token in a call of the decoder-layer kernel, in bfloat16 values.

    The layer's input and output are not included.
    """
    return 2 * hidden + max((2 * heads + 2 * kv_heads) * size, inner)


@compiled(parallel=True)
def _project(x, q, k, v, to_q, to_k, to_v, rows, hidden, wide, narrow, threads):  # type: ignore[no-untyped-def]
    """Compute the projections q, k and v of ``rows`` rows of x in parallel threads.

    q has ``wide`` columns, k and v have ``narrow`` columns.
    """
    panel = panel_rows(hidden)
    border, end = wide // 16, (wide + narrow) // 16
    for thread in prange(threads):
        top, bottom, first, last = share(thread, threads, rows, (wide + 2 * narrow) // 16)
        for row in range(top, bottom, panel):
            height = min(panel, bottom - row)
            for block in range(first, last):
                if block < border:
                    w, to, at, columns = q, to_q, block, wide
                elif block < end:
                    w, to, at, columns = k, to_k, block - border, narrow
                else:
                    w, to, at, columns = v, to_v, block - end, narrow
                block_of_columns(
                    x + 2 * hidden * row, w + 32 * at * hidden, to + 2 * columns * row + 32 * at, height,
                    hidden, 2 * columns,
                )  # fmt: skip


@compiled()
def _turn(q, k, v, w, cosine, sine, first, last, heads, kv_heads, size, epsilon, shift):  # type: ignore[no-untyped-def]
    """Add biases, norm each head and rotate q and k (rotary embedding), in place, for some rows.

    The rows are ``first`` (inclusive) to ``last`` (exclusive).
    """
    wide, narrow = heads * size, kv_heads * size
    if w[Q_BIAS]:
        for row in range(first, last):
            add_row(q + 2 * wide * row, w[Q_BIAS], q + 2 * wide * row, wide)
            add_row(k + 2 * narrow * row, w[K_BIAS], k + 2 * narrow * row, narrow)
            add_row(v + 2 * narrow * row, w[V_BIAS], v + 2 * narrow * row, narrow)
    if w[Q_NORM]:
        norm_rows(q, w[Q_NORM], q, first * heads, last * heads, size, epsilon, shift)
        norm_rows(k, w[K_NORM], k, first * kv_heads, last * kv_heads, size, epsilon, shift)
    rotate_rows(q, heads, first, last, size, size, cosine, sine)
    rotate_rows(k, kv_heads, first, last, size, size, cosine, sine)


@compiled(parallel=True)
def _turns(q, k, v, w, cosine, sine, rows, heads, kv_heads, size, epsilon, shift, threads):  # type: ignore[no-untyped-def]
    """Add biases, norm each head and rotate q and k (rotary embedding), in place, for all rows in parallel."""
    for thread in prange(threads):
        _turn(
            q, k, v, w, cosine, sine, thread * rows // threads, (thread + 1) * rows // threads, heads, kv_heads,
            size, epsilon, shift,
        )  # fmt: skip


@compiled()
def _sum(x, more, out, after, then, to, first, last, n, epsilon, shift):  # type: ignore[no-untyped-def]
    """Compute the residual sum out = x + more for rows ``first`` to ``last``, and its norm to = norm(out).

    ``after`` is the address of the norm weight applied to ``more`` before the sum, or 0 for none. ``then`` is
    the address of the norm weight for ``to``, or 0 to leave ``to`` unchanged.
    """
    if after:
        norm_rows(more, after, more, first, last, n, epsilon, shift)
    for row in range(first, last):
        add_row(x + 2 * n * row, more + 2 * n * row, out + 2 * n * row, n)
    if then:
        norm_rows(out, then, to, first, last, n, epsilon, shift)


@compiled(parallel=True)
def _sums(x, more, out, after, then, to, rows, n, epsilon, shift, threads):  # type: ignore[no-untyped-def]
    """Compute the residual sums of all rows and their norms, divided among ``threads`` threads.

    `_sum` describes the arguments.
    """
    for thread in prange(threads):
        first, last = thread * rows // threads, (thread + 1) * rows // threads
        _sum(x, more, out, after, then, to, first, last, n, epsilon, shift)


@compiled(parallel=True)
def _norms(x, weight, out, rows, n, epsilon, shift, threads):  # type: ignore[no-untyped-def]
    for thread in prange(threads):
        norm_rows(x, weight, out, thread * rows // threads, (thread + 1) * rows // threads, n, epsilon, shift)


@compiled()
def layer(  # type: ignore[no-untyped-def]
    x, out, work, gates, w, cosine, sine, rows, hidden, inner, epsilon, shift, linear, cubic, pool, write,
    tables, items, shares, block_size, block_bytes, heads, kv_heads, size, scale, cap, window, scratch,
):  # fmt: skip
    """Compute a decoder layer from ``x`` to ``out``, both addresses of [rows, hidden] bfloat16 values.

    ``work`` is the address of `work_values` values per row, and ``gates`` of the scratch memory of
    `linear.matmul`. ``w`` has the int64 weight addresses in the order of `WEIGHTS`. ``cosine`` and ``sine`` are
    addresses of [rows, size]. ``linear`` and ``cubic`` are the activation's coefficients as in `rows.gate_row`.
    The arguments from ``pool`` on are passed to `attention.attend`.
    """
    threads = len(shares) - 1
    serial = rows * (heads + 2 * kv_heads) * size < SERIAL and rows * hidden < SERIAL
    normed = work
    more = normed + 2 * rows * hidden
    q = more + 2 * rows * hidden
    k = q + 2 * rows * heads * size
    v = k + 2 * rows * kv_heads * size
    seen = v + 2 * rows * kv_heads * size
    opened = q  # reuses the memory of q, k, v and the attention output, which the MLP does not need
    if serial:
        norm_rows(x, w[INPUT_NORM], normed, 0, rows, hidden, epsilon, shift)
    else:
        _norms(x, w[INPUT_NORM], normed, rows, hidden, epsilon, shift, threads)
    _project(normed, w[Q], w[K], w[V], q, k, v, rows, hidden, heads * size, kv_heads * size, threads)
    if serial:
        _turn(q, k, v, w, cosine, sine, 0, rows, heads, kv_heads, size, epsilon, shift)
    else:
        _turns(q, k, v, w, cosine, sine, rows, heads, kv_heads, size, epsilon, shift, threads)
    attend(
        q, k, v, seen, pool, write, tables, items, shares, block_size, block_bytes, heads, kv_heads, size,
        scale, cap, window, scratch,
    )  # fmt: skip
    matmul(seen, w[OUT], 0, more, 0, rows, hidden, heads * size, linear, cubic, threads)
    if serial:
        _sum(x, more, out, w[ATTENTION_NORM], w[MLP_NORM], normed, 0, rows, hidden, epsilon, shift)
    else:
        _sums(x, more, out, w[ATTENTION_NORM], w[MLP_NORM], normed, rows, hidden, epsilon, shift, threads)
    matmul(normed, w[GATE], w[UP], opened, gates, rows, inner, hidden, linear, cubic, threads)
    matmul(opened, w[DOWN], 0, more, 0, rows, hidden, inner, linear, cubic, threads)
    if serial:
        _sum(out, more, out, w[OUTPUT_NORM], 0, normed, 0, rows, hidden, epsilon, shift)
    else:
        _sums(out, more, out, w[OUTPUT_NORM], 0, normed, rows, hidden, epsilon, shift, threads)
