"""Ling 1 and 2, Sarvam-MoE and Param-2: grouped-query attention, routed experts and a shared expert.

Shapes follow vLLM 0.32.0 (models/bailing_moe.py, sarvam.py, param2moe.py). vLLM's module names are those in
published checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.planner.families import common
from tonnage.planner.families.family import Family
from tonnage.planner.families.moe_layers import behind_dense
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture, Rotary
from tonnage.planner.model.fields import Fields

_NO_SHAPE = (
    "embedding_dropout", "output_dropout", "norm_head", "norm_softmax", "max_window_layers", "n_group",
    "topk_group", "num_nextn_predict_layers", "mtp_loss_scaling_factor", "score_function", "router_dtype",
    "rotary_dim", "output_router_logits", "moe_router_topk_scaling_factor", "use_sliding_window",
    "num_mtp_layers",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Variant:
    """Options by which a model family differs from Ling (inclusionAI's BailingMoe).

    Attributes:
        class_name: class that the published config files name.
        attention: (name of the attention module in a layer, name of its output projection).
        norms: names of the norms of q and k.
        rms: whether the norms of q and k are always RMSNorms; if False, ``use_rmsnorm`` may make them
            LayerNorms.
        corrected: whether the router has a bias per expert if config.json does not state it.
        mlp_bias: whether the config field ``use_bias`` adds biases to the MLP too, not only to attention.
        qkv_bias: config fields; if any of them is true, q, k and v have biases.
        wide_router: whether the router is always in float32; if False, ``router_dtype`` states its dtype.
        multiplied: whether the config's shared-expert width must be multiplied by ``num_shared_experts``.
    """

    class_name: str
    attention: tuple[str, str] = ("attention", "dense")
    norms: tuple[str, str] = ("query_layernorm", "key_layernorm")
    rms: bool = False
    corrected: bool = False
    mlp_bias: bool = True
    qkv_bias: tuple[str, ...] = ("use_bias", "use_qkv_bias")
    wide_router: bool = False
    multiplied: bool = True

    def build(self, fields: Fields, model_type: str) -> Architecture:
        """Return the architecture of a model of this family from its checked config."""
        dims = common.heads_of(fields)
        layers, vocab = common.layers_and_vocab(fields)
        count, chosen = common.widths(fields, "num_experts", "num_experts_per_tok")
        inner, dense = common.widths(fields, "moe_intermediate_size", "intermediate_size")
        number = fields.integer("num_shared_experts", 1, limit="width", minimum=0)
        stated = fields.optional_integer("moe_shared_expert_intermediate_size", limit="width")
        shared = (inner if stated is None else stated) * number
        if number and stated is not None and not self.multiplied:
            shared = stated
        sparse = behind_dense(fields, layers, 1)
        bias = fields.boolean("use_bias", False)
        qkv_bias = True in {fields.boolean(name, False) for name in self.qkv_bias}
        normed = fields.boolean("use_qk_norm", False)
        corrected = fields.boolean("moe_router_enable_expert_bias", self.corrected)
        tied = fields.boolean("tie_word_embeddings", False)
        share = common.rotary_share(fields)
        # vLLM's GateLinear keeps the router in router_dtype. Published files store it in the model's dtype.
        router = "float32" if self.wide_router or fields.raw("router_dtype") == "fp32" else None
        norm = "rms" if self.rms or fields.boolean("use_rmsnorm", False) else "layer"
        fields.ignore(*_NO_SHAPE)
        attention, out = self.attention
        mlp_bias = bias and self.mlp_bias
        t = Tensors()
        t.vocabulary("model.word_embeddings", vocab, dims.hidden)
        for i, at in t.layers(layers, "model.layers"):
            t.norm(f"{at}.input_layernorm", dims.hidden)
            t.fused_attention(
                f"{at}.{attention}", dims, qkv="query_key_value", out=out, bias=qkv_bias, out_bias=bias
            )
            if normed:
                t.norms(f"{at}.{attention}", dims.head_size, *self.norms, kind=norm)
            t.norm(f"{at}.post_attention_layernorm", dims.hidden)
            if not sparse[i]:
                t.gated_mlp(f"{at}.mlp", dims.hidden, dense, bias=mlp_bias)
                continue
            t.router(f"{at}.mlp.gate", count, dims.hidden, dtype=router)
            if corrected:
                t.add(f"{at}.mlp.gate.expert_bias", (count,), "router", "Router", dtype="float32")
            t.experts(f"{at}.mlp.experts", count, dims.hidden, inner)
            if shared:
                t.gated_mlp(f"{at}.mlp.shared_experts", dims.hidden, shared, bias=mlp_bias)
        t.close("model.norm", "model.word_embeddings", vocab, dims.hidden, tied)
        rotary = Rotary(int(dims.head_size * share), 1)
        return common.decoder(
            fields, model_type, self.class_name, t, dims, layers=layers,
            inner=max(chosen * inner + shared, 0 if all(sparse) else dense), vocab=vocab,
            rotary=rotary,
            experts=count, experts_per_token=chosen,
        )  # fmt: skip


FAMILIES = {
    "bailing_moe": Family(_Variant("BailingMoeV2ForCausalLM").build, first_class="BailingMoeForCausalLM"),
    "bailing_moe_v2": Family(_Variant("BailingMoeV2ForCausalLM").build),
    "sarvam_moe": Family(_Variant("SarvamMoEForCausalLM").build),
    "param2moe": Family(
        _Variant(
            "Param2MoEForCausalLM", ("self_attn", "o_proj"), ("q_layernorm", "k_layernorm"), rms=True,
            corrected=True, wide_router=True, mlp_bias=False, qkv_bias=("use_qkv_bias",), multiplied=False,
        ).build
    ),
}  # fmt: skip
