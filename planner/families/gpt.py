"""The GPT line: GPT-2, GPT-Neo, GPT-J, CodeGen, OPT, BLOOM, MPT, and remote-code models of the same time
(Qwen 1, ChatGLM, EXAONE 3, Phi-2's first release, Phi-3-small, MiMo, Nemotron-NAS). One function per family.

Shapes after transformers 5.19, models/<family>/; of remote code after the published tensors' names and the
checkpoint sizes in tests/data/configs/checkpoint_sizes.tsv.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tonnage.planner.architecture import Architecture, CacheLayer, Rotary
from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.common import Heads, Tensors
from tonnage.planner.fields import Fields, shown

_SUMMARY = (
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "activation_function", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "n_ctx",
    "attention_softmax_in_fp32", "classifier_dropout", "resid_dropout", "embed_dropout",
)  # fmt: skip


def build(fields: Fields, model_type: str) -> Architecture:
    fields.ignore(*_SUMMARY)
    return _BUILDERS[model_type](fields, model_type)


def _sizes(fields: Fields) -> tuple[Heads, int, int]:
    """(geometry with one KV head per head, layers, vocabulary)."""
    hidden = fields.integer("hidden_size", limit="width")
    heads = fields.integer("num_attention_heads", limit="heads")
    common.divisible(hidden, heads, fields.name("hidden_size"), fields.name("num_attention_heads"))
    return (
        Heads(hidden, heads, heads, hidden // heads),
        fields.integer("num_hidden_layers", limit="layers"),
        fields.integer("vocab_size", limit="vocab"),
    )


def _finish(
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
    """Conv1D stores its matrices [in, out]; quantizers that replace nn.Linear do not touch it."""
    dims, layers, vocab = _sizes(fields)
    h = dims.hidden
    positions = fields.integer("max_position_embeddings", limit="positions")
    inner = fields.integer("n_inner", 4 * h, limit="width")
    tied = fields.boolean("tie_word_embeddings", True)
    if fields.boolean("add_cross_attention", False):
        raise UnsupportedArchitecture("cross attention is not planned here", field="add_cross_attention")
    t = Tensors()
    t.vocabulary("transformer.wte", vocab, h)
    t.embedding("transformer.wpe", positions, h)
    for i in range(layers):
        t.layer = i
        at = f"transformer.h.{i}"
        for name, into, out, role, dim in (
            ("attn.c_attn", h, 3 * h, "attention", 1), ("attn.c_proj", h, h, "attention", 0),
            ("mlp.c_fc", h, inner, "mlp", 1), ("mlp.c_proj", inner, h, "mlp", 0),
        ):  # fmt: skip
            part: Any = role
            t.add(f"{at}.{name}.weight", (into, out), part, "Conv1D", shard=dim)
            t.add(f"{at}.{name}.bias", (out,), part, "Conv1D", shard=0 if dim else None)
        t.norm(f"{at}.ln_1", h, "layer")
        t.norm(f"{at}.ln_2", h, "layer")
    t.layer = None
    t.norm("transformer.ln_f", h, "layer")
    t.head("lm_head", vocab, h, "transformer.wte.weight" if tied else None)
    return _finish(
        fields, model_type, "GPT2LMHeadModel", t, dims, layers, inner, vocab, max_model_len=positions,
        position_field=fields.name("max_position_embeddings"),
    )  # fmt: skip


def gpt_neo(fields: Fields, model_type: str) -> Architecture:
    """Alternating global and local layers; the local ones see ``window_size`` tokens."""
    dims, layers, vocab = _sizes(fields)
    h = dims.hidden
    positions = fields.integer("max_position_embeddings", 2048, limit="positions")
    inner = fields.integer("intermediate_size", 4 * h, limit="width")
    window = fields.integer("window_size", 256, limit="positions")
    tied = fields.boolean("tie_word_embeddings", True)
    kinds = _neo_kinds(fields, layers)
    t = Tensors()
    t.vocabulary("transformer.wte", vocab, h)
    t.embedding("transformer.wpe", positions, h)
    for i in range(layers):
        t.layer = i
        at = f"transformer.h.{i}"
        t.attention(f"{at}.attn.attention", dims, out="out_proj", out_bias=True)
        t.buffer(f"{at}.attn.attention.bias", (1, 1, positions, positions), "GPTNeoSelfAttention", "bool")
        t.plain_mlp(f"{at}.mlp", h, inner, bias=True, names=("c_fc", "c_proj"))
        t.norm(f"{at}.ln_1", h, "layer")
        t.norm(f"{at}.ln_2", h, "layer")
    t.layer = None
    t.norm("transformer.ln_f", h, "layer")
    t.head("lm_head", vocab, h, "transformer.wte.weight" if tied else None)
    return _finish(
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
    dims, layers, vocab = _sizes(fields)
    h = dims.hidden
    positions = fields.integer("max_position_embeddings", limit="positions")
    inner = fields.integer("n_inner", 4 * h, limit="width")
    rotary = fields.optional_integer("rotary_dim", 64, limit="width") or h
    tied = fields.boolean("tie_word_embeddings", False)
    t = Tensors()
    t.vocabulary("transformer.wte", vocab, h)
    for i in range(layers):
        t.layer = i
        at = f"transformer.h.{i}"
        if model_type == "gptj":
            t.attention(f"{at}.attn", dims, out="out_proj")
        else:
            t.fused_attention(f"{at}.attn", dims, qkv="qkv_proj", out="out_proj")
        t.buffer(f"{at}.attn.embed_positions", (positions, rotary), "GPTJAttention", "float32")
        t.plain_mlp(f"{at}.mlp", h, inner, bias=True, names=("fc_in", "fc_out"))
        t.norm(f"{at}.ln_1", h, "layer")
    t.layer = None
    t.norm("transformer.ln_f", h, "layer")
    t.head("lm_head", vocab, h, "transformer.wte.weight" if tied else None, bias=True)
    name = "GPTJForCausalLM" if model_type == "gptj" else "CodeGenForCausalLM"
    return _finish(
        fields, model_type, name, t, dims, layers, inner, vocab, max_model_len=positions,
        position_field=fields.name("max_position_embeddings"), rotary=Rotary(rotary, 1),
    )  # fmt: skip


def opt(fields: Fields, model_type: str) -> Architecture:
    """Learned positions with an offset of two; the 350M model projects its narrower embedding."""
    dims, layers, vocab = _sizes(fields)
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
    for i in range(layers):
        t.layer = i
        at = f"model.decoder.layers.{i}"
        t.attention(f"{at}.self_attn", dims, bias=bias, out_bias=bias, out="out_proj")
        t.plain_mlp(at, h, inner, bias=bias, names=("fc1", "fc2"))
        t.norm(f"{at}.self_attn_layer_norm", h, affine)
        t.norm(f"{at}.final_layer_norm", h, affine)
    t.layer = None
    t.head("lm_head", vocab, width, "model.decoder.embed_tokens.weight" if tied else None)
    return _finish(fields, model_type, "OPTForCausalLM", t, dims, layers, inner, vocab, max_model_len=positions)


def bloom(fields: Fields, model_type: str) -> Architecture:
    """ALiBi: no position table, so any length; a norm behind the embedding."""
    dims, layers, vocab = _sizes(fields)
    h = dims.hidden
    tied = fields.boolean("tie_word_embeddings", True)
    fields.ignore("apply_residual_connection_post_layernorm", "slow_but_exact", "masked_softmax_fusion")
    fields.ignore("offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "unk_token_id", "n_inner")
    t = Tensors()
    t.vocabulary("transformer.word_embeddings", vocab, h)
    t.norm("transformer.word_embeddings_layernorm", h, "layer")
    for i in range(layers):
        t.layer = i
        at = f"transformer.h.{i}"
        t.fused_attention(
            f"{at}.self_attention", dims, qkv="query_key_value", out="dense", bias=True, out_bias=True
        )
        t.plain_mlp(f"{at}.mlp", h, 4 * h, bias=True, names=("dense_h_to_4h", "dense_4h_to_h"))
        t.norm(f"{at}.input_layernorm", h, "layer")
        t.norm(f"{at}.post_attention_layernorm", h, "layer")
    t.layer = None
    t.norm("transformer.ln_f", h, "layer")
    t.head("lm_head", vocab, h, "transformer.word_embeddings.weight" if tied else None)
    # ``seq_length`` is the training length; vLLM 0.32.0 takes 2048 where the file has none of its names
    stated = fields.optional_integer("seq_length", 2048, limit="positions") or 2048
    return _finish(
        fields, model_type, "BloomForCausalLM", t, dims, layers, 4 * h, vocab, max_model_len=stated,
        position_field="seq_length",
    )  # fmt: skip


def mpt(fields: Fields, model_type: str) -> Architecture:
    """ALiBi, no biases. The attention's own options are in ``attn_config``."""
    dims, layers, vocab = _sizes(fields)
    h = dims.hidden
    inner = fields.integer("expansion_ratio", 4, limit="width") * h
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
    for i in range(layers):
        t.layer = i
        at = f"transformer.blocks.{i}"
        t.fused_attention(f"{at}.attn", dims, qkv="Wqkv", out="out_proj")
        t.plain_mlp(f"{at}.ffn", h, inner)
        t.norm(f"{at}.norm_1", h, "layer-weight")
        t.norm(f"{at}.norm_2", h, "layer-weight")
    t.layer = None
    t.norm("transformer.norm_f", h, "layer-weight")
    t.head("lm_head", vocab, h, "transformer.wte.weight" if tied else None)
    length = fields.integer("max_seq_len", 2048, limit="positions")
    return _finish(
        fields, model_type, "MptForCausalLM", t, dims, layers, inner, vocab, max_model_len=length,
        position_field="max_seq_len",
    )  # fmt: skip


