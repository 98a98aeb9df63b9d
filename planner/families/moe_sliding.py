"""Mixtures of experts with sliding windows in most layers: AFMoE, Kolibri 1, Flint and Beam.

Each head of Q and K has a norm. Shapes follow transformers 5.23, models/<family>/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.family import RENAMED, Family, VLLMTraits
from tonnage.planner.families.moe_layers import stepped_layers
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture, Rotary
from tonnage.planner.model.fields import Fields, shown


@dataclass(frozen=True, slots=True)
class SlidingMoeVariant:
    """Options by which the mixture-of-experts families Kolibri, Flint and Beam differ.

    Attributes:
        class_name: the causal language model's class in transformers.
        window: default sliding window in tokens.
        kinds: function (number of layers) -> attention kind of each layer, for a config without layer_types.
        sparse: function that returns for each layer whether it has routed experts; None if all have them.
        norms: names of a layer's norms, in the order they run.
        shared: (module, default inner size) of the shared expert; None means there is none.
        biased: whether the config field attention_bias can add biases to the attention.
        sinks: whether every head has a learned sink score.
        gated: whether a gate (a matrix, and a bias per head) scales the attention output.
        corrected: whether the router has a correction bias per expert, in fp32.
        wide_router: whether the router is kept in fp32 (_keep_in_fp32_modules_strict).
        by_kind: whether full layers and sliding layers have different rotary tables.
    """

    class_name: str
    window: int
    kinds: Callable[[int], tuple[str, ...]]
    norms: tuple[str, ...]
    shared: tuple[str, int] | None = None
    sparse: Callable[[Fields, int], tuple[bool, ...]] | None = None
    biased: bool = True
    sinks: bool = False
    gated: bool = False
    corrected: bool = True
    wide_router: bool = False
    by_kind: bool = False

    def build(self, fields: Fields, model_type: str) -> Architecture:
        """Return the architecture of a Kolibri, Flint or Beam model from its checked config."""
        dims = common.heads_of(fields)
        layers, vocab = common.layers_and_vocab(fields)
        count, chosen = common.widths(fields, "num_experts", "num_experts_per_tok")
        inner = fields.integer("moe_intermediate_size", limit="width")
        module, size = self.shared or ("", 0)
        shared = fields.integer("shared_expert_intermediate_size", size, limit="width") if module else 0
        sparse = (True,) * layers if self.sparse is None else self.sparse(fields, layers)
        dense = 0 if all(sparse) else fields.integer("intermediate_size", limit="width")
        fields.ignore("intermediate_size")
        bias = self.biased and fields.boolean("attention_bias", False)
        tied = fields.boolean("tie_word_embeddings", False)
        kinds = fields.layer_types(layers) or self.kinds(layers)
        # If sliding_window is missing, the config class's default applies. Null raises an error if a layer is
        # sliding.
        window = common.window_of(fields, self.window)
        tables = tables_by_kind(fields, kinds, ("full_attention",)) if self.by_kind else ("",)
        gate = "float32" if self.wide_router else None
        t = Tensors()
        t.vocabulary("model.embed_tokens", vocab, dims.hidden)
        for i, at in t.layers(layers, "model.layers"):
            here = f"{at}.self_attn"
            t.attention(here, dims, bias=bias, out_bias=bias, qk_norm="head")
            if self.sinks:
                t.add(f"{here}.sinks", (dims.heads,), "attention", "Attention", shard=0, dtype="float32")
            if self.gated:
                t.linear(f"{here}.gate_proj", dims.heads * dims.head_size, dims.hidden, shard="column")
                t.add(f"{here}.gate_bias", (dims.heads,), "attention", "Attention", shard=0)
            t.norms(at, dims.hidden, *self.norms)
            if not sparse[i]:
                t.gated_mlp(f"{at}.mlp", dims.hidden, dense)
                continue
            t.router(f"{at}.mlp.gate", count, dims.hidden, dtype=gate)
            if self.corrected:
                t.correction_bias(f"{at}.mlp.gate.e_score_correction_bias", (count,))
            t.experts(f"{at}.mlp.experts", count, dims.hidden, inner)
            if module:
                t.gated_mlp(f"{at}.mlp.{module}", dims.hidden, shared)
        t.close("model.norm", "model.embed_tokens", vocab, dims.hidden, tied)
        t.rotary(dims.head_size, *(f"model.rotary_emb.{table}" for table in tables))
        return common.decoder(
            fields, model_type, self.class_name, t, dims,
            common.cache_layers(kinds, window, dims), layers=layers,
            inner=max(chosen * inner + shared, dense), vocab=vocab, rotary=Rotary(dims.head_size, len(tables)),
            experts=count, experts_per_token=chosen,
        )  # fmt: skip


def afmoe(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of an AFMoE model (Trinity), whose attention output is gated."""
    dims = common.heads_of(fields)
    layers, vocab = common.layers_and_vocab(fields)
    count, chosen, inner = common.widths(fields, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    dense = fields.integer("intermediate_size", limit="width")
    first = fields.integer("num_dense_layers", 1, limit="layers", minimum=0)
    shared = inner * fields.integer("num_shared_experts", 2, limit="width", minimum=0)
    bias = fields.boolean("attention_bias", False)
    tied = fields.boolean("tie_word_embeddings", False)
    every = fields.integer("global_attn_every_n_layers", 4, limit="layers")
    kinds = fields.layer_types(layers) or common.alternating_kinds(layers, every)
    window = common.window_of(fields, 1024)
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, dims.hidden)
    for i, at in t.layers(layers, "model.layers"):
        t.attention(f"{at}.self_attn", dims, bias=bias, out_bias=bias, qk_norm="head")
        t.linear(f"{at}.self_attn.gate_proj", dims.heads * dims.head_size, dims.hidden, shard="column")
        t.norms(at, dims.hidden, *_TWO, "pre_mlp_layernorm", "post_mlp_layernorm")
        if i < first:
            t.gated_mlp(f"{at}.mlp", dims.hidden, dense)
            continue
        t.router(f"{at}.mlp.router.gate", count, dims.hidden, linear=True)
        t.add(f"{at}.mlp.expert_bias", (count,), "router", "AfmoeMoE")
        t.experts(f"{at}.mlp.experts", count, dims.hidden, inner)
        if shared:
            t.gated_mlp(f"{at}.mlp.shared_experts", dims.hidden, shared)
    t.close("model.norm", "model.embed_tokens", vocab, dims.hidden, tied)
    t.rotary(dims.head_size, "model.rotary_emb.")
    return common.decoder(
        fields, model_type, "AfmoeForCausalLM", t, dims,
        common.cache_layers(kinds, window, dims), layers=layers,
        inner=max(chosen * inner + shared, dense if first else 0), vocab=vocab,
        rotary=Rotary(dims.head_size, 1), experts=count, experts_per_token=chosen,
    )  # fmt: skip


