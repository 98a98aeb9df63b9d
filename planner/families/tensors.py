"""The tensors of a recipe (model/recipe.py): TensorSpecs with the names of transformers' state dict."""

from __future__ import annotations

from tonnage.planner.families.common import Tensors
from tonnage.planner.model.recipe import Attention, Experts, LatentAttention, Mlp, Norm, Recipe
from tonnage.planner.model.tensor import TensorSpec
from tonnage.planner.records import replace

# what the module of a norm learns (common.Tensors.norm)
_LEARNED = {"layer": "layer", "layer-one": "layer", "layer-weight": "layer-weight",
            "layer-written": "layer-weight", "layer-none": "none"}  # fmt: skip


def tensors_of(recipe: Recipe) -> Tensors:
    """Embedding, layers, final norm, head, rotary frequencies."""
    t = Tensors()
    t.linear_class = recipe.linear_class
    first = recipe.embedding
    t.vocabulary(first.name, first.rows, first.width)
    if first.positions is not None:
        t.embedding(*first.positions, recipe.hidden)
    if first.projected is not None:
        t.linear(first.projected[0], recipe.hidden, first.width, "embedding")
    if recipe.head.projected is not None:
        t.linear(recipe.head.projected, first.width, recipe.hidden, "embedding")
    if first.norm is not None:
        t.norm(first.norm.name, first.norm.size, _LEARNED.get(first.norm.kind, "rms"))
    t.specs += first.buffers
    for index, at in t.layers(len(recipe.layers), recipe.at):
        layer = recipe.layers[index]
        for branch in layer.branches:
            module = branch.module
            if isinstance(module, Attention | LatentAttention):
                _attention(t, at, module) if isinstance(module, Attention) else latent(t, at, module)
            elif isinstance(module, Experts):
                _experts(t, at, module)
            else:
                _mlp(t, at, module)
        _extra(t, at, layer.extra)
        for branch in layer.branches:
            for norm in (branch.before, branch.after, branch.summed):
                _norm(t, at, norm)
            if branch.weighted is not None:
                t.add(f"{at}.{branch.weighted}", (first.width,), "norm", "DogeDecoderLayer")
    if recipe.final is not None:
        t.norm(recipe.final.name, recipe.final.size, _LEARNED.get(recipe.final.kind, "rms"))
    t.specs += recipe.head.buffers
    t.head("lm_head", first.rows, first.width, f"{first.name}.weight" if recipe.head.tied else None,
           recipe.head.bias)  # fmt: skip
    for table in recipe.tables:
        t.rotary(table.dim, table.name)
    return t


def _norm(t: Tensors, at: str, norm: Norm | None, kv_heads: int = 0) -> None:
    """``kv_heads``: those a rank has rows of, where the norm has a row for each."""
    if norm is None:
        return
    if norm.own:
        shape, kv = (norm.groups, norm.size), (kv_heads, kv_heads)
        t.add(f"{at}.{norm.name}.weight", shape, "norm", "LayerNorm", shard=0, kv=kv)
        return
    learned = _LEARNED.get(norm.kind, "rms")
    names = [f"{norm.name}.norms.{i}" for i in range(norm.groups)] if norm.each else [norm.name]
    for name in names:
        t.norm(f"{at}.{name}", norm.size, learned)


def _extra(t: Tensors, layer: str, extra: tuple[TensorSpec, ...]) -> None:
    t.specs += [replace(spec, name=f"{layer}.{spec.name}", layer=t.layer) for spec in extra]


def _attention(t: Tensors, layer: str, a: Attention) -> None:
    at = f"{layer}.{a.name}"
    if a.qkv is not None:
        t.fused_attention(at, a.heads, qkv=a.qkv, out=a.out, bias=a.bias, out_bias=a.out_bias)
    else:
        t.attention(at, a.heads, bias=a.bias, out_bias=a.out_bias, out=a.out)
    _norm(t, at, a.q_norm)
    _norm(t, at, a.k_norm, a.heads.kv_heads)
    _norm(t, at, a.before_out)
    _extra(t, layer, a.extra)


def latent(t: Tensors, layer: str, a: LatentAttention) -> None:
    """The latent and rotary projections are the same on every rank; heads are divided."""
    at, q = f"{layer}.{a.name}", a.heads * a.head_size
    if a.q_rank is None:
        t.linear(f"{at}.q_proj", q, a.hidden, shard="column")
    else:
        t.linear(f"{at}.q_a_proj", a.q_rank, a.hidden, bias=a.bias)
        t.norm(f"{at}.q_a_layernorm", a.q_rank)
        t.linear(f"{at}.q_b_proj", q, a.q_rank, shard="column")
    t.linear(f"{at}.kv_a_proj_with_mqa", a.entry, a.hidden, bias=a.bias)
    t.norm(f"{at}.kv_a_layernorm", a.kv_rank)
    t.linear(f"{at}.kv_b_proj", a.heads * (a.nope + a.value), a.kv_rank, shard="column")
    t.linear(f"{at}.o_proj", a.hidden, a.heads * a.value, bias=a.bias, shard="row")
    _extra(t, layer, a.extra)


def _mlp(t: Tensors, at: str, m: Mlp) -> None:
    at = f"{at}.{m.name}" if m.name else at
    if len(m.names) == 3:
        gate, up, down = m.names
        t.gated_mlp(at, m.hidden, m.inner, bias=m.bias, names=(gate, up, down))
    else:
        up, down = m.names
        t.plain_mlp(at, m.hidden, m.inner, bias=m.bias, names=(up, down), fused_gate=m.fused)
    _norm(t, at, m.before_out)


def _experts(t: Tensors, layer: str, e: Experts) -> None:
    at, router = f"{layer}.{e.name}", e.router
    if e.first:
        t.experts(f"{at}.experts", e.count, e.hidden, e.inner, transposed=e.biased, bias=e.biased)
    t.router(
        f"{at}.{router.name}", e.count, e.hidden, linear=router.linear, bias=router.bias, dtype=router.dtype,
        stored=router.stored,
    )  # fmt: skip
    if not e.first:
        t.experts(f"{at}.experts", e.count, e.hidden, e.inner, transposed=e.biased, bias=e.biased)
    _extra(t, layer, e.extra)
    if e.shared is not None:
        _mlp(t, layer, e.shared)
    if e.shared_gate is not None:
        t.linear(f"{at}.{e.shared_gate}", 1, e.hidden, "router")
