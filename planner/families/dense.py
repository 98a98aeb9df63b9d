"""The function that builds dense decoders with Llama's structure; ``DenseVariant`` states a family's options.

A dense decoder has an embedding, layers of attention and MLP, a final norm and a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.model.architecture import Architecture, Rotary
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.recipe import (
    Attention,
    Embedding,
    Flow,
    Head,
    Heads,
    Layer,
    Mlp,
    Norm,
    NormKind,
    Recipe,
    Rope,
    Table,
    layer_of,
)  # fmt: skip
from tonnage.planner.model.tensor import TensorSpec

# Rule for a module's bias: always (True), never (False), or (config field that states it, field's default).
Bias = bool | tuple[str, bool]
_TABLE = "model.rotary_emb."

# Name -> implementation of apply_rotary_pos_emb in transformers; Llama uses ``half``.
ROPES = {
    "half": Rope(0),
    "joined": Rope(0, joined=True),
    "helium": Rope(0, fresh=True),
    "glm": Rope(0, fresh=True, joined=True),
    "ernie": Rope(0, fresh=True, restored=True),
    "olmo": Rope(0, restored=True),
    "cohere": Rope(0, restored=True),
}


@dataclass(frozen=True, slots=True)
class SwitchedNorms:
    """Options for norms of q and k that a model has only if a config field is set.

    Attributes:
        field: config field that switches the norms on.
        default: whether the norms exist if config.json does not set the field.
        names: names of the norms' modules.
        kind: kind of the norms, such as RMSNorm or LayerNorm.
        each: whether every head has a norm module of its own.
        own: whether the norm's weight has a separate row for every head.
    """

    field: str
    default: bool = False
    names: tuple[str, str] = ("q_layernorm", "k_layernorm")
    kind: NormKind = "layer"
    each: bool = False
    own: bool = False


@dataclass(frozen=True, slots=True)
class DenseVariant:
    """Options by which a dense family differs from Llama; the default values describe Llama.

    Attributes:
        class_name: the causal language model's class in transformers.
        qkv_bias: whether the q, k and v projections have biases.
        out_bias: whether the attention's output projection has a bias.
        mlp_bias: whether the MLP's matrices have biases.
        qk_norm: norms of q and k: ``none``, ``head`` (weight of one head) or ``full`` (of all heads).
        qk_norm_names: names of the norms of q and k.
        switched_norms: norms of q and k that a config field switches on.
        normed_last: whether q and k are normed after their rotation.
        heads_span_hidden: whether num_attention_heads x head_dim must equal hidden_size.
        qkv: name of the fused projection of q, k and v; None means three separate projections.
        out: name of the attention's output projection.
        clipped_field: config field that limits the values of q, k and v if it is set (such as clip_qkv).
        mlp_names: names of the MLP's matrices: gate, up and down, or only up and down.
        fused: whether the first matrix of an MLP with two matrices holds both gate and up.
        act: default of hidden_act.
        flow: order of norms, branches and residual additions in a layer.
        parallel_field: config field that makes attention and MLP parallel. Both then read the output of the
            first norm, and the layer has no second norm.
        norms: norms of a layer in the order they run.
        norm: kind of every norm.
        final: name of the final norm.
        head_bias: whether the head has a bias.
        tied: default of tie_word_embeddings.
        rotary_share: default of partial_rotary_factor.
        rope: key in ``ROPES``, which lists implementations of the rotary embedding.
        roped: layers with rotary positions: ``all``, ``sliding``, ``windowed`` (the sliding layers if the model
            has a window, else all) or ``listed`` (no_rope_layers).
        table_by_kind: whether full layers and sliding layers have different rotary tables.
        window: rule that says which layers have a sliding window:

            - ``none``: no layer.
            - ``unused``: no layer, but the values in layer_types are checked.
            - ``always``: every layer, if the model has a window.
            - ``pattern``: the layers that layer_types states; without it, those of sliding_window_pattern.
            - ``rotated``: the layers that layer_types states; without it, those without rotary positions.
            - ``qwen``: see common.kinds_of.
        default_window: default sliding window in tokens.
        attention_dropout: default dropout of attention weights.
        dropout: (config field, default) of the dropout after attention and MLP.
        dropped: (whether ``dropout`` applies after attention, whether it applies after the MLP).
        embedding_dropout: config field with the dropout after the embedding.
        ignored: config fields of this family that change no shape.
        extra: function that adds further tensors to a layer.
        taped: whether training activations can be derived from the recipe (the description of layers).
    """

    class_name: str
    qkv_bias: Bias = False
    out_bias: Bias = False
    mlp_bias: Bias = False
    qk_norm: str = "none"
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    switched_norms: SwitchedNorms | None = None
    normed_last: bool = False
    heads_span_hidden: bool = False
    qkv: str | None = None
    out: str = "o_proj"
    clipped_field: str = ""
    mlp_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    fused: bool = False
    act: str = "silu"
    flow: Flow = "pre"
    parallel_field: str = ""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm: NormKind = "rms"
    final: str = "model.norm"
    head_bias: bool = False
    tied: bool = False
    rotary_share: float = 1.0
    rope: str = "half"
    roped: str = "all"
    table_by_kind: bool = False
    window: str = "none"
    default_window: int | None = None
    attention_dropout: float = 0.0
    dropout: tuple[str, float] = ("", 0.0)
    dropped: tuple[bool, bool] = (True, True)
    embedding_dropout: str = ""
    ignored: tuple[str, ...] = ()
    extra: Callable[[Attention, Mlp, Layer], Layer] | None = None
    taped: bool = True

    def build(self, fields: Fields, model_type: str) -> Architecture:
        """Return the architecture of a dense decoder of this family from its checked config."""
        dims = common.heads_of(fields)
        if self.heads_span_hidden and dims.heads * dims.head_size != dims.hidden:
            raise ConfigError(
                f"{dims.head_size} x {dims.heads} heads is not hidden_size = {dims.hidden}", field="head_dim"
            )
        common.refuse(fields, "is_moe", why="the planner cannot build Doge's product-key experts")
        fields.ignore(*self.ignored)
        vocab = fields.integer("vocab_size", limit="vocab")
        inner = fields.integer("intermediate_size", limit="width")
        count = fields.integer("num_hidden_layers", limit="layers")
        tied = fields.boolean("tie_word_embeddings", self.tied)
        kinds, window = _kinds(fields, self, count)
        share = common.rotary_share(fields, self.rotary_share)
        rotary = Rotary(int(dims.head_size * share), 1)
        tables: tuple[str, ...] = (_TABLE,)
        if self.table_by_kind:
            tables = tuple(f"{_TABLE}{kind}_" for kind in dict.fromkeys(kinds))
            rotary = Rotary(rotary.dim, len(tables))
        layers = _layers(fields, model_type, self, dims, inner, kinds, window, rotary.dim)
        recipe = Recipe(
            "model.layers",
            Embedding(
                "model.embed_tokens", vocab, dims.hidden,
                dropout=common.number(fields, self.embedding_dropout, 0.0),
            ),
            layers,
            Norm(self.final, dims.hidden, self.norm),
            Head(tied, self.head_bias),
            tuple(Table(table, rotary.dim, self.rope in ("olmo", "ernie")) for table in tables),
            taped=self.taped,
        )  # fmt: skip
        return common.described(
            fields, model_type, self.class_name, recipe, dims, inner, common.cache_layers(kinds, window, dims),
            rotary=rotary, gated=len(self.mlp_names) == 3 or self.fused,
        )  # fmt: skip


def _layers(
    fields: Fields, model_type: str, variant: DenseVariant, dims: Heads, inner: int, kinds: tuple[str, ...],
    window: int | None, rotated: int,
) -> tuple[Layer, ...]:  # fmt: skip
    """Return the description of each layer of a dense decoder; only the rotary table differs between layers."""
    qkv_bias, out_bias, mlp_bias = (
        common.bias_of(fields, rule) for rule in (variant.qkv_bias, variant.out_bias, variant.mlp_bias)
    )
    flow, names = variant.flow, variant.norms
    if variant.parallel_field and fields.boolean(variant.parallel_field, False):
        flow, names = "parallel", names[:1]
    q_norm, k_norm = _qk_norms(fields, model_type, variant, dims)
    attention = Attention(
        "self_attn", dims, out=variant.out, qkv=variant.qkv, bias=qkv_bias, out_bias=out_bias,
        q_norm=q_norm, k_norm=k_norm, normed_last=variant.normed_last,
        rope=replace(ROPES[variant.rope], dim=rotated, tables=_TABLE),
        clipped=fields.config.get(variant.clipped_field) is not None,
        dropout=common.number(fields, "attention_dropout", variant.attention_dropout),
    )  # fmt: skip
    mlp = Mlp(
        "mlp",
        dims.hidden,
        inner,
        common.act_of(fields, variant.act),
        variant.mlp_names,
        variant.fused,
        mlp_bias,
    )
    behind = common.number(fields, *variant.dropout)
    dropouts = (behind * variant.dropped[0], behind * variant.dropped[1])
    norms = tuple(Norm(name, dims.hidden, variant.norm) for name in names)

    def layer(table: str | None) -> Layer:
        rope = replace(attention.rope, tables=table) if attention.rope and table else None
        own = replace(attention, rope=rope)
        made = layer_of(flow, own, mlp, norms, dropouts)
        return made if variant.extra is None else variant.extra(own, mlp, made)

    read = _tables_read(fields, variant, kinds, window)
    made = {table: layer(table) for table in dict.fromkeys(read)}
    return tuple(made[table] for table in read)


def _tables_read(
    fields: Fields, variant: DenseVariant, kinds: tuple[str, ...], window: int | None
) -> tuple[str | None, ...]:
    """Return the name of the rotary table that each layer reads; None for a layer without rotary positions."""
    if variant.table_by_kind:
        return tuple(f"{_TABLE}{kind}_" for kind in kinds)
    if variant.roped == "listed":
        return tuple(_TABLE if rotated else None for rotated in rotated_layers(fields, len(kinds)))
    if variant.roped == "all" or (variant.roped == "windowed" and window is None):
        return (_TABLE,) * len(kinds)
    return tuple(_TABLE if kind == "sliding_attention" else None for kind in kinds)


def _qk_norms(
    fields: Fields, model_type: str, variant: DenseVariant, dims: Heads
) -> tuple[Norm | None, Norm | None]:
    """Return (norm of q, norm of k) of a dense decoder's attention, (None, None) if it has none."""
    switch = variant.switched_norms
    if (switch is None or switch.field != "qk_layernorm") and fields.boolean("qk_layernorm", False):
        raise UnsupportedArchitecture(f"true is not supported for {model_type}", field="qk_layernorm")
    if switch is not None and fields.boolean(switch.field, switch.default):
        q_norm, k_norm = (
            Norm(name, dims.head_size, switch.kind, count, switch.each, switch.own)
            for name, count in zip(switch.names, (dims.heads, dims.kv_heads), strict=True)
        )
        return q_norm, k_norm
    return qk_norms(variant.qk_norm, variant.qk_norm_names, dims, variant.norm)


