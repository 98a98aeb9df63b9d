"""The training interpreter of a recipe (planner/families/recipe.py): a layer as operations on a :class:`Tape`,
in the order in which its module runs them (transformers 5.19, models/*/modeling_*.py)."""

from __future__ import annotations

from collections.abc import Mapping

from tonnage.planner.families.recipe import Attention, Layer, Mlp, Norm, Rope
from tonnage.planner.training.tape import Tape, Value

Tables = Mapping[str, tuple[Value, Value]]  # cos and sin of each table of rotary frequencies


def layer(t: Tape, recipe: Layer, x: Value, tables: Tables, at: str) -> Value:
    """The layer's output; ``at``: the layer's name with * for its index."""
    given = h = x
    for branch in recipe.branches:
        source = given if recipe.parallel else x
        if branch.before is not None:
            h = norm(t, branch.before, source)
        elif not recipe.parallel:
            h = source
        if isinstance(branch.module, Attention):
            out = attention(t, branch.module, h, tables, f"{at}.{branch.module.name}")
        else:
            out = mlp(t, branch.module, h, f"{at}.{branch.module.name}")
        if branch.after is not None:
            out = norm(t, branch.after, out)
        out = t.dropout(out, branch.dropout)
        x = t.add(out, t.scale(x) if branch.weighted else x)
    return x


def norm(t: Tape, n: Norm, x: Value) -> Value:
    if n.kind.startswith("rms"):
        return t.rms_norm(x, n.size, n.groups, n.kind)
    return t.layer_norm(x, n.size, n.groups, n.kind)


def attention(t: Tape, a: Attention, h: Value, tables: Tables, at: str) -> Value:
    q, k, v = _projected(t, a, h, at)
    if a.clipped:  # clamp_ keeps a copy of what it overwrites
        for part in (q, k, v):
            if part.grad:
                t.save(t.like(part))
    if not a.normed_last:
        q, k = _normed(t, a, q, k)
    if a.rope is not None:
        own = t.interleaved(tables[a.rope.tables]) if a.rope.fresh else tables[a.rope.tables]
        q, k = _rotated(t, a.rope, q, own), _rotated(t, a.rope, k, own)
    if a.normed_last:
        q, k = _normed(t, a, q, k)
    dims = a.heads
    out = t.attend(
        q, k, v, dims.heads, dims.heads if a.repeated else dims.kv_heads, dims.head_size,
        masked=a.masked or t.masked, softcap=a.softcap, dropout=a.dropout,
        softmax=h.width if a.narrow else 4, heads_first=a.rope is not None and a.rope.joined,
    )  # fmt: skip
    if a.before_out is not None:
        out = norm(t, a.before_out, out)
    return t.linear(out, f"{at}.{a.out}", dims.heads * dims.value_size, dims.hidden, column=False)


def _projected(t: Tape, a: Attention, h: Value, at: str) -> tuple[Value, Value, Value]:
    dims = a.heads
    sizes = [dims.heads * dims.head_size, dims.kv_heads * dims.head_size, dims.kv_heads * dims.value_size]
    if a.qkv is None:
        q, k, v = (
            t.linear(h, f"{at}.{name}", dims.hidden, size) for name, size in zip(a.names, sizes, strict=True)
        )
        return q, k, v
    fused = t.linear(h, f"{at}.{a.qkv}", dims.hidden, sum(sizes))
    if a.repeated:
        sizes = [sizes[0]] * 3
    q, k, v = (
        t.new(size, fused.width, fused.grad, split=True) if a.copied else t.view(fused, size) for size in sizes
    )
    return q, k, v


def _normed(t: Tape, a: Attention, q: Value, k: Value) -> tuple[Value, Value]:
    return (q if a.q_norm is None else norm(t, a.q_norm, q), k if a.k_norm is None else norm(t, a.k_norm, k))


def _rotated(t: Tape, rope: Rope, x: Value, tables: tuple[Value, Value]) -> Value:
    out = t.rotate(x, tables)
    if rope.restored:
        out = t.cast(out, x.width)
    return t.like(out) if rope.joined else out


def mlp(t: Tape, m: Mlp, h: Value, at: str) -> Value:
    if len(m.names) == 3:
        gate, up = (t.linear(h, f"{at}.{name}", m.hidden, m.inner) for name in m.names[:2])
        mid = t.multiply(t.activation(gate, m.act), up)
    elif m.fused:
        both = t.linear(h, f"{at}.{m.names[0]}", m.hidden, 2 * m.inner)
        gate, up = t.view(both, m.inner), t.view(both, m.inner)
        mid = t.multiply(t.activation(gate, m.act), up)
    else:
        mid = t.activation(t.linear(h, f"{at}.{m.names[0]}", m.hidden, m.inner), m.act)
    if m.before_out is not None:
        mid = norm(t, m.before_out, mid)
    return t.linear(mid, f"{at}.{m.names[-1]}", m.inner, m.hidden, column=False)
