"""Interpreter of layer recipes (planner/model/recipe.py) that runs a layer as operations on a `Tape`.

The operations come in the order in which the layer's module runs them (transformers 5.19,
models/*/modeling_*.py). Experts run by transformers' default implementation, `grouped_mm`
(integrations/moe.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from tonnage.planner.model.recipe import Attention, Experts, LatentAttention, Layer, Mlp, Norm, Rope
from tonnage.planner.training.tape import Tape
from tonnage.planner.training.values import Extent, Value

MASK = "mask"
Tables = Mapping[str, tuple[Value, Value]]
"""Name of a rotary table -> its cos and sin, which all layers share; the key MASK has a boolean mask."""


def layer(t: Tape, recipe: Layer, x: Value, tables: Tables, at: str) -> Value:
    """Run one decoder layer on the tape, a symbolic forward pass, and return the layer's output.

    `at` is the layer's module name with `*` in place of the index.
    """
    given = h = x
    for branch in recipe.branches:
        source = given if recipe.parallel else x
        if branch.before is not None:
            h = norm(t, branch.before, source)
        elif not recipe.parallel:
            h = source
        if isinstance(branch.module, Attention):
            out = attention(t, branch.module, h, tables, at)
        elif isinstance(branch.module, LatentAttention):
            out = latent_attention(t, branch.module, h, tables, at)
        elif isinstance(branch.module, Experts):
            out = experts(t, branch.module, h, at)
        else:
            out = mlp(t, branch.module, h, at)
        if branch.after is not None:
            out = norm(t, branch.after, out)
        out = t.dropout(out, branch.dropout)
        x = t.add(out, t.scale(x) if branch.weighted else x)
        if branch.summed is not None:
            x = norm(t, branch.summed, x)
    return x


def norm(t: Tape, n: Norm, x: Value) -> Value:
    """Run a norm on the tape `t`, a symbolic forward pass, and return its output."""
    weights = n.size * n.groups if n.own else n.size
    if n.kind.startswith("rms"):
        return t.rms_norm(x, weights, n.groups, n.kind)
    return t.layer_norm(x, weights, n.groups, n.kind)


def attention(t: Tape, a: Attention, h: Value, tables: Tables, layer: str) -> Value:
    """Run an attention module on the tape `t`, a symbolic forward pass, and return its projected output."""
    at = f"{layer}.{a.name}"
    q, k, v = _projected(t, a, h, at)
    if not a.normed_last:
        q, k = _normed(t, a, q, k)
    if a.clipped:  # clamp_ works in place, so autograd keeps a copy of the overwritten values.
        for part in (q, k, v):
            if part.grad:
                t.save(t.like(part))
    if a.rope is not None and a.rope.apart:
        q, k = (_rotated(t, a.rope, x, _own_tables(a.rope, x)) for x in (q, k))
    elif a.rope is not None:
        cos, sin = tables[a.rope.tables]
        own = (t.like(cos), t.like(sin)) if a.rope.fresh else (cos, sin)
        q, k = _rotated(t, a.rope, q, own), _rotated(t, a.rope, k, own)
    if a.normed_last:
        q, k = _normed(t, a, q, k)
    dims = a.heads
    out = t.attend(
        q, k, v, dims.heads, dims.heads if a.repeated else dims.kv_heads, dims.head_size,
        masked=a.masked or t.masked, broadcast=a.broadcast, softcap=a.softcap, dropout=a.dropout,
        softmax=_softmax(t, a, h), upcast=a.upcast, sinks=a.sinks,
        heads_first=a.rope is not None and a.rope.joined and not a.rope.apart,
    )  # fmt: skip
    if a.filled and t.attention == "eager" and (q.grad or k.grad):
        t.save(tables[MASK][0])
    if a.before_out is not None:
        out = norm(t, a.before_out, out)
    return t.linear(out, f"{at}.{a.out}", dims.heads * dims.value_size, dims.hidden, column=False)


def _projected(t: Tape, a: Attention, h: Value, at: str) -> tuple[Value, Value, Value]:
    """Return symbolic Q, K and V of an attention module, from three projections or a fused one."""
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
        t.new(size, fused.width, fused.grad, split=True) if name in a.copied else t.view(fused, size)
        for name, size in zip("qkv", sizes, strict=True)
    )
    return q, k, v


def _normed(t: Tape, a: Attention, q: Value, k: Value) -> tuple[Value, Value]:
    """Return symbolic Q and K after their norms, unchanged if the attention module has none."""
    return (q if a.q_norm is None else norm(t, a.q_norm, q), k if a.k_norm is None else norm(t, a.k_norm, k))


def _softmax(t: Tape, a: Attention, h: Value) -> int:
    """Return the bytes of one value of the softmax result under eager attention.

    Under autocast, softmax is computed in fp32 on a GPU. On a CPU its result has the model's dtype, because the
    mask that is added to the scores has that dtype.
    """
    if t.autocast and (a.narrow or a.upcast):
        return 4 if t.cuda else h.width
    return h.width if a.narrow or a.sinks else 4


def _own_tables(rope: Rope, x: Value) -> tuple[Value, Value]:
    """Return new symbolic cos and sin tables, for a model that computes them separately for Q and K."""
    width = 4 if rope.apart == "wide" else x.width
    return Value(Extent(position=rope.dim), width, False), Value(Extent(position=rope.dim), width, False)


def _rotated(t: Tape, rope: Rope, x: Value, tables: tuple[Value, Value]) -> Value:
    """Return `x` (Q or K) after rotary embedding, in the dtype and layout that the next operation reads."""
    out = t.rotate(x, tables)
    if rope.restored:
        out = t.cast(out, x.width)
    return t.like(out) if rope.joined else out


def latent_attention(t: Tape, a: LatentAttention, h: Value, tables: Tables, layer: str) -> Value:
    """Run latent attention (MLA) on the tape `t`, with K and V expanded to all heads; return its output."""
    at, size = f"{layer}.{a.name}", a.heads * a.head_size
    if a.q_rank is None:
        q = t.linear(h, f"{at}.q_proj", a.hidden, size)
    else:
        low = t.linear(h, f"{at}.q_a_proj", a.hidden, a.q_rank, column=False)
        q = t.linear(t.rms_norm(low, a.q_rank), f"{at}.q_b_proj", a.q_rank, size)
    both = t.linear(h, f"{at}.kv_a_proj_with_mqa", a.hidden, a.entry, column=False)
    kv = t.linear(
        t.rms_norm(t.view(both, a.kv_rank), a.kv_rank), f"{at}.kv_b_proj", a.kv_rank,
        a.heads * (a.nope + a.value),
    )  # fmt: skip
    if a.rope is not None:
        q = t.like(q, max(q.width, _rotated(t, a.rope, q, tables[a.rope.tables]).width))
        t.rotate(both, tables[a.rope.tables])
    k = t.new(size, kv.width, kv.grad or both.grad, split=True)
    v = t.view(kv, a.heads * a.value)
    out = t.attend(
        q, k, v, a.heads, a.heads, a.head_size, value=a.value, masked=t.masked, dropout=a.dropout,
        heads_first=True,
    )  # fmt: skip
    return t.linear(out, f"{at}.o_proj", a.heads * a.value, a.hidden, column=False)


def mlp(t: Tape, m: Mlp, h: Value, layer: str) -> Value:
    """Run an MLP on the tape `t`, a symbolic forward pass, and return its output.

    There are three kinds of MLP: with separate matrices for gate, up and down projection, with gate and up
    projection fused into one matrix, and without a gate.
    """
    at = f"{layer}.{m.name}" if m.name else layer
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


def experts(t: Tape, e: Experts, h: Value, layer: str) -> Value:
    """Run routed and shared experts of an MoE layer on the tape `t`, and return their summed output.

    Each token is copied once for each of its experts, and the copies are sorted by expert.
    """
    at = f"{layer}.{e.name}"
    shared = None if e.shared is None else mlp(t, e.shared, h, layer)
    weights = _routed(t, e, h, f"{at}.{e.router.name}")
    out = t.grouped(h, weights, e.count, e.chosen, e.hidden, e.inner, e.act, e.biased)
    if shared is not None:
        if e.shared_gate is not None:
            gate = t.activation(t.linear(h, f"{at}.{e.shared_gate}", e.hidden, 1), "sigmoid")
            shared = t.multiply(gate, shared, shared)
        out = t.add(shared, out)
    return out


def _routed(t: Tape, e: Experts, h: Value, at: str) -> Value:
    """Run the experts' router on the tape `t` and return the routing weights, `e.chosen` per token."""
    router, given = e.router, h.width
    if router.noisy and h.grad:
        t.save(t.like(h))
        t.save(t.like(h))
    grouped = router.kind.endswith("-groups")
    if grouped:
        h = t.cast(h, 4)
        stored = t.weight if t.trainable else t.frozen
        if h.grad and stored != 4:  # Autograd keeps the fp32 copy of the router's weight.
            t.save(Value(Extent(fixed=e.count * e.hidden), t.compute if t.autocast else 4, False))
    elif router.dtype == "float32":
        h = t.cast(h, 4)
    clamped = router.kind == "softmax-clamped"
    logits = t.product(h, e.count) if clamped else t.linear(h, at, e.hidden, e.count)
    if not logits.grad:
        return t.new(e.chosen, 4, False)
    if router.kind == "mixer":
        return _mixed(t, e, logits)
    t.save(t.new(e.chosen, 8, False))  # Autograd keeps the indices of the chosen experts.
    width = logits.width if router.kind in ("sigmoid-groups", "softmax-typed") else 4
    chosen = t.new(e.chosen, width, True)
    if router.kind in ("softmax-chosen", "softmax-typed"):
        t.save(chosen)
        return t.like(chosen, given if router.kind == "softmax-chosen" else width)
    t.save(t.new(e.count, width, True))  # Softmax and sigmoid keep their result for the backward pass.
    groups, taken = router.groups
    if grouped and groups:
        best = 2 if router.kind == "sigmoid-groups" else 1
        # Autograd keeps the indices of each group's best experts, the indices of the chosen groups, and the
        # mask of the other groups.
        t.save(t.new(best * groups, 8, False))
        t.save(t.new(taken, 8, False))
        t.save(t.new(e.count, 1, False))
    if router.normed:
        t.save(t.like(chosen))  # Autograd keeps a copy of the input of the in-place division.
        t.save(t.new(1, width, True))
    if clamped:
        t.save(t.new(1, width, True))
        return t.like(t.cast(chosen, given))
    return t.cast(chosen, logits.width) if router.kind == "softmax" else chosen


def _mixed(t: Tape, e: Experts, logits: Value) -> Value:
    """Run Phi-3.5-MoE's router (sparsemixer) on the tape `t`, once for each chosen expert.

    Each run keeps five tensors for the backward pass: the mask of the experts, the softmax of the masked
    logits, the index of the sampled expert, the index of the expert with the largest logit, and the gradient's
    multiplier.
    """
    for _ in range(e.chosen):
        t.save(t.new(e.count, 1, False))
        t.save(t.new(e.count, logits.width, True))
        t.save(t.new(1, 8, False))
        t.save(t.new(1, 8, False))
        t.save(t.new(1, logits.width, True))
    return t.new(e.chosen, logits.width, True)
