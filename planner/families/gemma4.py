"""Gemma 4 (text model). Shapes follow transformers 5.19 / 5.23, models/gemma4/.

Layers with full attention have their own head size and number of KV heads, and may use K as V. Large models
have experts parallel to the MLP. Small models have per-layer embeddings, and layers that use the KV cache of an
earlier layer.
"""

from __future__ import annotations

from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families import common, gemma3n
from tonnage.planner.families.family import Family
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture, Rotary
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.recipe import Heads


def build(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Gemma 4 text model from its checked config."""
    hidden = fields.integer("hidden_size", 2304, limit="width")
    heads = fields.integer("num_attention_heads", 8, limit="heads")
    kv_heads = fields.integer("num_key_value_heads", 4, limit="heads")
    sliding = Heads(hidden, heads, kv_heads, fields.integer("head_dim", 256, limit="width"))
    k_is_v = fields.boolean("attention_k_eq_v", False)
    layers = fields.integer("num_hidden_layers", 30, limit="layers")
    kinds = _kinds(fields, layers)
    full = _full_heads(fields, sliding, k_is_v, kinds)
    for own in (sliding, full):
        common.divisible(own.heads, own.kv_heads, "num_attention_heads", "num_key_value_heads")
    vocab = fields.integer("vocab_size", 262_144, limit="vocab")
    inner = fields.integer("intermediate_size", 9216, limit="width")
    bias = fields.boolean("attention_bias", False)
    tied = fields.boolean("tie_word_embeddings", True)
    moe = fields.boolean("enable_moe_block", False)
    count = fields.integer("num_experts", limit="width") if moe else 0
    chosen = fields.integer("top_k_experts", limit="width") if moe else 0
    expert = fields.integer("moe_intermediate_size", limit="width") if moe else 0
    per_layer = fields.optional_integer("hidden_size_per_layer_input", 0, limit="width", minimum=0) or 0
    if "hidden_size_per_layer_input" not in fields.config:
        per_layer = 256
    wide = fields.boolean("use_double_wide_mlp", False)
    fields.ignore(
        "use_bidirectional_attention", "num_experts", "top_k_experts", "moe_intermediate_size",
        "rope_parameters",
    )  # fmt: skip
    window = fields.integer("sliding_window", 512, limit="positions")
    sources = gemma3n.shared_layers(fields, kinds)
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, hidden)
    t.buffer("model.embed_tokens.embed_scale", (), "ScaledWordEmbedding", None)
    gemma3n.per_layer_embeddings(t, fields, layers, hidden, per_layer)
    cache = []
    for i, at in t.layers(layers, "model.layers"):
        own = full if kinds[i] == "full_attention" else sliding
        source = sources.get(i)
        value = not (k_is_v and own is full)
        gemma3n.attention(t, f"{at}.self_attn", own, bias, value=value, shared=source is not None)
        cache.append(gemma3n.cache_layer(i, None if own is full else window, own, source))
        t.gated_mlp(f"{at}.mlp", hidden, inner * (2 if wide and source is not None else 1))
        if moe:
            t.add(f"{at}.router.scale", (hidden,), "router", "Gemma4TextRouter")
            t.add(f"{at}.router.per_expert_scale", (count,), "router", "Gemma4TextRouter")
            t.router(f"{at}.router.proj", count, hidden, linear=True)
            t.experts(f"{at}.experts", count, hidden, expert)
        t.norms(at, hidden, *common.FOUR_NORMS)
        if moe:
            after = "post_feedforward_layernorm"
            t.norms(at, hidden, f"{after}_1", f"{after}_2", "pre_feedforward_layernorm_2")
        if per_layer:
            gemma3n.per_layer_input(t, at, hidden, per_layer)
        t.buffer(f"{at}.layer_scalar", (1,), "Gemma4TextDecoderLayer", None, "model")
    t.close("model.norm", "model.embed_tokens", vocab, hidden, tied)
    for kind in dict.fromkeys(kinds):
        size = full.head_size if kind == "full_attention" else sliding.head_size
        t.rotary(size, f"model.rotary_emb.{kind}_")
    return common.decoder(
        fields, model_type, "Gemma4ForCausalLM", t, sliding, tuple(cache), layers=layers,
        inner=inner * (2 if wide and sources else 1) + chosen * expert, vocab=vocab,
        rotary=Rotary(sliding.head_size, 2), experts=count, experts_per_token=chosen,
        max_model_len=fields.integer("max_position_embeddings", 131_072, limit="positions"),
    )  # fmt: skip


def _kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    """Return the attention kind of each layer: by default five sliding layers, then one with full attention.

    The last layer always has full attention, even if layer_types states another kind (configuration_gemma4.py).
    """
    kinds = fields.layer_types(layers) or common.alternating_kinds(layers, 6)
    return (*kinds[:-1], "full_attention")


def _full_heads(fields: Fields, sliding: Heads, k_is_v: bool, kinds: tuple[str, ...]) -> Heads:
    """Return the number and size of the heads in layers with full attention.

    Published files state ``global_head_dim`` and ``num_global_key_value_heads``; transformers 5.19 writes
    ``per_layer_config`` instead.
    """
    stated = fields.mapping("per_layer_config")
    wide_kv = fields.optional_integer("num_global_key_value_heads", limit="heads")
    size = fields.integer("global_head_dim", 512, limit="width")
    if stated is None:
        kv_heads = wide_kv if k_is_v and wide_kv else sliding.kv_heads
        return Heads(sliding.hidden, sliding.heads, kv_heads, size)
    wanted = {i for i, kind in enumerate(kinds) if kind == "full_attention"}
    found = list(stated.values())
    if (
        {int(key) for key in stated if key.isdecimal() and len(key) < 5} != wanted
        or len(stated) != len(wanted)
        or any(value != found[0] for value in found)
        or not isinstance(found[0], dict)
        or not found[0].keys() <= {"head_dim", "num_key_value_heads"}
    ):
        raise UnsupportedArchitecture(
            f"{shown(stated)} does not state the same head_dim and num_key_value_heads for every layer with "
            "full attention",
            field="per_layer_config",
        )
    own = Fields(found[0])
    return Heads(
        sliding.hidden, sliding.heads,
        own.integer("num_key_value_heads", sliding.kv_heads, limit="heads"),
        own.integer("head_dim", sliding.head_size, limit="width"),
    )  # fmt: skip


FAMILIES = {
    "gemma4_text": Family(build, final_norm="rms-one", hf="page sizes"),
}
