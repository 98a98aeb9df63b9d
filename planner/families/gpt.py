"""The GPT line: GPT-2, GPT-Neo, GPT-J, CodeGen, OPT, BLOOM, MPT. One function per family; shapes after
transformers 5.19, models/<family>/."""

from __future__ import annotations

from functools import partial
from typing import Any

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.common import Tensors
from tonnage.planner.families.family import GPT2_NAMES, QV, Family
from tonnage.planner.model.architecture import Architecture, Rotary
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.recipe import Heads

GPT_FIELDS = (
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "activation_function", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "n_ctx",
    "attention_softmax_in_fp32", "classifier_dropout", "resid_dropout", "embed_dropout",
)  # fmt: skip


def sizes(fields: Fields) -> tuple[Heads, int, int]:
    """(geometry with one KV head per head, layers, vocabulary)."""
    hidden = fields.integer("hidden_size", limit="width")
    heads = fields.integer("num_attention_heads", limit="heads")
    common.divisible(hidden, heads, fields.name("hidden_size"), fields.name("num_attention_heads"))
    return (
        Heads(hidden, heads, heads, hidden // heads),
        fields.integer("num_hidden_layers", limit="layers"),
        fields.integer("vocab_size", limit="vocab"),
    )


def finish(
    fields: Fields,
    model_type: str,
    name: str,
    t: Tensors,
    dims: Heads,
    layers: int,
    inner: int,
    vocab: int,
    **more: Any,
) -> Architecture:
    more.setdefault("gated", False)
    more.setdefault("cache", common.full_layers(layers, dims))
    cache = more.pop("cache")
    return common.decoder(
        fields, model_type, name, t, dims, cache, layers=layers, inner=inner, vocab=vocab, **more
    )


def gpt2(fields: Fields, model_type: str) -> Architecture:
    """Conv1D stores its matrices [in, out]; bitsandbytes turns them and replaces them as nn.Linear."""
    dims, layers, vocab = sizes(fields)
    h = dims.hidden
    positions = fields.integer("max_position_embeddings", limit="positions")
    inner = fields.integer("n_inner", 4 * h, limit="width")
    tied = fields.boolean("tie_word_embeddings", True)
    if fields.boolean("add_cross_attention", False):
        raise UnsupportedArchitecture("cross attention is not planned here", field="add_cross_attention")
    t = Tensors()
    t.vocabulary("transformer.wte", vocab, h)
    t.embedding("transformer.wpe", positions, h)
    for _, at in t.layers(layers, "transformer.h"):
        for name, into, out, role, dim in (
            ("attn.c_attn", h, 3 * h, "attention", 1), ("attn.c_proj", h, h, "attention", 0),
            ("mlp.c_fc", h, inner, "mlp", 1), ("mlp.c_proj", inner, h, "mlp", 0),
        ):  # fmt: skip
            part: Any = role
            t.add(f"{at}.{name}.weight", (into, out), part, "Conv1D", shard=dim)
            t.add(f"{at}.{name}.bias", (out,), part, "Conv1D", shard=0 if dim else None)
        t.norm(f"{at}.ln_1", h, "layer")
        t.norm(f"{at}.ln_2", h, "layer")
    t.norm("transformer.ln_f", h, "layer")
    t.head("lm_head", vocab, h, "transformer.wte.weight" if tied else None)
    return finish(
        fields, model_type, "GPT2LMHeadModel", t, dims, layers, inner, vocab, max_model_len=positions,
        position_field=fields.name("max_position_embeddings"),
    )  # fmt: skip


def gpt_neo(fields: Fields, model_type: str) -> Architecture:
    """Alternating global and local layers; the local ones see ``window_size`` tokens."""
    dims, layers, vocab = sizes(fields)
    h = dims.hidden
    positions = fields.integer("max_position_embeddings", 2048, limit="positions")
    inner = fields.integer("intermediate_size", 4 * h, limit="width")
    window = fields.integer("window_size", 256, limit="positions")
    tied = fields.boolean("tie_word_embeddings", True)
    kinds = _neo_kinds(fields, layers)
    t = Tensors()
    t.vocabulary("transformer.wte", vocab, h)
    t.embedding("transformer.wpe", positions, h)
    for _, at in t.layers(layers, "transformer.h"):
        t.attention(f"{at}.attn.attention", dims, out="out_proj", out_bias=True)
        t.buffer(f"{at}.attn.attention.bias", (1, 1, positions, positions), "GPTNeoSelfAttention", "bool")
        t.plain_mlp(f"{at}.mlp", h, inner, bias=True, names=("c_fc", "c_proj"))
        t.norm(f"{at}.ln_1", h, "layer")
        t.norm(f"{at}.ln_2", h, "layer")
    t.norm("transformer.ln_f", h, "layer")
    t.head("lm_head", vocab, h, "transformer.wte.weight" if tied else None)
    return finish(
        fields, model_type, "GPTNeoForCausalLM", t, dims, layers, inner, vocab, max_model_len=positions,
        cache=common.cache_layers(kinds, window, dims.kv_heads, dims.head_size),
    )  # fmt: skip


def _neo_kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    """``attention_types``: [[kinds], times], unrolled."""
    fields.ignore("attention_layers")
    value = fields.raw("attention_types")
    out: list[str] = []
    try:
        for kinds, times in value or [[["global", "local"], layers // 2]]:
            if type(times) is not int or not 0 <= times <= layers:
                raise TypeError
            out += list(kinds) * times
    except (TypeError, ValueError):
        raise ConfigError(f"{shown(value)} is not a list of [kinds, times]", field="attention_types") from None
    names = {"global": "full_attention", "local": "sliding_attention"}
    if len(out) != layers or not all(kind in names for kind in out):
        raise ConfigError(
            f"{shown(value)} does not name {layers} layers global or local", field="attention_types"
        )
    return tuple(names[kind] for kind in out)


def gptj(fields: Fields, model_type: str) -> Architecture:
    """GPT-J, and CodeGen, which fuses q, k and v."""
    dims, layers, vocab = sizes(fields)
    h = dims.hidden
    positions = fields.integer("max_position_embeddings", limit="positions")
    inner = fields.integer("n_inner", 4 * h, limit="width")
    rotary = fields.optional_integer("rotary_dim", 64, limit="width") or h
    tied = fields.boolean("tie_word_embeddings", False)
    t = Tensors()
    t.vocabulary("transformer.wte", vocab, h)
    for _, at in t.layers(layers, "transformer.h"):
        if model_type == "gptj":
            t.attention(f"{at}.attn", dims, out="out_proj")
        else:
            t.fused_attention(f"{at}.attn", dims, qkv="qkv_proj", out="out_proj")
        t.buffer(f"{at}.attn.embed_positions", (positions, rotary), "GPTJAttention", "float32")
        t.plain_mlp(f"{at}.mlp", h, inner, bias=True, names=("fc_in", "fc_out"))
        t.norm(f"{at}.ln_1", h, "layer")
    t.norm("transformer.ln_f", h, "layer")
    t.head("lm_head", vocab, h, "transformer.wte.weight" if tied else None, bias=True)
    name = "GPTJForCausalLM" if model_type == "gptj" else "CodeGenForCausalLM"
    return finish(
        fields, model_type, name, t, dims, layers, inner, vocab, max_model_len=positions,
        position_field=fields.name("max_position_embeddings"), rotary=Rotary(rotary, 1),
    )  # fmt: skip


def opt(fields: Fields, model_type: str) -> Architecture:
    """Learned positions with an offset of two; the 350M model projects its narrower embedding."""
    dims, layers, vocab = sizes(fields)
    h = dims.hidden
    positions = fields.integer("max_position_embeddings", 2048, limit="positions")
    inner = fields.integer("ffn_dim", limit="width")
    width = fields.integer("word_embed_proj_dim", h, limit="width")
    before = fields.boolean("do_layer_norm_before", True)
    bias = fields.boolean("enable_bias", True)
    affine = "layer" if fields.boolean("layer_norm_elementwise_affine", True) else "none"
    tied = fields.boolean("tie_word_embeddings", True)
    removed = fields.boolean("_remove_final_layer_norm", False)
    fields.ignore("layerdrop", "init_std", "dropout")
    t = Tensors()
    t.vocabulary("model.decoder.embed_tokens", vocab, width)
    t.embedding("model.decoder.embed_positions", positions + 2, h)
    if width != h:
        t.linear("model.decoder.project_in", h, width, "embedding")
        t.linear("model.decoder.project_out", width, h, "embedding")
    if before and not removed:
        t.norm("model.decoder.final_layer_norm", h, affine)
    for _, at in t.layers(layers, "model.decoder.layers"):
        t.attention(f"{at}.self_attn", dims, bias=bias, out_bias=bias, out="out_proj")
        t.plain_mlp(at, h, inner, bias=bias, names=("fc1", "fc2"))
        t.norm(f"{at}.self_attn_layer_norm", h, affine)
        t.norm(f"{at}.final_layer_norm", h, affine)
    t.head("lm_head", vocab, width, "model.decoder.embed_tokens.weight" if tied else None)
    return finish(fields, model_type, "OPTForCausalLM", t, dims, layers, inner, vocab, max_model_len=positions)


def bloom(fields: Fields, model_type: str) -> Architecture:
    """ALiBi: no position table, so any length; a norm behind the embedding."""
    dims, layers, vocab = sizes(fields)
    h = dims.hidden
    tied = fields.boolean("tie_word_embeddings", True)
    fields.ignore("apply_residual_connection_post_layernorm", "slow_but_exact", "masked_softmax_fusion")
    fields.ignore("offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "unk_token_id", "n_inner")
    t = Tensors()
    t.vocabulary("transformer.word_embeddings", vocab, h)
    t.norm("transformer.word_embeddings_layernorm", h, "layer")
    for _, at in t.layers(layers, "transformer.h"):
        t.fused_attention(
            f"{at}.self_attention", dims, qkv="query_key_value", out="dense", bias=True, out_bias=True
        )
        t.plain_mlp(f"{at}.mlp", h, 4 * h, bias=True, names=("dense_h_to_4h", "dense_4h_to_h"))
        t.norm(f"{at}.input_layernorm", h, "layer")
        t.norm(f"{at}.post_attention_layernorm", h, "layer")
    t.norm("transformer.ln_f", h, "layer")
    t.head("lm_head", vocab, h, "transformer.word_embeddings.weight" if tied else None)
    # ``seq_length`` is the training length; vLLM 0.32.0 takes 2048 where the file has none of its names
    stated = fields.optional_integer("seq_length", 2048, limit="positions") or 2048
    return finish(
        fields, model_type, "BloomForCausalLM", t, dims, layers, 4 * h, vocab, max_model_len=stated,
        position_field="seq_length",
    )  # fmt: skip


def mpt(fields: Fields, model_type: str) -> Architecture:
    """ALiBi, no biases. The attention's own options are in ``attn_config``."""
    dims, layers, vocab = sizes(fields)
    h = dims.hidden
    inner = 4 * h
    if fields.integer("expansion_ratio", 4, limit="width") != 4:  # engines read it, transformers does not
        raise UnsupportedArchitecture("is not 4, which is all transformers knows", field="expansion_ratio")
    tied = fields.boolean("tie_word_embeddings", True)
    if not fields.boolean("no_bias", True):
        raise UnsupportedArchitecture("false is not known", field="no_bias")
    attention = fields.mapping("attn_config") or {}
    kv_heads = attention.get("kv_n_heads") or dims.heads
    if attention.get("attn_type") == "multiquery_attention":
        kv_heads = 1
    if attention.get("qk_ln") or kv_heads != dims.heads or attention.get("alibi") is False:
        raise UnsupportedArchitecture(
            "qk_ln, grouped heads and learned positions are not known", field="attn_config"
        )
    fields.ignore(
        "learned_pos_emb", "norm_type", "embedding_fraction", "emb_pdrop", "logit_scale", "ffn_config"
    )
    t = Tensors()
    t.vocabulary("transformer.wte", vocab, h)
    for _, at in t.layers(layers, "transformer.blocks"):
        t.fused_attention(f"{at}.attn", dims, qkv="Wqkv", out="out_proj")
        t.plain_mlp(f"{at}.ffn", h, inner)
        t.norm(f"{at}.norm_1", h, "layer-weight")
        t.norm(f"{at}.norm_2", h, "layer-weight")
    t.norm("transformer.norm_f", h, "layer-weight")
    t.head("lm_head", vocab, h, "transformer.wte.weight" if tied else None)
    length = fields.integer("max_seq_len", 2048, limit="positions")
    return finish(
        fields, model_type, "MptForCausalLM", t, dims, layers, inner, vocab, max_model_len=length,
        position_field="max_seq_len",
    )  # fmt: skip


_family = partial(Family, ignored=GPT_FIELDS)
FAMILIES = {
    "gpt2": _family(gpt2, aliases=GPT2_NAMES, lora=("c_attn",), ia3=("c_attn", "mlp.c_proj"), hf="served"),
    "gpt_neo": _family(
        gpt_neo, aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
        hf="own attention",
    ),
    "gptj": _family(gptj, aliases=GPT2_NAMES, hf="own attention"),
    "codegen": _family(gptj, aliases=GPT2_NAMES, hf="own attention"),
    "opt": _family(opt, lora=QV, ia3=("q_proj", "k_proj", "fc2"), hf="served"),
    "bloom": _family(
        bloom,
        aliases={"hidden_size": "n_embed", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
        lora=("query_key_value",), ia3=("query_key_value", "mlp.dense_4h_to_h"), hf="alibi",
    ),
    "mpt": _family(
        mpt,
        aliases={"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
        hf="alibi",
    ),
}  # fmt: skip
