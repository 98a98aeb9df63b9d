"""Vector operations that numba's code generator does not offer, as LLVM IR.

Vectors have 512 bits: 32 bfloat16 values as <16 x i32>, or 16 float32 values. On a CPU with AVX512-BF16, one
instruction multiplies 32 pairs and adds the products to 16 float32 sums. On other CPUs two float32 FMAs compute
the same sums, and LLVM splits them to the available vector width. Addresses are integers, in bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tonnage.cache.ahead import has

NATIVE = has("avx512bf16")
# Masked loads and stores need AVX512BW. Without it LLVM emits a branch per value, and `linear.matmul` took 41 s
# to compile instead of 3 s.
MASKED = has("avx512bw")

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
V16F, V16I, V16H = ir.VectorType(F32, 16), ir.VectorType(I32, 16), ir.VectorType(I16, 16)
V32H, V32B1, V16B1 = ir.VectorType(I16, 32), ir.VectorType(I1, 32), ir.VectorType(I1, 16)


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's 16-bit float type bfloat, which llvmlite does not define."""

    null = "0.0"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_V32B, _V16B = ir.VectorType(_BFloat(), 32), ir.VectorType(_BFloat(), 16)


def constant(kind: ir.Type, value: float) -> ir.Constant:
    """Return an LLVM constant of type ``kind``: a scalar, or a vector with the value in every lane."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [ir.Constant(kind.element, value)] * kind.count)
    return ir.Constant(kind, value)


def lanes(indices: Sequence[int]) -> ir.Constant:
    """Return the LLVM shuffle mask that selects the vector lanes ``indices``."""
    return ir.Constant(ir.VectorType(I32, len(indices)), [ir.Constant(I32, i) for i in indices])


def at(builder: Any, address: Any, kind: ir.Type, offset: Any = None) -> Any:
    """Emit LLVM IR for a pointer to ``kind`` from an integer address and an optional offset in bytes."""
    if offset is not None:
        address = builder.add(address, offset)
    return builder.inttoptr(address, kind.as_pointer())


def load(builder: Any, address: Any, kind: ir.Type, offset: Any = None) -> Any:
    """Emit LLVM IR that loads a value of type ``kind`` with an alignment of only 2 bytes."""
    value = builder.load(at(builder, address, kind, offset))
    value.align = 2
    return value


def store(builder: Any, value: Any, address: Any, offset: Any = None) -> None:
    """Emit LLVM IR that stores a value with an alignment of only 2 bytes."""
    builder.store(value, at(builder, address, value.type, offset)).align = 2


def splat(builder: Any, scalar: Any, kind: ir.VectorType) -> Any:
    """Emit LLVM IR for a vector of type ``kind`` with ``scalar`` in every lane."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, one, lanes([0] * kind.count))


