"""Options of each family of mixture-of-experts decoders with ordinary (not latent or linear) attention."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tonnage.planner.families import common
from tonnage.planner.families.dense import with_sinks
from tonnage.planner.families.family import LORA_ON_VOCABULARY, QV, RENAMED, Family, VLLMTraits
from tonnage.planner.families.llama import HUNYUAN_LEFTOVERS
from tonnage.planner.families.moe_layers import (
    all_listed,
    behind_dense,
    interval_layers,
    sparse_layers,
    stepped_layers,
)
from tonnage.planner.families.moe_variant import MoeVariant
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import Fields
from tonnage.planner.model.recipe import NormKind

_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_GRANITE = MoeVariant(
    "GraniteMoeForCausalLM", "num_local_experts", inner_field="intermediate_size", mlp="block_sparse_moe",
    router="router", routing="softmax-chosen",
)  # fmt: skip
_GRANITE_SHARED = replace(
    _GRANITE, class_name="GraniteMoeSharedForCausalLM", shared="shared_mlp",
    shared_names=("input_linear", "output_linear"), shared_size=("shared_intermediate_size", 0),
)  # fmt: skip


def _granite_swa(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Granite MoE model with sliding windows and sinks."""
    variant = replace(_GRANITE_SHARED, class_name="GraniteMoeSWAForCausalLM", window="layer_types")
    return with_sinks(variant.build(fields, model_type), fields)


