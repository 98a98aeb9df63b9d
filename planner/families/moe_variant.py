"""The function that builds mixture-of-experts decoders by the options of a family (``MoeVariant``).

Shapes follow transformers 5.19, models/<family>/modeling_<family>.py. Routed experts are two tensors per layer,
[experts, 2 x inner, hidden] and [experts, hidden, inner]; checkpoints store one matrix per expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.dense import ROPES, Bias, pattern_kinds, qk_norms
from tonnage.planner.families.moe_layers import every_layer
from tonnage.planner.model.architecture import Architecture, Rotary
from tonnage.planner.model.fields import Fields
from tonnage.planner.model.recipe import (
    Attention,
    Embedding,
    Experts,
    Flow,
    Head,
    Heads,
    Mlp,
    Norm,
    NormKind,
    Recipe,
    Router,
    RouterKind,
    Table,
    layer_of,
)  # fmt: skip
from tonnage.planner.model.tensor import TensorSpec

_PATTERN_WINDOW = 4096  # default of sliding_window in ExaoneMoeConfig


@dataclass(frozen=True, slots=True)
class MoeVariant:
    """Options by which a mixture-of-experts family differs from Mixtral.

    Attributes:
        class_name: the causal language model's class in transformers.
        experts_field: config field with the number of experts.
        per_token_field: config field with the experts per token.
        inner_field: config field with an expert's inner size.
        mlp: name of the MLP's module in a layer.
        router: name of the router's module below the MLP.
        routing: name of the method by which the router selects the experts of a token.
        normed: whether the routing weights of the selected experts are divided by their sum.
        router_linear: whether the router is an nn.Linear.
        router_bias: whether the router has a bias.
        router_dtype: dtype of the loaded router; None means the dtype of the model.
        router_stored: dtype of the router in published files; None means the dtype of the model.
        correction: name of e_score_correction_bias below the MLP; None means there is none.
        correction_dtype: dtype of the loaded correction bias; None means the dtype of the model.
        correction_parameter: whether the correction bias is a parameter [1, experts] instead of a buffer.
        shared: name of the shared expert's module in a layer; None means there is no shared expert.
        shared_names: names of the shared expert's matrices: gate, up and down, or gate-and-up and down.
        shared_gate: whether a gate scales the output of the shared expert.
        shared_size: (config field with the shared expert's inner size, its default); with default None the
            field is required.
        shared_count: if ``shared_size`` is None: config field with the number of shared experts, each as large
            as a routed expert; None means one shared expert.
        sparse: function that returns for each layer whether it has routed experts.
        jitter: whether training adds noise to the router (router_jitter_noise); training activations then
            cannot be derived.
        experts_bias: config field that would add biases to the experts; a config that sets it is refused.
        qkv_bias: whether the q, k and v projections have biases.
        out_bias: whether the attention's output projection has a bias.
        qk_norm: norms of q and k: ``none``, ``head`` (weight of one head) or ``full`` (of all heads).
        qk_norm_names: names of the norms of q and k.
        qk_norm_field: config field that, if true, adds norms of q and k with the weight of one head.
        normed_last: whether q and k are normed after their rotation.
        rope: key in dense.ROPES, which lists implementations of the rotary embedding.
        rotary_share: default of partial_rotary_factor.
        rotary_field: config field with the number of rotated values of a head; it has priority over
            partial_rotary_factor.
        rounded_heads: whether head_dim defaults to hidden_size / num_attention_heads rounded down; if False,
            the division must have no remainder.
        clipped_field: config field that limits the values of q, k and v if it is set (such as clip_qkv).
        flow: order of norms, branches and residual additions in a layer.
        norms: norms of a layer in the order they run.
        norm: kind of every norm.
        head_bias: whether the head has a bias.
        tied: default of tie_word_embeddings.
        window: rule that says which layers have a sliding window: one of ``common.kinds_of``, or ``pattern``
            (as layer_types states, else by sliding_window_pattern).
        ignored: config fields of this family that change no shape.
    """

    class_name: str
    experts_field: str = "num_experts"
    per_token_field: str = "num_experts_per_tok"
    inner_field: str = "moe_intermediate_size"
    mlp: str = "mlp"
    router: str = "gate"
    routing: RouterKind = "softmax"
    normed: Bias = ("norm_topk_prob", False)
    router_linear: bool = False
    router_bias: bool = False
    router_dtype: str | None = None
    router_stored: str | None = None
    correction: str | None = None
    correction_dtype: str | None = "float32"
    correction_parameter: bool = False
    shared: str | None = None
    shared_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    shared_gate: bool = False
    shared_size: tuple[str, int | None] | None = None
    shared_count: str | None = "n_shared_experts"
    sparse: Callable[[Fields, int], tuple[bool, ...]] = every_layer
    jitter: bool = False
    experts_bias: str = ""
    qkv_bias: Bias = ("attention_bias", False)
    out_bias: Bias = ("attention_bias", False)
    qk_norm: str = "none"
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    qk_norm_field: str = ""
    normed_last: bool = False
    rope: str = "half"
    rotary_share: float = 1.0
    rotary_field: str = ""
    rounded_heads: bool = False
    clipped_field: str = ""
    flow: Flow = "pre"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm: NormKind = "rms"
    head_bias: Bias = False
    tied: bool = False
    window: str = "none"
    ignored: tuple[str, ...] = ()

    def build(self, fields: Fields, model_type: str) -> Architecture:
        """Return the architecture of a mixture-of-experts decoder of this family from its checked config."""
        dims = common.heads_of(fields, head_default=0 if self.rounded_heads else None)
        if not dims.head_size:  # GLM-4.5's config class rounds hidden_size / num_attention_heads down.
            dims = replace(dims, head_size=dims.hidden // dims.heads)
        layers = fields.integer("num_hidden_layers", limit="layers")
        if fields.raw("attn_type_list") not in (None, [1] * layers):
            raise UnsupportedArchitecture("linear attention layers are not supported", field="attn_type_list")
        vocab = fields.integer("vocab_size", limit="vocab")
        count = _experts(fields, self)
        chosen = fields.optional_integer(self.per_token_field, limit="width") or 1
        inner = fields.integer(self.inner_field, limit="width")
        dense = fields.integer("intermediate_size", limit="width")
        sparse = self.sparse(fields, layers)
        shared = _shared_size(fields, self, inner)
        fields.ignore(*self.ignored)
        qkv_bias, out_bias = (common.bias_of(fields, rule) for rule in (self.qkv_bias, self.out_bias))
        if self.experts_bias:
            common.refuse(fields, self.experts_bias, why="the planner cannot build experts with biases")
        tied = fields.boolean("tie_word_embeddings", self.tied)
        qk_norm = self.qk_norm
        if self.qk_norm_field and fields.boolean(self.qk_norm_field, False):
            qk_norm = "head"
        head_bias = common.bias_of(fields, self.head_bias)
        if self.window == "pattern":
            window = common.window_of(fields, _PATTERN_WINDOW)
            kinds = fields.layer_types(layers) or pattern_kinds(fields, layers, window)
        else:
            kinds, window = common.kinds_of(fields, self.window, layers)
        rotary = Rotary(int(dims.head_size * _share(fields, self, dims)), 1)

        table = Table("model.rotary_emb.", rotary.dim, self.rope in ("olmo", "ernie"))
        q_norm, k_norm = qk_norms(qk_norm, self.qk_norm_names, dims, self.norm)
        attention = Attention(
            "self_attn", dims, bias=qkv_bias, out_bias=out_bias, q_norm=q_norm, k_norm=k_norm,
            normed_last=self.normed_last, rope=replace(ROPES[self.rope], dim=rotary.dim, tables=table.name),
            clipped=fields.config.get(self.clipped_field) is not None,
            dropout=common.number(fields, "attention_dropout", 0.0),
        )  # fmt: skip
        act = common.act_of(fields, "silu")
        routed = Experts(
            self.mlp, dims.hidden, inner, count, chosen, act, _router(fields, self),
            _shared(self, dims.hidden, shared, act), "shared_expert_gate" if self.shared_gate else None,
            _correction(self, count),
        )  # fmt: skip
        around = tuple(Norm(name, dims.hidden, self.norm) for name in self.norms)
        dense_layer = layer_of(self.flow, attention, Mlp(self.mlp, dims.hidden, dense, act), around)
        routed_layer = layer_of(self.flow, attention, routed, around)
        noisy = self.jitter and common.number(fields, "router_jitter_noise", 0.0) > 0
        recipe = Recipe(
            "model.layers", Embedding("model.embed_tokens", vocab, dims.hidden),
            tuple(routed_layer if routes else dense_layer for routes in sparse),
            Norm("model.norm", dims.hidden, self.norm), Head(tied, head_bias), (table,),
            # The derivation of training activations covers neither the load-balancing loss nor the router's
            # noise.
            taped=not (fields.config.get("output_router_logits") or noisy),
        )  # fmt: skip
        widest = max(chosen * inner + shared, dense if not all(sparse) else 0)
        return common.described(
            fields, model_type, self.class_name, recipe, dims, widest, common.cache_layers(kinds, window, dims),
            rotary=rotary, experts=count, experts_per_token=chosen,
        )  # fmt: skip


def _router(fields: Fields, v: MoeVariant) -> Router:
    """Return the description of the router that assigns tokens to experts."""
    groups, taken = (int(common.number(fields, name, 1.0)) for name in ("n_group", "topk_group"))
    normed = v.normed if isinstance(v.normed, bool) else bool(fields.config.get(*v.normed))
    noisy = v.routing == "mixer" and common.number(fields, "input_jitter_noise", 0.0) > 0
    return Router(
        v.router, v.routing, normed, (groups, taken), noisy, v.router_linear, v.router_bias, v.router_dtype,
        v.router_stored,
    )  # fmt: skip


def _shared(v: MoeVariant, hidden: int, size: int, act: str) -> Mlp | None:
    """Return the description of a layer's shared expert, None if the model has none."""
    if not size or v.shared is None:
        return None
    return Mlp(v.shared, hidden, size, act, v.shared_names, fused=len(v.shared_names) == 2)


def _correction(v: MoeVariant, count: int) -> tuple[TensorSpec, ...]:
    """Return the router's tensor e_score_correction_bias, or an empty tuple if the family has none."""
    if v.correction is None:
        return ()
    name = f"{v.mlp}.{v.correction}"
    if v.correction_parameter:
        return (TensorSpec(name, (1, count), "router", "Statics", dtype="float32"),)
    return (TensorSpec(name, (count,), "buffer", "Router", dtype=v.correction_dtype, stored="float32"),)


def _experts(fields: Fields, v: MoeVariant) -> int:
    """Return the number of routed experts per layer.

    Raises an error if the config states a separate number for each layer.
    """
    value = fields.raw(v.experts_field)
    if isinstance(value, list):
        raise UnsupportedArchitecture(
            "a list with one number per layer is not supported; only one number is", field=v.experts_field
        )
    return fields.integer(v.experts_field, limit="width")


def _share(fields: Fields, v: MoeVariant, dims: Heads) -> float:
    """Return the fraction of each head's values that the rotary embedding rotates."""
    rotated = fields.optional_integer(v.rotary_field, limit="width") if v.rotary_field else None
    if rotated is None:
        return common.rotary_share(fields, v.rotary_share)
    fields.ignore("partial_rotary_factor")
    return rotated / dims.head_size


def _shared_size(fields: Fields, v: MoeVariant, inner: int) -> int:
    """Return the inner size of a layer's shared expert, 0 if the model has none."""
    if v.shared is None:
        return 0
    if v.shared_size is not None:
        name, default = v.shared_size
        return fields.integer(name, default, limit="width", minimum=1 if default is None else default)
    if v.shared_count is None:
        return inner
    return inner * (fields.optional_integer(v.shared_count, 0, limit="width", minimum=0) or 0)
