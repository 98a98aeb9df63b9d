"""Llama 4 (text model): most layers have chunked attention, and the MLP has routed experts and a shared expert.

Shapes follow transformers 5.19, models/llama4/; the multimodal Llama 4 is in moe_vision.py.
"""

from __future__ import annotations

from tonnage.planner.errors import ConfigError
from tonnage.planner.families import common
from tonnage.planner.families.family import Family
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture, CacheLayer, Rotary
from tonnage.planner.model.fields import Fields, shown


def build(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Llama 4 text model from its checked config.

    Three of four layers have chunked attention; the experts' matrices are stored as [experts, in, out].
    """
    dims = common.heads_of(fields)
    layers, vocab = common.layers_and_vocab(fields)
    count = fields.integer("num_local_experts", limit="width")
    chosen = fields.integer("num_experts_per_tok", 1, limit="width")
    inner, dense = common.widths(fields, "intermediate_size", "intermediate_size_mlp")
    bias = fields.boolean("attention_bias", False)
    tied = fields.boolean("tie_word_embeddings", False)
    step = fields.integer("interleave_moe_layer_step", 1, limit="layers")
    routes = common.layer_indices(fields, "moe_layers", layers, list(range(step - 1, layers, step)))
    kinds, chunk = _chunked(fields, layers)
    # The norm of q and k has no weights, so use_qk_norm changes no shape.
    fields.ignore("use_qk_norm", "for_llm_compressor")
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, dims.hidden)
    for i, at in t.layers(layers, "model.layers"):
        t.attention(f"{at}.self_attn", dims, bias=bias, out_bias=bias)
        t.layer_norms(at, dims.hidden)
        mlp = f"{at}.feed_forward"
        if i not in routes:
            t.gated_mlp(mlp, dims.hidden, dense)
            continue
        t.experts(f"{mlp}.experts", count, dims.hidden, inner, transposed=True)
        # The router's class is a subclass of nn.Linear, so quantizers do not replace it.
        t.router(f"{mlp}.router", count, dims.hidden)
        t.gated_mlp(f"{mlp}.shared_expert", dims.hidden, inner)
    t.close("model.norm", "model.embed_tokens", vocab, dims.hidden, tied)
    t.rotary(dims.head_size, "model.rotary_emb.")
    cache = tuple(
        CacheLayer(i, "chunked", chunk, dims.kv_heads, dims.head_size) if kind == "chunked_attention"
        else CacheLayer(i, "full", None, dims.kv_heads, dims.head_size)
        for i, kind in enumerate(kinds)
    )  # fmt: skip
    return common.decoder(
        fields, model_type, "Llama4ForCausalLM", t, dims, cache, layers=layers,
        inner=max((chosen + 1) * inner, dense), vocab=vocab, rotary=Rotary(dims.head_size, 1), experts=count,
        experts_per_token=chosen,
    )  # fmt: skip


def _chunked(fields: Fields, layers: int) -> tuple[tuple[str, ...], int | None]:
    """Return (attention kind of each layer, chunk size in tokens or None).

    By default every fourth layer has full attention and no rotary positions. In the other layers a token
    attends only to tokens of its chunk.
    """
    chunk = fields.optional_integer("attention_chunk_size", 8192, limit="positions")
    interval = fields.integer("no_rope_layer_interval", 4, limit="layers")
    rope = fields.raw("no_rope_layers")
    if not rope:
        rope = [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(rope, list) or len(rope) != layers:
        raise ConfigError(f"{shown(rope)} is not a list of {layers} values", field="no_rope_layers")
    listed = fields.raw("layer_types")
    if listed is None:
        listed = ["chunked_attention" if flag else "full_attention" for flag in rope]
    known = ("chunked_attention", "full_attention")
    if not isinstance(listed, list) or len(listed) != layers or not all(kind in known for kind in listed):
        raise ConfigError(
            f"{shown(listed)} is not a list with 'chunked_attention' or 'full_attention' for each of the "
            f"{layers} layers",
            field="layer_types",
        )
    if chunk is None:
        listed = ["full_attention"] * layers
    return tuple(listed), chunk


FAMILIES = {
    "llama4_text": Family(
        build, absent={"num_key_value_heads": 8, "head_dim": 128}, every_expert=True, hf="chunked masks",
    ),
}  # fmt: skip