def qk_norms(
    width: str, names: tuple[str, str], dims: Heads, kind: NormKind
) -> tuple[Norm | None, Norm | None]:
    """Return (norm of q, norm of k) of an attention module.

    ``width`` is ``none`` (no norms), ``head`` (the weight of one head) or ``full`` (a weight over all heads).
    """
    if width == "none":
        return None, None
    q_norm, k_norm = (
        Norm(name, count * dims.head_size, kind) if width == "full"
        else Norm(name, dims.head_size, kind, count)
        for name, count in zip(names, (dims.heads, dims.kv_heads), strict=True)
    )  # fmt: skip
    return q_norm, k_norm


def _kinds(fields: Fields, variant: DenseVariant, layers: int) -> tuple[tuple[str, ...], int | None]:
    """Return (attention kind of each layer, sliding window in tokens or None), by the family's window rule."""
    full = ("full_attention",) * layers
    if variant.window in ("none", "unused"):
        if variant.window == "unused":
            fields.layer_types(layers)
        return full, None
    window = common.window_of(fields, variant.default_window)
    if variant.window == "qwen":
        return common.kinds_of(fields, "qwen", layers)
    if variant.window == "always":
        return (full if window is None else ("sliding_attention",) * layers), window
    kinds = fields.layer_types(layers)
    if kinds is None:
        kinds = (pattern_kinds if variant.window == "pattern" else _without_rope)(fields, layers, window)
    return kinds, window


