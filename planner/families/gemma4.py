"""Gemma 4 (text): full layers have their own head size and KV heads, and may use K as V; experts beside the
MLP; per-layer embeddings and shared KV layers in the small models. Shapes after transformers 5.19 / 5.23,
models/gemma4/."""

from __future__ import annotations

from tonnage.planner.architecture import Architecture, CacheLayer, Rotary
from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.common import Heads, Tensors
from tonnage.planner.fields import Fields, shown


def build(fields: Fields, model_type: str) -> Architecture:
    hidden = fields.integer("hidden_size", 2304, limit="width")
    heads = fields.integer("num_attention_heads", 8, limit="heads")
    kv_heads = fields.integer("num_key_value_heads", 4, limit="heads")
    sliding = Heads(hidden, heads, kv_heads, fields.integer("head_dim", 256, limit="width"))
    k_is_v = fields.boolean("attention_k_eq_v", False)
    wide_kv = fields.optional_integer("num_global_key_value_heads", limit="heads") or kv_heads
    full = Heads(
        hidden, heads, wide_kv if k_is_v else kv_heads, fields.integer("global_head_dim", 512, limit="width")
    )
    for own in (sliding, full):
        common.divisible(own.heads, own.kv_heads, "num_attention_heads", "num_key_value_heads")
    layers = fields.integer("num_hidden_layers", 30, limit="layers")
    vocab = fields.integer("vocab_size", 262_144, limit="vocab")
    inner = fields.integer("intermediate_size", 9216, limit="width")
    bias = fields.boolean("attention_bias", False)
    tied = fields.boolean("tie_word_embeddings", True)
    moe = fields.boolean("enable_moe_block", False)
    count = fields.integer("num_experts", limit="width") if moe else 0
    chosen = fields.integer("top_k_experts", limit="width") if moe else 0
    expert = fields.integer("moe_intermediate_size", limit="width") if moe else 0
    for name in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if fields.raw(name):
            raise UnsupportedArchitecture(f"{shown(fields.raw(name))} is not planned yet", field=name)
    if fields.boolean("use_double_wide_mlp", False):
        raise UnsupportedArchitecture("true is not planned yet", field="use_double_wide_mlp")
    fields.ignore(
        "vocab_size_per_layer_input", "use_bidirectional_attention", "num_experts", "top_k_experts",
        "moe_intermediate_size", "rope_parameters",
    )  # fmt: skip
    kinds = fields.layer_types(layers)
    if kinds is None:  # five sliding layers, then a full one; the last is always full (configuration_gemma4.py)
        kinds = tuple(
            "sliding_attention" if (i + 1) % 6 and i != layers - 1 else "full_attention" for i in range(layers)
        )
    window = fields.integer("sliding_window", 512, limit="positions")
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, hidden)
    t.buffer("model.embed_tokens.embed_scale", (), "ScaledWordEmbedding", None)
    cache = []
    for i, kind in enumerate(kinds):
        t.layer = i
        at = f"model.layers.{i}"
        own = full if kind == "full_attention" else sliding
        _attention(t, f"{at}.self_attn", own, bias, value=not (k_is_v and own is full))
        cache.append(
            CacheLayer(i, "full", None, own.kv_heads, own.head_size) if own is full
            else CacheLayer(i, "sliding", window, own.kv_heads, own.head_size)
        )  # fmt: skip
        t.gated_mlp(f"{at}.mlp", hidden, inner)
        norms = [
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ]
        if moe:
            t.add(f"{at}.router.scale", (hidden,), "router", "Gemma4TextRouter")
            t.add(f"{at}.router.per_expert_scale", (count,), "router", "Gemma4TextRouter")
            t.router(f"{at}.router.proj", count, hidden, linear=True)
            t.experts(f"{at}.experts", count, hidden, expert)
            norms += [
                "post_feedforward_layernorm_1",
                "post_feedforward_layernorm_2",
                "pre_feedforward_layernorm_2",
            ]
        for name in norms:
            t.norm(f"{at}.{name}", hidden)
        t.buffer(f"{at}.layer_scalar", (1,), "Gemma4TextDecoderLayer", None)
    t.layer = None
    t.norm("model.norm", hidden)
    t.head("lm_head", vocab, hidden, "model.embed_tokens.weight" if tied else None)
    for kind in dict.fromkeys(kinds):
        size = full.head_size if kind == "full_attention" else sliding.head_size
        t.rotary(size, f"model.rotary_emb.{kind}_")
    if not cache:
        raise ConfigError("no layers", field="num_hidden_layers")
    return common.decoder(
        fields, model_type, "Gemma4ForCausalLM", t, sliding, tuple(cache), layers=layers,
        inner=inner + chosen * expert, vocab=vocab, rotary=Rotary(sliding.head_size, 2), experts=count,
        experts_per_token=chosen,
        max_model_len=fields.integer("max_position_embeddings", 131_072, limit="positions"),
    )  # fmt: skip


def _attention(t: Tensors, at: str, dims: Heads, bias: bool, value: bool) -> None:
    """``value`` False: K is used as V, there is no v_proj (both are cached all the same)."""
    kv = dims.kv_heads * dims.head_size
    t.linear(f"{at}.q_proj", dims.heads * dims.head_size, dims.hidden, bias=bias, shard="column")
    for name in ("k_proj", "v_proj") if value else ("k_proj",):
        t.linear(f"{at}.{name}", kv, dims.hidden, bias=bias, shard="column", kv=(kv, dims.kv_heads))
    t.linear(f"{at}.o_proj", dims.hidden, dims.heads * dims.head_size, bias=bias, shard="row")
    t.norm(f"{at}.q_norm", dims.head_size)
    t.norm(f"{at}.k_norm", dims.head_size)
