"""Recurrent decoders: RecurrentGemma (Griffin), RWKV-4 and xLSTM. Shapes follow transformers 5.19, models/."""

from __future__ import annotations

from tonnage.planner.errors import ConfigError
from tonnage.planner.families import common
from tonnage.planner.families.family import Family
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture, CacheLayer, Rotary, StateTensor
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.recipe import Heads


def recurrent_gemma(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a RecurrentGemma model.

    By default, two recurrent layers (RG-LRU) alternate with one sliding-attention layer.
    """
    dims = common.heads_of(fields)
    layers, vocab = common.layers_and_vocab(fields)
    double = fields.integer("intermediate_size", limit="width")
    common.divisible(double, 2, "intermediate_size", "gate and up")
    inner = double // 2
    width = fields.integer("lru_width", dims.hidden, limit="width")
    kernel = fields.integer("conv1d_width", 4, limit="width")
    window = fields.integer("attention_window_size", 2048, limit="positions")
    bias = fields.boolean("attention_bias", False)
    tied = fields.boolean("tie_word_embeddings", True)
    pattern = fields.raw("block_types") or ["recurrent", "recurrent", "attention"]
    if not isinstance(pattern, list) or not all(kind in ("recurrent", "attention") for kind in pattern):
        raise ConfigError(
            f"{shown(pattern)} is not a list whose items are 'recurrent' or 'attention'", field="block_types"
        )
    fields.ignore("logits_soft_cap", "w_init_variance_scale", "final_w_init_variance_scale", "_block_types")
    blocks = dims.heads
    common.divisible(width, blocks, "lru_width", "num_attention_heads")
    per = width // blocks
    states = (StateTensor("conv", (width, kernel - 1)), StateTensor("rg_lru", (width,), "float32"))
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, dims.hidden)
    cache = []
    for i, at in t.layers(layers, "model.layers"):
        block = f"{at}.temporal_block"
        if pattern[i % len(pattern)] == "attention":
            t.attention(block, dims, bias=bias, out_bias=True)
            t.rotary(int(dims.head_size * common.rotary_share(fields, 0.5)), f"{block}.rotary_emb.")
            cache.append(CacheLayer(i, "sliding", window, dims.kv_heads, dims.head_size))
        else:
            for name, out, into in (
                ("linear_y", width, dims.hidden), ("linear_x", width, dims.hidden),
                ("linear_out", dims.hidden, width),
            ):  # fmt: skip
                t.linear(f"{block}.{name}", out, into, "mixer", bias=True)
            t.add(f"{block}.conv_1d.weight", (width, 1, kernel), "mixer", "Conv1d")
            t.add(f"{block}.conv_1d.bias", (width,), "mixer", "Conv1d")
            lru = f"{block}.rg_lru"
            t.add(f"{lru}.recurrent_param", (width,), "mixer", "RecurrentGemmaRglru")
            for name in ("input_gate", "recurrent_gate"):
                t.add(f"{lru}.{name}_weight", (blocks, per, per), "mixer", "RecurrentGemmaRglru")
                t.add(f"{lru}.{name}_bias", (blocks, per), "mixer", "RecurrentGemmaRglru")
            cache.append(CacheLayer(i, "state", None, 0, 0, states=states))
        t.gated_mlp(f"{at}.mlp_block", dims.hidden, inner, bias=True)
        t.norms(at, dims.hidden, "temporal_pre_norm", "channel_pre_norm")
    t.close("model.final_norm", "model.embed_tokens", vocab, dims.hidden, tied)
    t.buffer("model.normalizer", (), "RecurrentGemmaModel", "bfloat16")
    fields.ignore("rope_parameters", "rope_scaling")
    return common.decoder(
        fields, model_type, "RecurrentGemmaForCausalLM", t, dims, tuple(cache), layers=layers, inner=inner,
        vocab=vocab, rotary=Rotary(dims.head_size // 2, 1), max_model_len=8192,
        position_field="none: 8,192 tokens were trained on (RecurrentGemma paper)",
    )  # fmt: skip


def rwkv(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of an RWKV-4 model from its checked config.

    Each layer keeps five vectors per sequence, three of them in fp32.
    """
    hidden = fields.integer("hidden_size", limit="width")
    layers, vocab = common.layers_and_vocab(fields)
    width = fields.integer("attention_hidden_size", hidden, limit="width")
    inner = fields.integer("intermediate_size", 4 * hidden, limit="width")
    tied = fields.boolean("tie_word_embeddings", False)
    fields.ignore("rescale_every")
    states = tuple(
        [StateTensor(f"shift_{name}", (hidden,)) for name in ("ffn", "attention")]
        + [StateTensor(name, (width,), "float32") for name in ("numerator", "denominator", "maximum")]
    )
    t = Tensors()
    t.vocabulary("rwkv.embeddings", vocab, hidden)
    for i, at in t.layers(layers, "rwkv.blocks"):
        if i == 0:
            t.norm(f"{at}.pre_ln", hidden, "layer")
        t.norms(at, hidden, "ln1", "ln2", kind="layer")
        for name in ("time_decay", "time_first"):
            t.add(f"{at}.attention.{name}", (width,), "mixer", "RwkvSelfAttention")
        for name in ("key", "value", "receptance"):
            t.add(f"{at}.attention.time_mix_{name}", (1, 1, hidden), "mixer", "RwkvSelfAttention")
            t.linear(f"{at}.attention.{name}", width, hidden, "mixer")
        t.linear(f"{at}.attention.output", hidden, width, "mixer")
        for name in ("key", "receptance"):
            t.add(f"{at}.feed_forward.time_mix_{name}", (1, 1, hidden), "mixer", "RwkvFeedForward")
        t.linear(f"{at}.feed_forward.key", inner, hidden, "mlp")
        t.linear(f"{at}.feed_forward.receptance", hidden, hidden, "mlp")
        t.linear(f"{at}.feed_forward.value", hidden, inner, "mlp")
    t.norm("rwkv.ln_out", hidden, "layer")
    t.head("head", vocab, hidden, "rwkv.embeddings.weight" if tied else None)
    return common.decoder(
        fields, model_type, "RwkvForCausalLM", t, Heads(hidden, 1, 1, 1),
        tuple(CacheLayer(i, "state", None, 0, 0, states=states) for i in range(layers)), layers=layers,
        inner=inner, vocab=vocab, max_model_len=fields.integer("context_length", 1024, limit="positions"),
        position_field="context_length", gated=False,
    )  # fmt: skip


def xlstm(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of an xLSTM model of mLSTM blocks.

    The state of a block is a matrix, a vector and a scalar per head.
    """
    hidden = fields.integer("hidden_size", limit="width")
    layers, vocab = common.layers_and_vocab(fields)
    heads = fields.integer("num_heads", 8, limit="heads")
    bias = fields.boolean("use_bias", False)
    qk = fields.share("qk_dim_factor", 0.5, hidden)
    value = fields.share("v_dim_factor", 1.0, hidden)
    multiple = fields.integer("ffn_round_up_to_multiple_of", 64, limit="width")
    inner = multiple * -(-fields.share("ffn_proj_factor", 2.667, hidden) // multiple)
    common.only(fields, weight_mode="single")
    for size in (qk, value):
        common.divisible(size, heads, "hidden_size x qk_dim_factor", "num_heads")
    dtype = common.dtype_of(fields, "inference_state_dtype") or "float32"
    out_norm = fields.boolean("add_out_norm", True)
    tied = fields.boolean("tie_word_embeddings", False)
    for name, other in (("embedding_dim", "hidden_size"), ("num_blocks", "num_hidden_layers")):
        stated, same = fields.optional_integer(name, limit="width"), fields.raw(other)
        if stated not in (None, same):
            raise ConfigError(f"{stated} contradicts {other} = {same}", field=name)
    fields.ignore(
        "norm_reduction_force_float32", "chunkwise_kernel", "sequence_kernel", "step_kernel", "mode",
        "chunk_size",
        "return_last_states", "autocast_kernel_dtype", "eps", "gate_soft_cap", "output_logit_soft_cap",
        "max_inference_chunksize",
    )  # fmt: skip
    states = (
        StateTensor("c", (heads, qk // heads, value // heads), dtype),
        StateTensor("n", (heads, qk // heads), dtype),
        StateTensor("m", (heads, 1), dtype),
    )  # fmt: skip
    t = Tensors()
    t.vocabulary("backbone.embeddings", vocab, hidden)
    for _, at in t.layers(layers, "backbone.blocks"):
        t.norm(f"{at}.norm_mlstm", hidden)
        m = f"{at}.mlstm_layer"
        for name, rows in (("q", qk), ("k", qk), ("v", value), ("ogate_preact", value)):
            t.linear(f"{m}.{name}", rows, hidden, "mixer", bias=bias)
        for name in ("igate_preact", "fgate_preact"):
            t.linear(f"{m}.{name}", heads, hidden, "mixer", bias=True)
        t.norm(f"{m}.multihead_norm", value, "layer" if bias else "rms")
        t.linear(f"{m}.out_proj", hidden, value, "mixer", bias=bias)
        t.norm(f"{at}.norm_ffn", hidden)
        t.gated_mlp(f"{at}.ffn", hidden, inner, bias=bias, names=("proj_up_gate", "proj_up", "proj_down"))
    if out_norm:
        t.norm("backbone.out_norm", hidden)
    t.head("lm_head", vocab, hidden, "backbone.embeddings.weight" if tied else None)
    return common.decoder(
        fields, model_type, "xLSTMForCausalLM", t, Heads(hidden, heads, heads, qk // heads),
        tuple(CacheLayer(i, "state", None, 0, 0, states=states) for i in range(layers)), layers=layers,
        inner=inner, vocab=vocab, max_model_len=1 << 31, position_field="none: a state has no length",
    )  # fmt: skip


FAMILIES = {
    "recurrent_gemma": Family(recurrent_gemma, hf="recurrent"),
    "rwkv": Family(rwkv, hf="recurrent"),
    "xlstm": Family(xlstm, hf="recurrent"),
}
