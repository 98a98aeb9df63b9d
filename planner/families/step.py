"""Step 3 and Step 3.5: routed experts and a shared expert, with multi-query or sliding attention.

Shapes follow vLLM 0.32.0 (models/step3_text.py, step3p5.py) and its config classes
(transformers_utils/configs/step3_vl.py, step3p5.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.family import Family, VLLMTraits
from tonnage.planner.families.moe_mixed import step3p7
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture, Rotary
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.recipe import Heads


def _routed(fields: Fields, layers: int, first: int) -> tuple[bool, ...]:
    """Return for each layer whether it has routed experts: the config field ``moe_layers_enum`` lists them.

    The field is a list of layer indices, or a string of indices separated by commas. Without the field, all
    layers from ``first`` on have routed experts.
    """
    listed = fields.raw("moe_layers_enum")
    if listed is None:
        return tuple(i >= first for i in range(layers))
    parts = listed.split(",") if isinstance(listed, str) else listed
    try:
        found = {int(part) for part in parts}
    except (TypeError, ValueError):
        raise ConfigError(f"{shown(listed)} is not a list of layer indices", field="moe_layers_enum") from None
    return tuple(i in found for i in range(layers))


def step3(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of the Step 3 text model from its checked config.

    All query heads are projected from one shared query of ``share_q_dim`` values. Each layer caches one KV
    head.
    """
    hidden = fields.integer("hidden_size", limit="width")
    heads = fields.integer("num_attention_heads", limit="heads")
    size = fields.integer("head_dim", 256, limit="width")
    query = fields.optional_integer("share_q_dim", limit="width") or size
    if fields.integer("num_attention_groups", 1, limit="heads") != 1:
        raise UnsupportedArchitecture(
            "must be 1: vLLM's class always has one KV head", field="num_attention_groups"
        )
    dims = Heads(hidden, heads, 1, size)
    layers, vocab = common.layers_and_vocab(fields)
    count, chosen, inner = common.widths(fields, "moe_num_experts", "moe_top_k", "moe_intermediate_size")
    shared, dense = common.widths(fields, "share_expert_dim", "intermediate_size")
    tied = fields.boolean("tie_word_embeddings", False)
    routed = _routed(fields, layers, 1)
    fields.ignore("max_seq_len", "num_key_value_heads", "norm_expert_weight", "rope_theta", "layer_types")
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, hidden)
    for i, at in t.layers(layers, "model.layers"):
        own = f"{at}.self_attn"
        # Tensor parallelism does not divide q_proj, k_proj and v_proj: every rank has them whole.
        for name, rows in (("q_proj", query), ("k_proj", size), ("v_proj", size)):
            t.linear(f"{own}.{name}", rows, hidden)
        t.norm(f"{own}.inter_norm", query)
        t.linear(f"{own}.wq", heads * size, query, shard="column")
        t.linear(f"{own}.o_proj", hidden, heads * size, shard="row")
        t.layer_norms(at, hidden)
        if not routed[i]:
            t.gated_mlp(f"{at}.mlp", hidden, dense)
            continue
        t.router(f"{at}.moe.gate", count, hidden)
        t.experts(f"{at}.moe.experts", count, hidden, inner)
        t.gated_mlp(f"{at}.share_expert", hidden, shared)
    t.close("model.norm", "model.embed_tokens", vocab, hidden, tied)
    name = "max_position_embedding" if "max_position_embedding" in fields.config else "max_position_embeddings"
    return common.decoder(
        fields, model_type, "Step3TextForCausalLM", t, dims, layers=layers,
        inner=max(chosen * inner + shared, 0 if all(routed) else dense), vocab=vocab, rotary=Rotary(size, 1),
        experts=count, experts_per_token=chosen, max_model_len=fields.integer(name, 65536, limit="positions"),
        position_field=name,
    )  # fmt: skip


# Config field of Step 3.5 -> the same field's name in the config of Step 3.7's text model (transformers)
_NAMES = {
    "num_attention_groups": "num_key_value_heads", "moe_num_experts": "num_experts",
    "moe_top_k": "num_experts_per_tok",
}  # fmt: skip
_ONE_FORM = {
    "att_impl_type": "GQA", "use_moe_router_bias": True, "need_fp32_gate": True, "attention_bias": False,
}  # fmt: skip


def step3p5(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of Step 3.5, whose modules are those of Step 3.7's text model.

    ``attention_other_setting`` gives the sliding layers their number of query heads. Files that transformers
    writes have the model_type of Step 3.5, but the field names of Step 3.7.
    """
    if "moe_num_experts" not in fields.config:
        return step3p7(fields, model_type)
    common.only(fields, **_ONE_FORM)
    gated = fields.boolean("use_head_wise_attn_gate", False)
    layers = fields.integer("num_hidden_layers", limit="layers")
    routed = _routed(fields, layers, 1)
    config: dict[str, Any] = {_NAMES.get(name, name): value for name, value in fields.config.items()}
    kinds = config.get("layer_types")
    if isinstance(kinds, list):  # layer_types also lists the MTP draft layers
        config["layer_types"] = kinds[:layers]
    other = config.pop("attention_other_setting", None)
    if other is not None:
        _other(config, other)
    config["mlp_layer_types"] = ["sparse" if routes else "dense" for routes in routed]
    fields.config = config
    fields.ignore(
        "moe_layers_enum", "use_head_wise_attn_gate", "use_moe", "moe_every_n_layer", "moe_layer_offset",
        "max_seq_len", "norm_expert_weight", "moe_router_activation", "use_rope_layers", "yarn_only_types",
        "partial_rotary_factors", "rope_theta", "zero_centered", "first_k_dense_replace", "n_shared_experts",
        *_ONE_FORM,
    )  # fmt: skip
    found = step3p7(fields, model_type)
    if gated:
        return found
    return replace(found, tensors=tuple(t for t in found.tensors if ".self_attn.g_proj." not in t.name))


def _other(config: dict[str, Any], other: object) -> None:
    """Write the numbers of heads of the sliding layers into ``config``, under Step 3.7's field names.

    Raises:
        UnsupportedArchitecture: ``other`` describes layers that are not sliding, or whose KV heads or head size
            differ from those of the full layers.
    """
    known = {
        "attention_type": "sliding_attention", "num_attention_groups": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
    }  # fmt: skip
    if not isinstance(other, dict) or any(other.get(name, value) != value for name, value in known.items()):
        raise UnsupportedArchitecture(
            f"{shown(other)} is not supported; it must state {shown(known)}", field="attention_other_setting"
        )
    config["num_sliding_attention_heads"] = other.get("num_attention_heads")


FAMILIES = {
    "step3_text": Family(step3),
    "step3p5": Family(
        step3p5,
        aliases={"num_experts": "n_routed_experts"},
        absent={"num_key_value_heads": 8, "head_dim": 128},
        vllm=VLLMTraits(wide_router=True),
        first_class="Step3p5ForCausalLM",
    ),
}