def _beam_sparse(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return for each Beam layer whether it has routed experts, by the config field ``mlp_layer_types``.

    Without this field, all layers but the first three have routed experts.
    """
    listed = fields.listed("mlp_layer_types", layers, {"dense": False, "sparse": True})
    return listed or tuple(i >= 3 for i in range(layers))


def tables_by_kind(fields: Fields, kinds: tuple[str, ...], unrotated: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the name prefixes of the rotary tables, one per attention kind that has rotary positions.

    Kinds in ``unrotated`` have no rotary positions if the config has no rotary parameters for them.
    """
    parameters = fields.raw("rope_parameters")
    out = []
    for kind in sorted(set(kinds)):
        if parameters is None:
            own: object = None if kind in unrotated else {}
        elif isinstance(parameters, dict) and kind in parameters:
            own = parameters[kind]
        else:
            raise ConfigError(f"{shown(parameters)} has no parameters of {kind}", field="rope_parameters")
        if own is None and kind in unrotated:
            continue
        where = f"rope_parameters.{kind}"
        # The rope type "proportional" has a table as wide as the whole head (modeling_rope_utils.py).
        proportional = isinstance(own, dict) and own.get("rope_type") == "proportional"
        if not proportional and (own is None or common.rope_kind(own, where)[1] != 1):
            raise UnsupportedArchitecture(
                f"{shown(own)} is not supported; only rotary parameters that do not extend the length are",
                field=where,
            )
        out.append(f"{kind}_")
    return tuple(out)


def _flint(layers: int) -> tuple[str, ...]:
    """Return the default attention kind of each Flint layer.

    The first two layers, the last layer and every fourth layer have full attention.
    """
    full = {0, 1, layers - 1}
    return tuple("full_attention" if i in full or i % 4 == 1 else "sliding_attention" for i in range(layers))


def _beam(layers: int) -> tuple[str, ...]:
    """Return the default attention kind of each Beam layer: every sixth and the last have full attention."""
    return tuple(
        "sliding_attention" if (i + 1) % 6 and i + 1 < layers else "full_attention" for i in range(layers)
    )


_TWO = ("input_layernorm", "post_attention_layernorm")
FAMILIES = {
    "afmoe": Family(
        afmoe, absent={"num_key_value_heads": 16, "head_dim": 128},
        ignored=(
            "mup_enabled", "route_norm", "score_func", "n_group", "topk_group", "num_expert_groups",
            "num_limited_groups", "use_grouped_mm",
        ),
        vllm=VLLMTraits(wide_router=True), files=RENAMED,
    ),
    "kolibri1": Family(
        SlidingMoeVariant(
            "Kolibri1ForCausalLM", 513, partial(common.alternating_kinds, every=5),
            (*_TWO, "post_self_attn_layernorm", "post_mlp_layernorm"), ("shared_experts", 512), biased=False,
        ).build,
        # Files that transformers writes have num_local_experts instead of num_experts.
        aliases={"num_experts": "num_local_experts"},
        absent={"num_key_value_heads": 4, "head_dim": 128}, files=RENAMED,
    ),
    "flint": Family(
        SlidingMoeVariant(
            "FlintForCausalLM", 513, _flint, _TWO, ("shared_expert", 1024),
            partial(stepped_layers, dense=(0, 1)), sinks=True, corrected=False,
            wide_router=True,
        ).build,
        absent={"num_key_value_heads": 4, "head_dim": 128}, attentions=("flash",), hf="sinks", files=RENAMED,
    ),
    "beam": Family(
        SlidingMoeVariant(
            "BeamForCausalLM", 512, _beam, common.FOUR_NORMS,
            sparse=_beam_sparse, gated=True, wide_router=True, by_kind=True,
        ).build,
        absent={"num_key_value_heads": 8, "head_dim": 128},
    ),
}  # fmt: skip