def qwen(fields: Fields, model_type: str) -> Architecture:
    """Qwen 1 (remote code): ``intermediate_size`` counts gate and up together."""
    dims, layers, vocab = _sizes(fields)
    size = fields.integer("kv_channels", dims.head_size, limit="width")
    dims = Heads(dims.hidden, dims.heads, dims.heads, size)
    double = fields.integer("intermediate_size", limit="width")
    common.divisible(double, 2, "intermediate_size", "gate and up")
    inner = double // 2
    tied = fields.boolean("tie_word_embeddings", False)
    bias = not fields.boolean("no_bias", True)
    if bias:
        raise UnsupportedArchitecture("false is not known", field="no_bias")
    fields.ignore(
        "padded_vocab_size", "rotary_emb_base", "use_dynamic_ntk", "use_flash_attn", "use_logn_attn",
        "emb_dropout_prob",
        "softmax_in_fp32", "use_cache_kernel", "use_cache_quantization", "onnx_safe", "seq_length",
    )  # fmt: skip
    t = Tensors()
    t.vocabulary("transformer.wte", vocab, dims.hidden)
    for i in range(layers):
        t.layer = i
        at = f"transformer.h.{i}"
        t.fused_attention(f"{at}.attn", dims, qkv="c_attn", out="c_proj", bias=True)
        t.gated_mlp(f"{at}.mlp", dims.hidden, inner, names=("w1", "w2", "c_proj"))
        t.norm(f"{at}.ln_1", dims.hidden)
        t.norm(f"{at}.ln_2", dims.hidden)
    t.layer = None
    t.norm("transformer.ln_f", dims.hidden)
    t.head("lm_head", vocab, dims.hidden, "transformer.wte.weight" if tied else None)
    return _finish(
        fields, model_type, "QWenLMHeadModel", t, dims, layers, inner, vocab, gated=True,
        rotary=Rotary(dims.head_size, 1),
    )  # fmt: skip


