"""LFM3: decoder layers with a short convolution, sliding attention or full attention, and two or four norms.

Shapes follow transformers 5.23, models/lfm3/.
"""

from __future__ import annotations

from tonnage.planner.errors import ConfigError
from tonnage.planner.families import common
from tonnage.planner.families.family import RENAMED, Family
from tonnage.planner.families.moe_sliding import tables_by_kind
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture, CacheLayer, Rotary, StateTensor
from tonnage.planner.model.fields import Fields, shown

_KINDS = ("conv", "full_attention", "sliding_attention")


def build(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of an LFM3 model from its checked config."""
    dims = common.heads_of(fields)
    layers, vocab = common.layers_and_vocab(fields)
    inner = fields.integer("intermediate_size", limit="width")
    kernel = fields.integer("conv_L_cache", 7, limit="width")
    conv_bias, bias = fields.boolean("conv_bias", False), fields.boolean("attention_bias", False)
    sandwich, gated = fields.boolean("use_sandwich_norm", True), fields.boolean("use_attention_gate", True)
    tied = fields.boolean("tie_word_embeddings", True)
    window = common.window_of(fields, 256)
    kinds = _kinds(fields, layers)
    attending = tuple(kind for kind in kinds if kind != "conv")
    tables = tables_by_kind(fields, attending)
    state = StateTensor("conv", (kernel - 1, dims.hidden), shard_dim=1)
    norms = ("operator_norm", "ffn_norm", *(("post_operator_norm", "post_ffn_norm") if sandwich else ()))
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, dims.hidden)
    cache: list[CacheLayer] = []
    for i, at in t.layers(layers, "model.layers"):
        if kinds[i] == "conv":
            t.short_conv(f"{at}.conv", dims.hidden, kernel, conv_bias)
            cache.append(CacheLayer(i, "state", None, 0, 0, states=(state,)))
        else:
            t.attention(f"{at}.self_attn", dims, bias=bias, out_bias=bias, qk_norm="head")
            if gated:
                t.linear(f"{at}.self_attn.g_proj", dims.heads, dims.hidden, shard="column")
            cache.append(common.cache_layer(i, kinds[i], window, dims))
        t.gated_mlp(f"{at}.feed_forward", dims.hidden, inner, names=("w1", "w3", "w2"))
        t.norms(at, dims.hidden, *norms)
    t.close("model.embedding_norm", "model.embed_tokens", vocab, dims.hidden, tied)
    t.rotary(dims.head_size, *(f"model.rotary_emb.{table}" for table in tables))
    return common.decoder(
        fields, model_type, "Lfm3ForCausalLM", t, dims, tuple(cache), layers=layers, inner=inner, vocab=vocab,
        rotary=Rotary(dims.head_size, len(tables)) if tables else None,
    )  # fmt: skip


def _kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    """Return the kind of each layer (convolution, sliding or full attention).

    The config field ``layer_types`` states the kinds. Without the field, one layer in four has full attention,
    one in four has a sliding window (except layer 0), and the others are convolutions.
    """
    listed = fields.raw("layer_types")
    if listed is None:
        return tuple(
            "full_attention" if i % 4 == 2 else "sliding_attention" if i % 4 == 0 and i else "conv"
            for i in range(layers)
        )
    if not isinstance(listed, list) or len(listed) != layers or any(kind not in _KINDS for kind in listed):
        raise ConfigError(
            f"{shown(listed)} is not a list with one of {', '.join(_KINDS)} for each of the {layers} layers",
            field="layer_types",
        )
    return tuple(listed)


FAMILIES = {
    "lfm3": Family(build, absent={"num_key_value_heads": 4, "head_dim": 128}, hf="recurrent", files=RENAMED),
}