def _cohere2_moe(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Cohere 2 model with experts in every layer.

    Raises:
        UnsupportedArchitecture: the config makes the first layers dense.
    """
    common.refuse(fields, "prefix_dense_intermediate_size", "first_k_dense_replace")
    norm: NormKind = "layer-written" if fields.raw("rms_norm_eps") is None else "rms"
    return MoeVariant(
        "Cohere2MoeForCausalLM", inner_field="intermediate_size", norm=norm, flow="parallel",
        norms=("input_layernorm",), shared="mlp.shared_experts", shared_count="num_shared_experts",
        sparse=all_listed, rope="cohere", tied=True, window="pattern",
        ignored=(
            "logit_scale", "sliding_window_pattern", "prefix_dense_sliding_window_pattern",
            "shared_expert_combination_strategy", "expert_selection_fn",
        ),
    ).build(fields, model_type)  # fmt: skip


FAMILIES = {
    "mixtral": Family(
        MoeVariant(
            "MixtralForCausalLM", "num_local_experts", inner_field="intermediate_size", qkv_bias=False,
            out_bias=False, window="optional", routing="softmax-float", normed=True, jitter=True,
        ).build,
        absent={"num_key_value_heads": 8}, lora=QV, hf="routing", vllm=LORA_ON_VOCABULARY,
    ),
    "qwen2_moe": Family(
        MoeVariant(
            "Qwen2MoeForCausalLM", shared="mlp.shared_expert", shared_gate=True,
            shared_size=("shared_expert_intermediate_size", None), sparse=stepped_layers,
            qkv_bias=("qkv_bias", True), out_bias=False, window="qwen",
        ).build,
        absent={"num_key_value_heads": 16}, hf="served",
    ),
    "qwen3_moe": Family(
        MoeVariant(
            "Qwen3MoeForCausalLM", qk_norm="head", window="qwen", sparse=stepped_layers,
            ignored=("use_qk_norm",),
        ).build,
        # Files that transformers 5.19 writes have num_local_experts instead of num_experts.
        aliases={"num_experts": "num_local_experts"},
        absent={"num_key_value_heads": 4}, hf="served", vllm=LORA_ON_VOCABULARY,
    ),
    "mellum": Family(
        MoeVariant(
            "MellumForCausalLM", qk_norm="head", window="layer_types", sparse=sparse_layers,
        ).build,
        aliases={"num_experts": "num_local_experts"}, absent={"num_key_value_heads": 4},
    ),
    "olmoe": Family(
        MoeVariant(
            "OlmoeForCausalLM", inner_field="intermediate_size", qk_norm="full", clipped_field="clip_qkv",
            ignored=("clip_qkv",),
        ).build,
        hf="served",
    ),
    "flex_olmo": Family(
        MoeVariant(
            "FlexOlmoForCausalLM", inner_field="intermediate_size", qk_norm="full", flow="post",
            norms=_POST_NORMS, norm="rms-wide", rope="olmo",
        ).build,
        hf="served",
    ),
    "phimoe": Family(
        MoeVariant(
            "PhimoeForCausalLM", "num_local_experts", inner_field="intermediate_size", router="router",
            routing="mixer", norm="layer", window="optional", head_bias=("lm_head_bias", False),
            ignored=("original_max_position_embeddings",),
        ).build,
        absent={"num_key_value_heads": 8}, first_class="PhiMoEForCausalLM", hf="routing",
        vllm=LORA_ON_VOCABULARY,
    ),
    "granitemoe": Family(_GRANITE.build, vllm=LORA_ON_VOCABULARY, files=RENAMED),
    "granitemoeshared": Family(_GRANITE_SHARED.build, vllm=LORA_ON_VOCABULARY, files=RENAMED),
    "granitemoe_swa": Family(
        _granite_swa, ignored=("layer_rope_theta",), hf="sinks", vllm=LORA_ON_VOCABULARY, files=RENAMED
    ),
    "cohere2_moe": Family(
        _cohere2_moe, absent={"head_dim": 128, "num_shared_experts": 0}, files=RENAMED,
        vllm=VLLMTraits(lora_vocabulary=1),
    ),
    "minimax_m2": Family(
        MoeVariant(
            "MiniMaxM2ForCausalLM", "num_local_experts", inner_field="intermediate_size", routing="sigmoid",
            normed=True, rope="joined", correction="e_score_correction_bias", correction_dtype=None,
            qkv_bias=False, out_bias=False, qk_norm="full", rotary_field="rotary_dim", jitter=True,
            # MiniMax-M2.7's files store router and correction bias in float32; transformers loads both in bf16
            router_stored="float32",
            ignored=(
                "use_qk_norm", "qk_norm_type", "use_routing_bias", "use_mtp", "mtp_transformer_layers",
                "num_mtp_modules", "shared_intermediate_size", "rotary_dim",
            ),
        ).build,
        absent={"num_key_value_heads": 8, "head_dim": 128}, hf="routing", vllm=VLLMTraits(wide_router=True),
    ),
    "ernie4_5_moe": Family(
        MoeVariant(
            "Ernie4_5_MoeForCausalLM", "moe_num_experts", "moe_k", routing="softmax-clamped", normed=True,
            rope="ernie", correction="gate.moe_statics.e_score_correction_bias", correction_parameter=True,
            router_dtype="float32",  # transformers keeps the router in fp32 (_keep_in_fp32_modules_strict)
            shared="mlp.shared_experts", shared_count="moe_num_shared_experts", sparse=interval_layers,
            experts_bias="use_bias", qkv_bias=("use_bias", False), out_bias=("use_bias", False), tied=True,
            ignored=("moe_norm_min",),
        ).build,
        absent={"num_key_value_heads": 4, "moe_num_shared_experts": 2},
    ),
    "glm4_moe": Family(
        MoeVariant(
            "Glm4MoeForCausalLM", "n_routed_experts", correction="gate.e_score_correction_bias",
            routing="sigmoid-groups", normed=("norm_topk_prob", True), rope="joined",
            shared="mlp.shared_experts", sparse=partial(behind_dense, dense=1), out_bias=False,
            qk_norm_field="use_qk_norm", rotary_share=0.5, rounded_heads=True,
            ignored=("n_group", "topk_group", "num_nextn_predict_layers"),
        ).build,
        absent={"num_key_value_heads": 8, "n_shared_experts": 1}, hf="served",
        vllm=VLLMTraits(wide_router=True),
    ),
    "dots1": Family(
        MoeVariant(
            "Dots1ForCausalLM", "n_routed_experts", correction="gate.e_score_correction_bias",
            routing="sigmoid-groups", shared="mlp.shared_experts", qk_norm="head", window="qwen",
            sparse=behind_dense, ignored=("n_group", "topk_group"),
        ).build,
        absent={"num_key_value_heads": 32},
    ),
    "exaone_moe": Family(
        MoeVariant(
            "ExaoneMoeForCausalLM", correction="gate.e_score_correction_bias",
            routing="sigmoid-groups", normed=("norm_topk_prob", True), shared="mlp.shared_experts",
            shared_count="num_shared_experts", sparse=partial(sparse_layers, dense=1), qkv_bias=False,
            out_bias=False, qk_norm="head", window="pattern",
            ignored=("n_group", "topk_group", "sliding_window_pattern", "first_k_dense_replace"),
        ).build,
        absent={"num_key_value_heads": 32, "num_shared_experts": 1}, other_classes=("ExaoneMoEForCausalLM",),
        vllm=LORA_ON_VOCABULARY,
    ),
    "hy_v3": Family(
        MoeVariant(
            "HYV3ForCausalLM", correction="e_score_correction_bias", routing="sigmoid",
            normed=("route_norm", True), shared="mlp.shared_experts", shared_count="num_shared_experts",
            sparse=partial(sparse_layers, dense=1), qk_norm="head",
            ignored=(
                "first_k_dense_replace", "num_nextn_predict_layers", "qk_norm", "expert_hidden_dim",
                "enable_moe_fp32_combine", "enable_attention_fp32_softmax", "moe_router_use_sigmoid",
                "moe_router_enable_expert_bias",
            ),
        ).build,
        absent={"num_key_value_heads": 8, "num_shared_experts": 1},
        vllm=VLLMTraits(wide_router=True),
    ),
    "hunyuan_v1_moe": Family(
        MoeVariant(
            "HunYuanMoEV1ForCausalLM", inner_field="intermediate_size", per_token_field="moe_topk",
            router="gate.wg", routing="softmax", normed=True,
            router_linear=True, router_dtype="float32",  # the class's constructor creates the router in float32
            shared="mlp.shared_mlp", shared_count=None, qk_norm="head", normed_last=True,
            qk_norm_names=("query_layernorm", "key_layernorm"),
        ).build,
        leftovers=HUNYUAN_LEFTOVERS,
    ),
}  # fmt: skip