def chatglm(fields: Fields, model_type: str) -> Architecture:
    """ChatGLM 2 and 3, GLM-4-9B (remote code)."""
    hidden = fields.integer("hidden_size", limit="width")
    heads = fields.integer("num_attention_heads", limit="heads")
    groups = fields.integer("multi_query_group_num", 1, limit="heads")
    kv_heads = groups if fields.boolean("multi_query_attention", False) else heads
    common.divisible(heads, kv_heads, "num_attention_heads", "multi_query_group_num")
    dims = Heads(hidden, heads, kv_heads, fields.integer("kv_channels", hidden // heads, limit="width"))
    layers = fields.integer("num_layers", limit="layers")
    vocab = fields.integer("padded_vocab_size", limit="vocab")
    inner = fields.integer("ffn_hidden_size", limit="width")
    linear_bias = fields.boolean("add_bias_linear", False)
    qkv_bias = fields.boolean("add_qkv_bias", False) or linear_bias
    norm = "rms" if fields.boolean("rmsnorm", True) else "layer"
    tied = fields.boolean("tie_word_embeddings", False)
    last = fields.boolean("post_layer_norm", True)
    if fields.raw("pre_seq_len"):
        raise UnsupportedArchitecture("a prefix encoder is not planned", field="pre_seq_len")
    fields.ignore(
        "apply_query_key_layer_scaling", "apply_residual_connection_post_layernorm", "bias_dropout_fusion",
        "fp32_residual_connection", "original_rope", "rope_ratio", "hidden_dropout", "num_hidden_layers",
        "vocab_size",
        "prefix_projection", "quantization_bit",
    )  # fmt: skip
    t = Tensors()
    t.vocabulary("transformer.embedding.word_embeddings", vocab, hidden)
    for i in range(layers):
        t.layer = i
        at = f"transformer.encoder.layers.{i}"
        t.norm(f"{at}.input_layernorm", hidden, norm)
        t.fused_attention(
            f"{at}.self_attention",
            dims,
            qkv="query_key_value",
            out="dense",
            bias=qkv_bias,
            out_bias=linear_bias,
        )
        t.norm(f"{at}.post_attention_layernorm", hidden, norm)
        names = ("dense_h_to_4h", "dense_4h_to_h")
        t.plain_mlp(f"{at}.mlp", hidden, inner, bias=linear_bias, names=names, fused_gate=True)
    t.layer = None
    if last:
        t.norm("transformer.encoder.final_layernorm", hidden, norm)
    name = "transformer.embedding.word_embeddings.weight"
    t.head("transformer.output_layer", vocab, hidden, name if tied else None)
    rotary = Rotary(dims.head_size // 2, 1)
    t.buffer("transformer.rotary_pos_emb.inv_freq", (rotary.dim // 2,), "RotaryEmbedding", None)
    return _finish(
        fields, model_type, "ChatGLMModel", t, dims, layers, inner, vocab, gated=True, rotary=rotary,
        max_model_len=fields.integer("seq_length", limit="positions"), position_field="seq_length",
    )  # fmt: skip


def exaone(fields: Fields, model_type: str) -> Architecture:
    """EXAONE 3 (remote code): Llama's shapes under GPT-2's names."""
    dims = common.heads_of(fields)
    layers = fields.integer("num_hidden_layers", limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
    inner = fields.integer("intermediate_size", limit="width")
    tied = fields.boolean("tie_word_embeddings", False)
    t = Tensors()
    t.vocabulary("transformer.wte", vocab, dims.hidden)
    for i in range(layers):
        t.layer = i
        at = f"transformer.h.{i}"
        t.attention(f"{at}.attn.attention", dims, out="out_proj")
        t.gated_mlp(f"{at}.mlp", dims.hidden, inner, names=("c_fc_0", "c_fc_1", "c_proj"))
        t.norm(f"{at}.ln_1", dims.hidden)
        t.norm(f"{at}.ln_2", dims.hidden)
    t.layer = None
    t.norm("transformer.ln_f", dims.hidden)
    t.head("lm_head", vocab, dims.hidden, "transformer.wte.weight" if tied else None)
    t.rotary(dims.head_size, "transformer.rotary.")
    return _finish(
        fields, model_type, "ExaoneForCausalLM", t, dims, layers, inner, vocab, gated=True,
        rotary=Rotary(dims.head_size, 1),
    )  # fmt: skip


def mimo(fields: Fields, model_type: str) -> Architecture:
    """MiMo-7B (remote code): Qwen2's shapes and ``num_nextn_predict_layers`` layers for speculation, which its
    class always builds."""
    dims = common.heads_of(fields)
    layers = fields.integer("num_hidden_layers", limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
    inner = fields.integer("intermediate_size", limit="width")
    bias = fields.boolean("attention_bias", True)
    extra = fields.integer("num_nextn_predict_layers", 0, limit="layers", minimum=0)
    tied = fields.boolean("tie_word_embeddings", False)
    kinds, window = common.kinds_of(fields, "qwen", layers)
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, dims.hidden)
    for i in range(layers + extra):
        t.layer = i if i < layers else None
        at = f"model.layers.{i}" if i < layers else f"model.mtp_layers.{i - layers}"
        t.attention(f"{at}.self_attn", dims, bias=bias)
        t.gated_mlp(f"{at}.mlp", dims.hidden, inner)
        t.norm(f"{at}.input_layernorm", dims.hidden)
        t.norm(f"{at}.post_attention_layernorm", dims.hidden)
        if i >= layers:
            for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
                t.norm(f"{at}.{name}", dims.hidden)
            t.linear(f"{at}.input_proj", dims.hidden, 2 * dims.hidden, "mlp")
    t.layer = None
    t.norm("model.norm", dims.hidden)
    t.head("lm_head", vocab, dims.hidden, "model.embed_tokens.weight" if tied else None)
    t.rotary(dims.head_size, "model.rotary_emb.")
    return _finish(
        fields, model_type, "MiMoForCausalLM", t, dims, layers, inner, vocab, gated=True,
        rotary=Rotary(dims.head_size, 1),
        cache=common.cache_layers(kinds, window, dims.kv_heads, dims.head_size),
    )  # fmt: skip


def mixformer(fields: Fields, model_type: str) -> Architecture:
    """Phi-1.5 and Phi-2 as first published (remote code): a list of modules, one norm per parallel block."""
    dims, layers, vocab = _sizes(fields)
    h = dims.hidden
    kv_heads = fields.integer("n_head_kv", dims.heads, limit="heads")
    common.divisible(dims.heads, kv_heads, "n_head", "n_head_kv")
    dims = Heads(h, dims.heads, kv_heads, dims.head_size)
    inner = fields.integer("n_inner", 4 * h, limit="width")
    rotary = Rotary(fields.integer("rotary_dim", 32, limit="width"), 1)
    block = fields.mapping("architecture") or {}
    if block.get("block_cls", "parallel") != "parallel":
        raise UnsupportedArchitecture(
            f"{shown(block['block_cls'])} is not parallel", field="architecture.block_cls"
        )
    fields.ignore("flash_rotary", "fused_dense", "tie_word_embeddings", "phyagi_version")
    t = Tensors()
    t.vocabulary("layers.0.wte", vocab, h)
    for i in range(layers):
        t.layer = i
        at = f"layers.{i + 1}"
        t.norm(f"{at}.ln", h, "layer")
        t.fused_attention(f"{at}.mixer", dims, qkv="Wqkv", out="out_proj", bias=True, out_bias=True)
        t.plain_mlp(f"{at}.mlp", h, inner, bias=True, names=("fc1", "fc2"))
        t.buffer(f"{at}.mixer.rotary_emb.inv_freq", (rotary.dim // 2,), "RotaryEmbedding", "float32")
    t.layer = None
    t.norm(f"layers.{layers + 1}.ln", h, "layer")
    t.head(f"layers.{layers + 1}.linear", vocab, h, None, bias=True)
    return _finish(
        fields, model_type, "MixFormerSequentialForCausalLM", t, dims, layers, inner, vocab, rotary=rotary,
        max_model_len=fields.integer("max_position_embeddings", limit="positions"),
        position_field=fields.name("max_position_embeddings"),
    )  # fmt: skip


def phi3small(fields: Fields, model_type: str) -> Architecture:
    """Phi-3-small (remote code). Block-sparse layers read fewer tokens but keep K and V of all."""
    dims = common.heads_of(fields)
    layers = fields.integer("num_hidden_layers", limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
    inner = fields.integer("ff_intermediate_size", limit="width")
    if fields.raw("ff_dim_multiplier") is not None:
        raise UnsupportedArchitecture("is not planned", field="ff_dim_multiplier")
    if fields.boolean("gegelu_pad_to_256", True):
        inner = 256 * -(-inner // 256)
    tied = fields.boolean("tie_word_embeddings", True)
    # the module's own bias argument, not attention_bias of the file, decides: all linears have one
    fields.ignore(
        "attention_bias", "blocksparse_block_size", "blocksparse_homo_head_pattern",
        "blocksparse_num_local_blocks",
        "blocksparse_triton_kernel_block_size", "blocksparse_vert_stride", "dense_attention_every_n_layers",
        "embedding_dropout_prob", "ffn_dropout_prob", "gegelu_limit", "mup_attn_multiplier",
        "mup_embedding_multiplier",
        "mup_use_scaling", "mup_width_multiplier", "pad_sequence_to_multiple_of_64", "rope_embedding_base",
        "rope_position_scale", "attention_dropout_prob", "dummy_token_indices",
    )  # fmt: skip
    h = dims.hidden
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, h)
    for i in range(layers):
        t.layer = i
        at = f"model.layers.{i}"
        t.fused_attention(f"{at}.self_attn", dims, qkv="query_key_value", out="dense", bias=True, out_bias=True)
        t.plain_mlp(f"{at}.mlp", h, inner, bias=True, fused_gate=True)
        t.norm(f"{at}.input_layernorm", h, "layer")
        t.norm(f"{at}.post_attention_layernorm", h, "layer")
    t.layer = None
    t.norm("model.final_layernorm", h, "layer")
    t.head("lm_head", vocab, h, "model.embed_tokens.weight" if tied else None)
    return _finish(
        fields, model_type, "Phi3SmallForCausalLM", t, dims, layers, inner, vocab, gated=True,
        rotary=Rotary(dims.head_size, 1),
    )  # fmt: skip


def nemotron_nas(fields: Fields, model_type: str) -> Architecture:
    """Llama pruned block by block (DeciLM, remote code): own KV heads and MLP width per layer."""
    hidden = fields.integer("hidden_size", limit="width")
    heads = fields.integer("num_attention_heads", limit="heads")
    common.divisible(hidden, heads, "hidden_size", "num_attention_heads")
    size = fields.integer("head_dim", hidden // heads, limit="width")
    layers = fields.integer("num_hidden_layers", limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
    bias, mlp_bias = fields.boolean("attention_bias", False), fields.boolean("mlp_bias", False)
    tied = fields.boolean("tie_word_embeddings", False)
    blocks = fields.raw("block_configs")
    if not isinstance(blocks, list) or len(blocks) != layers or not all(isinstance(b, dict) for b in blocks):
        raise ConfigError(f"{shown(blocks)} does not describe {layers} layers", field="block_configs")
    fields.ignore("num_key_value_heads", "intermediate_size", "max_window_layers")
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, hidden)
    cache, widest, most = [], 0, 1
    for i, block in enumerate(blocks):
        t.layer = i
        at = f"model.layers.{i}"
        attention, ffn = block.get("attention") or {}, block.get("ffn") or {}
        where = f"block_configs[{i}]"
        for part, name in ((attention, "attention"), (ffn, "ffn")):
            if part.get("replace_with_linear") or part.get("sparsify") or part.get("window_length"):
                raise UnsupportedArchitecture(
                    "linear, sparse or windowed blocks are not planned", field=f"{where}.{name}"
                )
        if not attention.get("no_op"):
            per_group = Fields(attention).integer("n_heads_in_group", limit="heads")
            common.divisible(heads, per_group, "num_attention_heads", f"{where}.attention.n_heads_in_group")
            dims = Heads(hidden, heads, heads // per_group, size)
            most = max(most, dims.kv_heads)
            t.attention(f"{at}.self_attn", dims, bias=bias, out_bias=bias)
            t.norm(f"{at}.input_layernorm", hidden)
            cache.append(CacheLayer(i, "full", None, dims.kv_heads, size))
        if not ffn.get("no_op"):
            factor = Fields(ffn).number("ffn_mult", 0.0)
            if not 0 < factor <= 64:
                raise ConfigError(f"{shown(factor)} is not in (0, 64]", field=f"{where}.ffn.ffn_mult")
            inner = 256 * -(-int(2 * factor * hidden / 3) // 256)
            widest = max(widest, inner)
            t.gated_mlp(f"{at}.mlp", hidden, inner, bias=mlp_bias)
            t.norm(f"{at}.post_attention_layernorm", hidden)
    t.layer = None
    t.norm("model.norm", hidden)
    t.head("lm_head", vocab, hidden, "model.embed_tokens.weight" if tied else None)
    t.rotary(size, "model.rotary_emb.")
    return _finish(
        fields, model_type, "DeciLMForCausalLM", t, Heads(hidden, heads, most, size), layers, widest, vocab,
        gated=True, rotary=Rotary(size, 1), cache=tuple(cache),
    )  # fmt: skip


_BUILDERS: dict[str, Callable[[Fields, str], Architecture]] = {
    "gpt2": gpt2,
    "gpt_neo": gpt_neo,
    "gptj": gptj,
    "codegen": gptj,
    "opt": opt,
    "bloom": bloom,
    "mpt": mpt,
    "qwen": qwen,
    "chatglm": chatglm,
    "exaone": exaone,
    "mimo": mimo,
    "mixformer-sequential": mixformer,
    "phi3small": phi3small,
    "nemotron-nas": nemotron_nas,
}
