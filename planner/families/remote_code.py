"""Models published with code on the Hugging Face hub (remote code). The planner never runs this code.

Families: Qwen 1, ChatGLM, EXAONE 3, MiMo, Phi-2's first release, Phi-3-small and Nemotron-NAS. Shapes are
derived from the published tensor names and checked against the checkpoint sizes in
tests/data/configs/checkpoint_sizes.tsv.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.family import GPT2_NAMES, LORA_ON_VOCABULARY, Family
from tonnage.planner.families.gpt import GPT_FIELDS
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.families.towers import conv
from tonnage.planner.model.architecture import Architecture, CacheLayer, Rotary
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.recipe import Heads


def qwen(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Qwen 1 model, whose ``intermediate_size`` is the width of gate plus up."""
    dims, layers, vocab = common.sizes(fields)
    size = fields.integer("kv_channels", dims.head_size, limit="width")
    dims = Heads(dims.hidden, dims.heads, dims.heads, size)
    double = fields.integer("intermediate_size", limit="width")
    common.divisible(double, 2, "intermediate_size", "gate and up")
    inner = double // 2
    tied = fields.boolean("tie_word_embeddings", False)
    bias = not fields.boolean("no_bias", True)
    if bias:
        raise UnsupportedArchitecture("false is not supported; only true is", field="no_bias")
    fields.ignore(
        "padded_vocab_size", "rotary_emb_base", "use_dynamic_ntk", "use_flash_attn", "use_logn_attn",
        "emb_dropout_prob",
        "softmax_in_fp32", "use_cache_kernel", "use_cache_quantization", "onnx_safe", "seq_length",
    )  # fmt: skip
    t = Tensors()
    t.vocabulary("transformer.wte", vocab, dims.hidden)
    for _, at in t.layers(layers, "transformer.h"):
        t.fused_attention(f"{at}.attn", dims, qkv="c_attn", out="c_proj", bias=True)
        t.gated_mlp(f"{at}.mlp", dims.hidden, inner, names=("w1", "w2", "c_proj"))
        t.norms(at, dims.hidden, "ln_1", "ln_2")
    t.close("transformer.ln_f", "transformer.wte", vocab, dims.hidden, tied)
    return common.decoder(
        fields, model_type, "QWenLMHeadModel", t, dims, layers=layers, inner=inner, vocab=vocab,
        rotary=Rotary(dims.head_size, 1),
    )  # fmt: skip