def call(builder: Any, name: str, result: ir.Type, arguments: Sequence[Any]) -> Any:
    """Emit a call of the LLVM intrinsic ``name`` with a result of type ``result``."""
    kind = ir.FunctionType(result, [value.type for value in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def halves(builder: Any, pairs: Any) -> tuple[Any, Any]:
    """Emit the even and the odd elements of bfloat16 pairs <16 x i32> as two float32 vectors.

    A bfloat16 value is the upper half of a float32, so a shift and a mask convert it.
    """
    even = builder.shl(pairs, constant(V16I, 16))
    odd = builder.and_(pairs, constant(V16I, 0xFFFF0000))
    return builder.bitcast(even, V16F), builder.bitcast(odd, V16F)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit a * b + c on 16 float32 lanes, rounded once."""
    return call(builder, "llvm.fma.v16f32", V16F, [a, b, c])


def to_bfloat(builder: Any, value: Any) -> Any:
    """Emit the conversion of <16 x float> to bfloat16 <16 x i16>, rounded to nearest even; NaN stays NaN."""
    if NATIVE:
        half = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", _V16B, [value])
        return builder.bitcast(half, V16H)
    bits = builder.bitcast(value, V16I)
    lsb = builder.and_(builder.lshr(bits, constant(V16I, 16)), constant(V16I, 1))
    rounded = builder.add(bits, builder.add(lsb, constant(V16I, 0x7FFF)))
    nan = builder.fcmp_unordered("uno", value, value)
    rounded = builder.select(nan, constant(V16I, 0x7FC00000), rounded)
    return builder.trunc(builder.lshr(rounded, constant(V16I, 16)), V16H)


def multiply_pairs(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """Emit total[i] + a[2i] b[2i] + a[2i+1] b[2i+1] in float32, for bfloat16 pairs a and b <16 x i32>."""
    if NATIVE:
        a, b = builder.bitcast(a, _V32B), builder.bitcast(b, _V32B)
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", V16F, [total, a, b])
    (a0, a1), (b0, b1) = halves(builder, a), halves(builder, b)
    return fma(builder, a1, b1, fma(builder, a0, b0, total))


# Shuffle masks that reduce two vectors of partial sums to one, level by level. A level has two masks, and each
# mask is one instruction: unpack single, unpack double, and for two levels a shuffle of 128-bit lanes.
_QUARTERS = range(0, 16, 4)
_EVEN, _ODD = (0, 8, 16, 24), (4, 12, 20, 28)  # 128-bit lanes 0 and 2 of both vectors, then lanes 1 and 3
_LEVELS = (
    [[q + i for q in _QUARTERS for i in order] for order in ((0, 16, 1, 17), (2, 18, 3, 19))],
    [[q + i for q in _QUARTERS for i in order] for order in ((0, 1, 16, 17), (2, 3, 18, 19))],
    *[[[q + i for q in order for i in range(4)] for order in (_EVEN, _ODD)]] * 2,
)


def sum_lanes(builder: Any, sums: list[Any]) -> Any:
    """Emit a vector whose lane i is the sum of all lanes of ``sums[i]``, for 16 vectors."""
    for low, high in _LEVELS:
        sums = [
            builder.fadd(builder.shuffle_vector(a, b, lanes(low)), builder.shuffle_vector(a, b, lanes(high)))
            for a, b in zip(sums[::2], sums[1::2], strict=True)
        ]
    return sums[0]


def first_lanes(builder: Any, count: Any) -> Any:
    """Emit a mask of 32 lanes of which the first ``count`` (int64) are set."""
    index = ir.Constant(V32H, [ir.Constant(I16, i) for i in range(32)])
    return builder.icmp_signed("<", index, splat(builder, builder.trunc(count, I16), V32H))


def copy_values(builder: Any, to: Any, start: Any, count: Any) -> None:
    """Emit a copy of ``count`` 16-bit values from one pointer to another."""
    to, start = (builder.bitcast(pointer, I16.as_pointer()) for pointer in (to, start))
    size = builder.shl(count, ir.Constant(I64, 1))
    call(builder, "llvm.memcpy.p0.p0.i64", ir.VoidType(), [to, start, size, ir.Constant(I1, 0)])


def load_first(builder: Any, address: Any, offset: Any, count: Any) -> Any:
    """Emit a load of the first ``count`` of 32 bfloat16 values, as <16 x i32> padded with 0.

    It reads no memory after these values.
    """
    pointer = at(builder, address, V32H, offset)
    if MASKED:
        mask, zero = first_lanes(builder, count), constant(V32H, 0)
        values = call(builder, "llvm.masked.load.v32i16.p0", V32H, [pointer, ir.Constant(I32, 2), mask, zero])
        return builder.bitcast(values, V16I)
    room = cgutils.alloca_once(builder, V16I)
    builder.store(constant(V16I, 0), room)
    copy_values(builder, room, pointer, count)
    return builder.load(room)


def store_first(builder: Any, values: Any, address: Any, count: Any) -> None:
    """Emit a store of the first ``count`` of 32 16-bit ``values``; memory after them is unchanged."""
    pointer = at(builder, address, V32H)
    if MASKED:
        arguments = [values, pointer, ir.Constant(I32, 2), first_lanes(builder, count)]
        call(builder, "llvm.masked.store.v32i16.p0", ir.VoidType(), arguments)
        return
    room = cgutils.alloca_once(builder, V32H)
    builder.store(values, room)
    copy_values(builder, pointer, room, count)


def loop(
    builder: Any,
    count: Any,
    carried: list[Any],
    body: Callable[[Any, list[Any]], list[Any]],
    step: int = 16,
) -> list[Any]:
    """Emit ``for i in range(0, count, step)``, with the values in ``carried`` updated by each iteration.

    ``body`` emits an iteration: it gets i and the values, and returns the new values. The result is the values
    after the last iteration.
    """
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("loop.head", "loop.body", "loop.end"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    index.add_incoming(ir.Constant(I64, 0), before)
    values = []
    for value in carried:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        values.append(phi)
    builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
    builder.position_at_end(inside)
    new = body(index, values)
    index.add_incoming(builder.add(index, ir.Constant(I64, step)), builder.block)
    for phi, value in zip(values, new, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def fetch_line(builder: Any, address: Any) -> None:
    """Emit a prefetch of the cache line at an address into the second-level cache."""
    read, level, data = (ir.Constant(I32, value) for value in (0, 2, 1))
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [at(builder, address, I8), read, level, data])


def operation(
    *, integers: int, floats: int = 0, result: types.Type = types.void
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes a numba intrinsic of a function that emits the intrinsic's LLVM IR.

    The decorated function gets the LLVM builder and the intrinsic's arguments, ``integers`` int64 values before
    ``floats`` float32 values. It returns the result's value, or None for a ``result`` of type void.
    """
    signature = result(*[types.int64] * integers, *[types.float32] * floats)

    def decorate(emit: Callable[..., Any]) -> Callable[..., Any]:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            value = emit(builder, *args)
            return context.get_dummy_value() if value is None else value

        # numba takes the parameters of the intrinsic from the signature of ``emit``, without the first one.
        @functools.wraps(emit)
        def define(_typing: Any, *_: Any) -> Any:
            return signature, generate

        return intrinsic(define)  # type: ignore[no-any-return]

    return decorate


def dot_tile(rows: int, columns: int, prefetch: int = 0, *, float_out: bool = False) -> Callable[..., None]:
    """Return an intrinsic for ``rows`` x ``columns`` (16 in all) dot products of bfloat16 rows of length k.

    Its arguments ``(x, x_stride, w, w_stride, k, out, out_stride, ahead)`` are int64, addresses and strides in
    bytes. It writes out[r, c] = x[r] . w[c] as bfloat16, or as float32 with ``float_out``. While it computes,
    it prefetches ``prefetch`` rows of w_stride bytes from the address ``ahead`` into the second-level cache.
    Each result depends only on its two rows and k, not on the shape of the tile.
    """
    if rows * columns != 16:
        raise ValueError(f"a tile has 16 dot products, not {rows} x {columns}")

    @operation(integers=8)
    def tile(
        builder: Any,
        x: Any,
        x_stride: Any,
        w: Any,
        w_stride: Any,
        k: Any,
        out: Any,
        out_stride: Any,
        ahead: Any,
    ) -> None:
        xs = [builder.add(x, builder.mul(x_stride, ir.Constant(I64, r))) for r in range(rows)]
        ws = [builder.add(w, builder.mul(w_stride, ir.Constant(I64, c))) for c in range(columns)]

        def accumulate(sums: list[Any], fetch: Callable[[Any], Any]) -> list[Any]:
            mine = [fetch(address) for address in xs]
            new = list(sums)
            for c, address in enumerate(ws):
                column = fetch(address)
                for r in range(rows):
                    new[r * columns + c] = multiply_pairs(builder, new[r * columns + c], mine[r], column)
            return new

        # Bytes of a row that fill whole 512-bit vectors.
        whole = builder.shl(builder.lshr(k, ir.Constant(I64, 5)), ir.Constant(I64, 6))

        def step(offset: Any, sums: list[Any]) -> list[Any]:
            for row in range(prefetch):
                start = builder.add(ahead, builder.mul(w_stride, ir.Constant(I64, row)))
                fetch_line(builder, builder.add(start, offset))
            return accumulate(sums, lambda address: load(builder, address, V16I, offset))

        sums = loop(builder, whole, [constant(V16F, 0.0)] * 16, step, 64)
        after = builder.block
        tail = builder.and_(k, ir.Constant(I64, 31))
        rest, done = (builder.append_basic_block(name) for name in ("k.tail", "k.done"))
        builder.cbranch(builder.icmp_signed("!=", tail, ir.Constant(I64, 0)), rest, done)
        builder.position_at_end(rest)
        tailed = accumulate(sums, lambda address: load_first(builder, address, whole, tail))
        builder.branch(done)
        builder.position_at_end(done)
        final = []
        for total, value in zip(sums, tailed, strict=True):
            merged = builder.phi(V16F)
            merged.add_incoming(total, after)
            merged.add_incoming(value, rest)
            final.append(merged)

        result = sum_lanes(builder, final)
        if not float_out:
            result = to_bfloat(builder, result)
        for r in range(rows):
            part = builder.shuffle_vector(result, result, lanes(range(r * columns, (r + 1) * columns)))
            store(builder, part, out, builder.mul(out_stride, ir.Constant(I64, r)))

    return tile
