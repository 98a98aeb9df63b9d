"""LLVM IR operations on one row of bfloat16 or float32 values: norms, rotary embedding, gates, softmax, sums.

Row lengths are multiples of 16 unless stated otherwise. Addresses are int64, in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from tonnage.server.engines.hf.kernels.vector import (
    F32,
    I1,
    I8,
    I32,
    I64,
    V16F,
    V16H,
    V16I,
    at,
    call,
    constant,
    fetch_line,
    fma,
    halves,
    lanes,
    load,
    load_first,
    loop,
    operation,
    splat,
    store,
    store_first,
    to_bfloat,
)

_LOG2E = math.log2(math.e)
# ln 2 as the sum of two parts, the first of which is exact in a few bits. So x - n ln 2 keeps its precision
# (Cody, Waite, 1980).
_LN2_HIGH, _LN2_LOW = 0.693359375, math.log(2) - 0.693359375
_SMALLEST, _LARGEST = -87.0, 88.0  # bounds of x: beyond them, e^x is subnormal or infinite in float32


def exp16(builder: Any, x: Any) -> Any:
    """Emit e^x in 16 float32 lanes, with a relative error below 1e-6; x below -87 gives 0, NaN stays NaN.

    It uses a Taylor series of r, where x = n ln 2 + r and |r| <= ln 2 / 2.
    """
    low = builder.fcmp_ordered("<", x, constant(V16F, _SMALLEST))
    x = builder.select(low, constant(V16F, _SMALLEST), x)
    high = builder.fcmp_ordered(">", x, constant(V16F, _LARGEST))
    x = builder.select(high, constant(V16F, _LARGEST), x)
    n = call(builder, "llvm.rint.v16f32", V16F, [builder.fmul(x, constant(V16F, _LOG2E))])
    r = fma(builder, n, constant(V16F, -_LN2_HIGH), x)
    r = fma(builder, n, constant(V16F, -_LN2_LOW), r)
    series = constant(V16F, 1 / math.factorial(6))
    for degree in range(5, -1, -1):
        series = fma(builder, series, r, constant(V16F, 1 / math.factorial(degree)))
    whole = call(builder, "llvm.fptosi.sat.v16i32.v16f32", V16I, [n])
    power = builder.shl(builder.add(whole, constant(V16I, 127)), constant(V16I, 23))
    result = builder.fmul(series, builder.bitcast(power, V16F))
    return builder.select(low, constant(V16F, 0.0), result)


def _widen(builder: Any, address: Any, offset: Any) -> Any:
    """Emit a load of 16 bfloat16 values, converted to 16 float32 lanes."""
    half = load(builder, address, V16H, offset)
    return builder.bitcast(builder.shl(builder.zext(half, V16I), constant(V16I, 16)), V16F)


def _each(builder: Any, count: Any, body: Callable[[Any], None]) -> None:
    """Emit ``for i in range(0, count, 16)``, without values that an iteration passes to the next one."""

    def step(index: Any, _: list[Any]) -> list[Any]:
        body(index)
        return []

    loop(builder, count, [], step)


def _bytes(builder: Any, index: Any, shift: int) -> Any:
    return builder.shl(index, ir.Constant(I64, shift))


def _fold(builder: Any, name: str, value: Any) -> Any:
    """Emit the reduction of 16 lanes to one scalar by the operation ``name``, in a fixed order."""
    width = 8
    while width:
        other = builder.shuffle_vector(value, value, lanes([(i + width) % 16 for i in range(16)]))
        if name == "add":
            value = builder.fadd(value, other)
        else:
            value = builder.select(builder.fcmp_ordered(">", other, value), other, value)
        width //= 2
    return builder.extract_element(value, ir.Constant(I32, 0))


@operation(integers=2, result=types.float32)
def square_sum(builder: Any, x: Any, n: Any) -> Any:
    """Return the sum of the squares of ``n`` bfloat16 values in float32."""

    def step(index: Any, sums: list[Any]) -> list[Any]:
        value = _widen(builder, x, _bytes(builder, index, 1))
        return [fma(builder, value, value, sums[0])]

    (total,) = loop(builder, n, [constant(V16F, 0.0)], step)
    return _fold(builder, "add", total)


@operation(integers=4, floats=2)
def scale_row(builder: Any, x: Any, weight: Any, out: Any, n: Any, factor: Any, shift: Any) -> None:
    """Compute out = x * factor * (weight + shift) for ``n`` bfloat16 values, in float32."""
    many, plus = splat(builder, factor, V16F), splat(builder, shift, V16F)

    def step(index: Any) -> None:
        offset = _bytes(builder, index, 1)
        scaled = builder.fmul(_widen(builder, x, offset), many)
        gain = builder.fadd(_widen(builder, weight, offset), plus)
        store(builder, to_bfloat(builder, builder.fmul(scaled, gain)), out, offset)

    _each(builder, n, step)


@operation(integers=4)
def add_row(builder: Any, a: Any, b: Any, out: Any, n: Any) -> None:
    """Compute out = a + b for ``n`` bfloat16 values, rounded once; ``out`` may be ``a`` or ``b``."""

    def step(index: Any) -> None:
        offset = _bytes(builder, index, 1)
        total = builder.fadd(_widen(builder, a, offset), _widen(builder, b, offset))
        store(builder, to_bfloat(builder, total), out, offset)

    _each(builder, n, step)


@operation(integers=4)
def rotate_row(builder: Any, x: Any, cosine: Any, sine: Any, half: Any) -> None:
    """Apply the rotary embedding in place to a row of 2 x ``half`` values; cosine and sine are as long."""
    far = _bytes(builder, half, 1)

    def step(index: Any) -> None:
        near_at = _bytes(builder, index, 1)
        far_at = builder.add(near_at, far)
        a, b = _widen(builder, x, near_at), _widen(builder, x, far_at)
        turned = builder.fneg(builder.fmul(b, _widen(builder, sine, near_at)))
        first = fma(builder, a, _widen(builder, cosine, near_at), turned)
        turned = builder.fmul(a, _widen(builder, sine, far_at))
        second = fma(builder, b, _widen(builder, cosine, far_at), turned)
        store(builder, to_bfloat(builder, first), x, near_at)
        store(builder, to_bfloat(builder, second), x, far_at)

    _each(builder, half, step)


@operation(integers=3, floats=2)
def gate_row(builder: Any, gate: Any, up: Any, n: Any, linear: Any, cubic: Any) -> None:
    """Compute gate = g sigmoid(linear g + cubic g^3) up in place, where g is the old gate, all bfloat16.

    SiLU has (linear, cubic) = (1, 0). The tanh form of GELU has (c, 0.044715 c) with c = 2 sqrt(2 / pi),
    because (1 + tanh z) / 2 = sigmoid(2 z).
    """
    linear, cubic = splat(builder, linear, V16F), splat(builder, cubic, V16F)
    one = constant(V16F, 1.0)

    def step(index: Any) -> None:
        offset = _bytes(builder, index, 1)
        g = _widen(builder, gate, offset)
        z = builder.fmul(g, fma(builder, builder.fmul(g, g), cubic, linear))
        open_ = builder.fdiv(g, builder.fadd(one, exp16(builder, builder.fneg(z))))
        value = builder.fmul(open_, _widen(builder, up, offset))
        store(builder, to_bfloat(builder, value), gate, offset)

    _each(builder, n, step)


@operation(integers=2, floats=2, result=types.float32)
def scale_scores(builder: Any, x: Any, n: Any, scale: Any, cap: Any) -> Any:
    """Scale ``n`` float32 scores in place and return their maximum.

    The result is x scale, or with cap > 0 the bounded cap tanh(x scale / cap).
    """
    by = splat(builder, scale, V16F)
    capped = builder.fcmp_ordered(">", cap, ir.Constant(F32, 0.0))
    with builder.if_then(capped):
        top = splat(builder, cap, V16F)

        def squash(index: Any) -> None:
            offset = _bytes(builder, index, 2)
            y = builder.fdiv(builder.fmul(load(builder, x, V16F, offset), by), top)
            e = exp16(builder, builder.fmul(y, constant(V16F, 2.0)))
            share = builder.fdiv(constant(V16F, 2.0), builder.fadd(e, constant(V16F, 1.0)))
            store(builder, builder.fmul(top, builder.fsub(constant(V16F, 1.0), share)), x, offset)

        _each(builder, n, squash)
    factor = builder.select(capped, constant(V16F, 1.0), by)

    def step(index: Any, best: list[Any]) -> list[Any]:
        offset = _bytes(builder, index, 2)
        value = builder.fmul(load(builder, x, V16F, offset), factor)
        store(builder, value, x, offset)
        return [builder.select(builder.fcmp_ordered(">", value, best[0]), value, best[0])]

    (best,) = loop(builder, n, [constant(V16F, float("-inf"))], step)
    return _fold(builder, "max", best)


@operation(integers=2, floats=1, result=types.float32)
def exp_row(builder: Any, x: Any, n: Any, shift: Any) -> Any:
    """Replace ``n`` float32 values x by e^(x - shift) in place; return their sum."""
    by = splat(builder, shift, V16F)

    def step(index: Any, sums: list[Any]) -> list[Any]:
        offset = _bytes(builder, index, 2)
        value = exp16(builder, builder.fsub(load(builder, x, V16F, offset), by))
        store(builder, value, x, offset)
        return [builder.fadd(sums[0], value)]

    (total,) = loop(builder, n, [constant(V16F, 0.0)], step)
    return _fold(builder, "add", total)


@operation(integers=2, floats=1)
def scale_floats(builder: Any, x: Any, n: Any, factor: Any) -> None:
    """Multiply ``n`` float32 values by ``factor`` in place."""
    by = splat(builder, factor, V16F)

    def step(index: Any) -> None:
        offset = _bytes(builder, index, 2)
        store(builder, builder.fmul(load(builder, x, V16F, offset), by), x, offset)

    _each(builder, n, step)


def weighted_sum(rows: int) -> Callable[..., None]:
    """Return an intrinsic that adds the sum over tokens of p[r, t] v[t] to sums[r], for ``rows`` rows r.

    The intrinsic's arguments are ``(p, p_stride, v, v_stride, tokens, sums, sums_stride, width)``. p and sums
    are float32, v is bfloat16. A call handles the first ``width`` <= 32 values of v. sums holds the values of
    even index, then the values of odd index.
    """

    @operation(integers=8)
    def add(
        builder: Any,
        p: Any,
        p_stride: Any,
        v: Any,
        v_stride: Any,
        tokens: Any,
        sums: Any,
        stride: Any,
        width: Any,
    ) -> None:
        places = []
        for r in range(rows):
            row = builder.add(sums, builder.mul(stride, ir.Constant(I64, r)))
            places += [row, builder.add(row, ir.Constant(I64, 64))]
        start = [load(builder, place, V16F) for place in places]
        full = builder.icmp_signed(">=", width, ir.Constant(I64, 32))

        def accumulate(fetch: Callable[[Any], Any]) -> None:
            def step(index: Any, totals: list[Any]) -> list[Any]:
                token = builder.lshr(index, ir.Constant(I64, 4))
                even, odd = halves(builder, fetch(builder.mul(token, v_stride)))
                new = []
                for r in range(rows):
                    where = builder.add(builder.mul(p_stride, ir.Constant(I64, r)), _bytes(builder, token, 2))
                    weight = splat(builder, load(builder, p, F32, where), V16F)
                    new.append(fma(builder, weight, even, totals[2 * r]))
                    new.append(fma(builder, weight, odd, totals[2 * r + 1]))
                return new

            totals = loop(builder, _bytes(builder, tokens, 4), start, step)
            for place, total in zip(places, totals, strict=True):
                store(builder, total, place)

        with builder.if_else(full) as (whole, part):
            with whole:
                accumulate(lambda offset: load(builder, v, V16I, offset))
            with part:
                accumulate(lambda offset: load_first(builder, v, offset, width))

    return add


@operation(integers=3, floats=1)
def store_sums(builder: Any, sums: Any, out: Any, width: Any, factor: Any) -> None:
    """Store a row of `weighted_sum`'s sums times ``factor`` as ``width`` <= 32 bfloat16 values.

    It restores the order of the values: sums has first the even, then the odd indices.
    """
    by = splat(builder, factor, V16F)
    even = to_bfloat(builder, builder.fmul(load(builder, sums, V16F), by))
    odd = to_bfloat(builder, builder.fmul(load(builder, sums, V16F, ir.Constant(I64, 64)), by))
    order = [i // 2 + 16 * (i % 2) for i in range(32)]
    both = builder.shuffle_vector(even, odd, lanes(order))
    full = builder.icmp_signed(">=", width, ir.Constant(I64, 32))
    with builder.if_else(full) as (whole, part):
        with whole:
            store(builder, both, out)
        with part:
            store_first(builder, both, out, width)


@operation(integers=3)
def copy_bytes(builder: Any, destination: Any, source: Any, count: Any) -> None:
    """Copy ``count`` bytes (memcpy)."""
    to, start = at(builder, destination, I8), at(builder, source, I8)
    call(builder, "llvm.memcpy.p0.p0.i64", ir.VoidType(), [to, start, count, ir.Constant(I1, 0)])


@operation(integers=4)
def fetch_rows(builder: Any, address: Any, stride: Any, rows: Any, width: Any) -> None:
    """Prefetch ``rows`` rows of ``width`` bytes, ``stride`` bytes apart, into the second-level cache."""

    def row(index: Any) -> None:
        start = builder.add(address, builder.mul(builder.lshr(index, ir.Constant(I64, 4)), stride))

        def line(index: Any) -> None:
            fetch_line(builder, builder.add(start, _bytes(builder, index, 2)))

        _each(builder, builder.lshr(width, ir.Constant(I64, 2)), line)

    _each(builder, _bytes(builder, rows, 4), row)