def _without_rope(fields: Fields, layers: int, window: int | None) -> tuple[str, ...]:
    """Return the attention kind of each SmolLM3 layer for a config without layer_types.

    Layers without rotary positions have a sliding window, if use_sliding_window is set.
    """
    if window is None or not fields.boolean("use_sliding_window", False):
        return ("full_attention",) * layers
    return tuple("full_attention" if r else "sliding_attention" for r in rotated_layers(fields, layers))


def pattern_kinds(fields: Fields, layers: int, window: int | None) -> tuple[str, ...]:
    """Return each layer's attention kind by the config field sliding_window_pattern.

    By default, every fourth layer has full attention.
    """
    stated = fields.config.get("sliding_window_pattern", 4)
    # EXAONE 4 states the pattern as a string such as LLLG: L is a layer with a sliding window, G a full layer.
    if isinstance(stated, str) and set(stated) <= {"L", "G"} and stated:
        slides = [stated[i % len(stated)] == "L" and i != layers - 1 for i in range(layers)]
    elif isinstance(stated, int) and not isinstance(stated, bool) and stated > 0:
        slides = [(i + 1) % stated != 0 for i in range(layers)]
    else:
        raise ConfigError(
            f"{shown(stated)} is neither a positive integer nor a string of L and G",
            field="sliding_window_pattern",
        )
    return tuple("sliding_attention" if slide and window is not None else "full_attention" for slide in slides)


