"""Mistral Large 4: latent attention with sparse indexers, experts and a Pixtral tower.

Layers without rotary positions cache only the latent, without a rotary key. A layer may use the cached latent
of an earlier layer. Shapes follow transformers 5.23, models/mistral_large4/ and pixtral/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common, mla, towers
from tonnage.planner.families.dense import rotated_layers
from tonnage.planner.families.family import RENAMED, Family
from tonnage.planner.families.moe_layers import sparse_layers
from tonnage.planner.families.multimodal import joined, text_of, vision_of
from tonnage.planner.families.tensors import Tensors, latent
from tonnage.planner.model.architecture import Architecture, CacheLayer, Rotary
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.tensor import TensorSpec


def text(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of the Mistral Large 4 text model from its checked config."""
    d = mla.read_latent(fields, defaults=True)
    if d.q_rank is not None:
        raise UnsupportedArchitecture(
            f"{d.q_rank} is not supported: transformers' class does not compress Q", field="q_lora_rank"
        )
    layers, vocab = common.layers_and_vocab(fields)
    count, chosen = common.widths(fields, "n_routed_experts", "num_experts_per_tok")
    inner, dense = common.widths(fields, "moe_intermediate_size", "intermediate_size")
    shared = inner * fields.integer("n_shared_experts", limit="width")
    bias = fields.boolean("attention_bias", False)
    tied = fields.boolean("tie_word_embeddings", False)
    sparse = sparse_layers(fields, layers, 1)
    index_heads, index_size, indexed = mla.indexer(fields, layers)
    fields.ignore("index_topk")
    rotated, sources = rotated_layers(fields, layers), _sources(fields, layers)
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, d.hidden)
    cache: list[CacheLayer] = []
    for i, at in t.layers(layers, "model.layers"):
        own = replace(d, bias=bias, extra=_scaling("self_attn", d.heads))
        if not rotated[i]:
            own = replace(own, nope=d.head_size, rotary=0)
        if indexed[i]:
            own = replace(own, extra=own.extra + _index(d.hidden, index_heads, index_size))
        before = len(t.specs)
        latent(t, at, own)
        if sources[i] == i:
            cache += mla.cache((i,), own, {i: index_size} if indexed[i] else None)
        else:
            if indexed[i]:
                raise UnsupportedArchitecture(
                    f"layer {i} has an indexer of its own, so it cannot use the latent of layer {sources[i]}",
                    field="kv_source_layers",
                )
            t.specs[before:] = [s for s in t.specs[before:] if ".kv_a_" not in s.name]
            cache.append(replace(mla.cache((i,), own)[0], shares=sources[i]))
        t.layer_norms(at, d.hidden)
        if not sparse[i]:
            t.gated_mlp(f"{at}.mlp", d.hidden, dense)
            continue
        t.experts(f"{at}.mlp.experts", count, d.hidden, inner)
        # transformers keeps the router in fp32 (_keep_in_fp32_modules_strict)
        t.router(f"{at}.mlp.gate", count, d.hidden, dtype="float32")
        t.gated_mlp(f"{at}.mlp.shared_experts", d.hidden, shared)
    t.close("model.norm", "model.embed_tokens", vocab, d.hidden, tied)
    t.rotary(d.rotary, "model.rotary_emb.")
    learned = ((d.rotary + 1) // 2,)
    t.buffer("model.rotary_emb.alpha", learned, "RotaryEmbedding", "float32", "float32")
    return common.decoder(
        fields, model_type, "MistralLarge4TextModel", t,
        mla.heads_of(d), tuple(cache), layers=layers,
        inner=max(chosen * inner + shared, 0 if all(sparse) else dense),
        vocab=vocab, rotary=Rotary(d.rotary, 1), experts=count, experts_per_token=chosen,
    )  # fmt: skip


def _scaling(at: str, heads: int) -> tuple[TensorSpec, ...]:
    """Return the tensors with the learned scale and bias of each head's softmax."""
    names = (f"{at}.softmax_scaling.scale", f"{at}.softmax_scaling.bias")
    return tuple(TensorSpec(name, (heads,), "attention", "SoftmaxScaling", shard_dim=0) for name in names)


def _index(hidden: int, heads: int, size: int) -> tuple[TensorSpec, ...]:
    """Return the tensors of a sparse indexer, whose queries are projected from the layer's hidden states."""
    at = "self_attn.indexer"
    return (
        *mla.index_tensors(hidden, hidden, heads, size),
        TensorSpec(f"{at}.q_input_norm.weight", (hidden,), "norm", "LayerNorm"),
        TensorSpec(f"{at}.q_input_norm.bias", (hidden,), "norm", "LayerNorm"),
        *(replace(spec, shard_dim=None) for spec in _scaling(at, heads)),
    )


def _sources(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return for each layer the index of the layer whose cached latent (compressed K and V) it uses.

    The index is the layer's own, or that of an earlier layer, listed in the config field ``kv_source_layers``.
    """
    listed = fields.raw("kv_source_layers")
    if listed is None:
        return tuple(range(layers))
    known = isinstance(listed, list) and len(listed) == layers
    if not known or not all(type(s) is int and 0 <= s <= i and listed[s] == s for i, s in enumerate(listed)):
        raise ConfigError(
            f"{shown(listed)} must name, for each of {layers} layers, the layer itself or an earlier layer "
            "with its own latent",
            field="kv_source_layers",
        )
    return tuple(listed)


def build(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of the multimodal Mistral Large 4 from its checked config."""
    inside = text_of(fields, "mistral_large4_text", fields.mapping("text_config"))
    t = Tensors("vision")
    hidden = _pixtral(t, "model.vision_tower", vision_of(fields))
    t.role = "projector"
    at, merge = "model.multi_modal_projector", fields.integer("spatial_merge_size", 2, limit="width")
    bias = fields.boolean("multimodal_projector_bias", False)
    taken = fields.raw("vision_feature_layer")
    times = len(taken) if isinstance(taken, list) else 1
    t.norm(f"{at}.norm", hidden)
    t.linear(f"{at}.patch_merger.merging_layer", hidden, hidden * merge * merge)
    t.connector(at, hidden * times, inside.hidden_size, inside.hidden_size, bias=bias)
    return joined(inside, model_type, "MistralLarge4ForConditionalGeneration", t)


# default vision tower of MistralLarge4Config, for a config without vision_config
_TOWER = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 30, "num_attention_heads": 16,
    "patch_size": 14,
}  # fmt: skip


def _pixtral(t: Tensors, at: str, config: Mapping[str, Any]) -> int:
    """Add the tensors of a Pixtral tower and return its hidden size.

    The tower is a Llama-like transformer over image patches, without biases.
    """
    v = towers.sizes(Fields(config or _TOWER), {**dict.fromkeys(_TOWER), "num_channels": 3})
    hidden, heads = v["hidden_size"], v["num_attention_heads"]
    common.divisible(hidden, heads, "vision_config.hidden_size", "vision_config.num_attention_heads")
    towers.pixtral_layers(t, at, v)
    t.rotary(hidden // heads, f"{at}.patch_positional_embedding.")
    return hidden


_TOP = (
    "text_config", "vision_config", "image_token_index", "image_token_id", "projector_hidden_act",
    "vision_feature_layer",
)  # fmt: skip
FAMILIES = {
    "mistral_large4": Family(build, ignored=_TOP, hf="latent", files=RENAMED),
    "mistral_large4_text": Family(
        text, aliases={"n_routed_experts": "num_local_experts"},
        absent={"qk_nope_head_dim": 64, "index_n_heads": 32, "n_shared_experts": 1}, hf="latent",
    ),
}  # fmt: skip