def chatglm(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of ChatGLM 2, ChatGLM 3 or GLM-4-9B from its checked config."""
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
    common.refuse(fields, "pre_seq_len", why="the planner cannot build a prefix encoder")
    fields.ignore(
        "apply_query_key_layer_scaling", "apply_residual_connection_post_layernorm", "bias_dropout_fusion",
        "fp32_residual_connection", "original_rope", "rope_ratio", "hidden_dropout", "num_hidden_layers",
        "vocab_size",
        "prefix_projection", "quantization_bit",
    )  # fmt: skip
    t = Tensors()
    t.vocabulary("transformer.embedding.word_embeddings", vocab, hidden)
    for _, at in t.layers(layers, "transformer.encoder.layers"):
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
    if last:
        t.norm("transformer.encoder.final_layernorm", hidden, norm)
    name = "transformer.embedding.word_embeddings.weight"
    t.head("transformer.output_layer", vocab, hidden, name if tied else None)
    rotary = Rotary(dims.head_size // 2, 1)
    t.buffer("transformer.rotary_pos_emb.inv_freq", (rotary.dim // 2,), "RotaryEmbedding", None)
    return common.decoder(
        fields, model_type, "ChatGLMModel", t, dims, layers=layers, inner=inner, vocab=vocab,
        rotary=rotary, max_model_len=fields.integer("seq_length", limit="positions"),
        position_field="seq_length",
    )  # fmt: skip


def glm4v(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a ChatGLM model, or of GLM-4V-9B, which has an EVA-CLIP tower beside it.

    The published file of GLM-4V names the class ChatGLMModel; vLLM serves it as GLM4VForCausalLM
    (--hf-overrides, models/glm4v.py of 0.32).
    """
    config = fields.mapping("vision_config")
    if config is None:
        if fields.raw("architectures") == ["GLM4VForCausalLM"]:
            raise ConfigError("missing", field="vision_config")
        return chatglm(fields, model_type)
    fields.ignore("boi_token_id", "eoi_token_id")
    text = chatglm(fields, model_type)
    v, ffn = Fields(config), fields.integer("ffn_hidden_size", limit="width")
    hidden, inner = (v.integer(name, limit="width") for name in ("hidden_size", "intermediate_size"))
    patch, channels = v.integer("patch_size", limit="width"), v.integer("in_channels", 3, limit="width")
    t, at = Tensors("vision"), "transformer.vision"
    conv(t, f"{at}.patch_embedding.proj", (hidden, channels, patch, patch), True)
    t.add(f"{at}.patch_embedding.cls_embedding", (1, hidden), "vision", "EVA2CLIPPatchEmbedding")
    positions = v.integer("num_positions", limit="positions")
    t.embedding(f"{at}.patch_embedding.position_embedding", positions, hidden)
    for i in range(v.integer("num_hidden_layers", limit="layers")):
        here = f"{at}.transformer.layers.{i}"
        t.norm(f"{here}.input_layernorm", hidden, "layer")
        t.linear(f"{here}.attention.query_key_value", 3 * hidden, hidden, bias=True, shard="column")
        t.linear(f"{here}.attention.dense", hidden, hidden, bias=True, shard="row")
        t.plain_mlp(f"{here}.mlp", hidden, inner, bias=True, names=("fc1", "fc2"))
        t.norm(f"{here}.post_attention_layernorm", hidden, "layer")
    t.role, width, to = "projector", text.hidden_size, f"{at}.linear_proj"
    t.linear(f"{to}.linear_proj", width, width)
    t.norm(f"{to}.norm1", width, "layer")
    t.gated_mlp(to, width, ffn, names=("gate_proj", "dense_h_to_4h", "dense_4h_to_h"))
    conv(t, f"{at}.conv", (width, hidden, 2, 2), True)
    for name in ("boi", "eoi"):
        t.add(f"{at}.{name}", (1, 1, width), "projector", "EVA2CLIPModel")
    return replace(text, class_name="GLM4VForCausalLM", tensors=(*t.specs, *text.tensors), recipe=None)


def exaone(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of an EXAONE 3 model: Llama's shapes with GPT-2's module names."""
    dims = common.heads_of(fields)
    layers, vocab = common.layers_and_vocab(fields)
    inner = fields.integer("intermediate_size", limit="width")
    tied = fields.boolean("tie_word_embeddings", False)
    t = Tensors()
    t.vocabulary("transformer.wte", vocab, dims.hidden)
    for _, at in t.layers(layers, "transformer.h"):
        t.attention(f"{at}.attn.attention", dims, out="out_proj")
        t.gated_mlp(f"{at}.mlp", dims.hidden, inner, names=("c_fc_0", "c_fc_1", "c_proj"))
        t.norms(at, dims.hidden, "ln_1", "ln_2")
    t.close("transformer.ln_f", "transformer.wte", vocab, dims.hidden, tied)
    t.rotary(dims.head_size, "transformer.rotary.")
    return common.decoder(
        fields, model_type, "ExaoneForCausalLM", t, dims, layers=layers, inner=inner, vocab=vocab,
        rotary=Rotary(dims.head_size, 1),
    )  # fmt: skip


def mimo(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a MiMo-7B model: Qwen2's shapes and MTP layers for speculative decoding.

    The model class always builds the ``num_nextn_predict_layers`` MTP layers.
    """
    dims = common.heads_of(fields)
    layers, vocab = common.layers_and_vocab(fields)
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
        t.layer_norms(at, dims.hidden)
        if i >= layers:
            t.norms(at, dims.hidden, "token_layernorm", "hidden_layernorm", "final_layernorm")
            t.linear(f"{at}.input_proj", dims.hidden, 2 * dims.hidden, "mlp")
    t.close("model.norm", "model.embed_tokens", vocab, dims.hidden, tied)
    t.rotary(dims.head_size, "model.rotary_emb.")
    return common.decoder(
        fields, model_type, "MiMoForCausalLM", t, dims, common.cache_layers(kinds, window, dims), layers=layers,
        inner=inner, vocab=vocab, rotary=Rotary(dims.head_size, 1),
    )  # fmt: skip


def mixformer(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of Phi-1.5 or Phi-2 as first published.

    The modules form one flat list. In each layer, attention and MLP are parallel and follow one norm.
    """
    dims, layers, vocab = common.sizes(fields)
    h = dims.hidden
    kv_heads = fields.integer("n_head_kv", dims.heads, limit="heads")
    common.divisible(dims.heads, kv_heads, "n_head", "n_head_kv")
    dims = Heads(h, dims.heads, kv_heads, dims.head_size)
    inner = fields.integer("n_inner", 4 * h, limit="width")
    rotary = Rotary(fields.integer("rotary_dim", 32, limit="width"), 1)
    block = fields.mapping("architecture") or {}
    if block.get("block_cls", "parallel") != "parallel":
        raise UnsupportedArchitecture(
            f"{shown(block['block_cls'])} is not supported; only parallel is", field="architecture.block_cls"
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
    return common.decoder(
        fields, model_type, "MixFormerSequentialForCausalLM", t, dims, layers=layers, inner=inner, vocab=vocab,
        rotary=rotary, gated=False, max_model_len=fields.integer("max_position_embeddings", limit="positions"),
        position_field=fields.name("max_position_embeddings"),
    )  # fmt: skip


def phi3small(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Phi-3-small model from its checked config.

    Block-sparse layers attend to fewer tokens, but cache K and V of all tokens.
    """
    dims = common.heads_of(fields)
    layers, vocab = common.layers_and_vocab(fields)
    inner = fields.integer("ff_intermediate_size", limit="width")
    if fields.raw("ff_dim_multiplier") is not None:
        raise UnsupportedArchitecture(
            f"{shown(fields.raw('ff_dim_multiplier'))} is not supported; only null is",
            field="ff_dim_multiplier",
        )
    if fields.boolean("gegelu_pad_to_256", True):
        inner = 256 * -(-inner // 256)
    tied = fields.boolean("tie_word_embeddings", True)
    # Every linear layer has a bias: the model class ignores attention_bias of config.json.
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
    for _, at in t.layers(layers, "model.layers"):
        t.fused_attention(f"{at}.self_attn", dims, qkv="query_key_value", out="dense", bias=True, out_bias=True)
        t.plain_mlp(f"{at}.mlp", h, inner, bias=True, fused_gate=True)
        t.layer_norms(at, h, "layer")
    t.norm("model.final_layernorm", h, "layer")
    t.head("lm_head", vocab, h, "model.embed_tokens.weight" if tied else None)
    return common.decoder(
        fields, model_type, "Phi3SmallForCausalLM", t, dims, layers=layers, inner=inner, vocab=vocab,
        rotary=Rotary(dims.head_size, 1),
    )  # fmt: skip


def nemotron_nas(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a Nemotron-NAS model (DeciLM): a Llama whose layers were pruned separately.

    Every layer has its own number of KV heads and its own MLP width.
    """
    hidden = fields.integer("hidden_size", limit="width")
    heads = fields.integer("num_attention_heads", limit="heads")
    common.divisible(hidden, heads, "hidden_size", "num_attention_heads")
    size = fields.integer("head_dim", hidden // heads, limit="width")
    layers, vocab = common.layers_and_vocab(fields)
    bias, mlp_bias = fields.boolean("attention_bias", False), fields.boolean("mlp_bias", False)
    tied = fields.boolean("tie_word_embeddings", False)
    blocks = fields.raw("block_configs")
    if not isinstance(blocks, list) or len(blocks) != layers or not all(isinstance(b, dict) for b in blocks):
        raise ConfigError(f"{shown(blocks)} is not a list of {layers} objects", field="block_configs")
    fields.ignore("num_key_value_heads", "intermediate_size", "max_window_layers")
    t = Tensors()
    t.vocabulary("model.embed_tokens", vocab, hidden)
    cache, widest, most = [], 0, 1
    for i, at in t.layers(layers, "model.layers"):
        attention, ffn = blocks[i].get("attention") or {}, blocks[i].get("ffn") or {}
        where = f"block_configs[{i}]"
        for part, name in ((attention, "attention"), (ffn, "ffn")):
            if not isinstance(part, dict):
                raise ConfigError(f"{shown(part)} is not an object", field=f"{where}.{name}")
            if part.get("replace_with_linear") or part.get("sparsify") or part.get("window_length"):
                raise UnsupportedArchitecture(
                    "linear, sparse or windowed blocks are not supported", field=f"{where}.{name}"
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
    t.close("model.norm", "model.embed_tokens", vocab, hidden, tied)
    t.rotary(size, "model.rotary_emb.")
    return common.decoder(
        fields, model_type, "DeciLMForCausalLM", t, Heads(hidden, heads, most, size), tuple(cache),
        layers=layers, inner=widest, vocab=vocab, rotary=Rotary(size, 1),
    )  # fmt: skip


_family = partial(Family, ignored=GPT_FIELDS)
FAMILIES = {
    "qwen": _family(qwen),
    "chatglm": _family(
        glm4v, first_class="ChatGLMForConditionalGeneration", other_classes=("GLM4VForCausalLM",)
    ),
    "exaone": _family(exaone, aliases={"num_hidden_layers": "num_layers"}, vllm=LORA_ON_VOCABULARY),
    "mimo": _family(mimo),
    "mixformer-sequential": _family(mixformer, aliases=GPT2_NAMES),
    "phi3small": _family(phi3small),
    "nemotron-nas": _family(nemotron_nas),
}