def rotated_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has rotary positions.

    The config field ``no_rope_layers`` lists 1 (rotary) or 0 (none) for every layer. Without this field, every
    ``no_rope_layer_interval``-th layer has no rotary positions, by default every fourth.
    """
    every = fields.integer("no_rope_layer_interval", 4, limit="layers")
    stated = fields.raw("no_rope_layers")
    # If the list has more entries than the model has layers, transformers reads the first ones.
    if isinstance(stated, list) and len(stated) > layers:
        fields.config = {**fields.config, "no_rope_layers": stated[:layers]}
    listed = fields.listed("no_rope_layers", layers, {1: True, 0: False})
    return tuple((i + 1) % every != 0 for i in range(layers)) if listed is None else listed


def with_sinks(found: Architecture, fields: Fields) -> Architecture:
    """Return the architecture ``found`` with attention sinks in each layer and one rotary table per base.

    A sink is one learned score per query head. The config field ``layer_rope_theta`` states the base (theta) of
    each layer. A layer with base 0 has no rotary positions and needs no table.
    """
    listed = fields.raw("layer_rope_theta")
    if not isinstance(listed, list) or not all(isinstance(theta, int | float) for theta in listed):
        raise ConfigError(f"{shown(listed)} is not a list of numbers", field="layer_rope_theta")
    rotary = found.rotary and replace(found.rotary, tables=max(1, len(set(listed) - {0})))
    sink = TensorSpec("sinks", (found.heads,), "attention", "Attention", shard_dim=0)
    sinks = (replace(sink, name=f"model.layers.{i}.self_attn.sinks", layer=i) for i in range(found.layers))
    return replace(found, tensors=(*found.tensors, *sinks), rotary=rotary, recipe=None)
