"""Older GPT-like families: GPT-2, GPT-Neo, GPT-J, CodeGen, OPT, BLOOM and MPT, with one builder per family.

Shapes follow transformers 5.19, models/<family>/.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.family import EAGER, GPT2_NAMES, QV, Family
from tonnage.planner.model.architecture import Architecture, Rotary
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.recipe import Attention, Embedding, Head, Mlp, Norm, Recipe, Rope, layer_of
from tonnage.planner.model.tensor import TensorSpec

GPT_FIELDS = (
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "activation_function", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "n_ctx",
    "attention_softmax_in_fp32", "classifier_dropout", "resid_dropout", "embed_dropout",
)  # fmt: skip


_made = partial(common.described, gated=False)


def _norms(hidden: int, *names: str, kind: Any = "layer") -> tuple[Norm, ...]:
    """Return descriptions of norms over ``hidden`` values, one norm for each given name."""
    return tuple(Norm(name, hidden, kind) for name in names)


def _act(fields: Fields) -> str:
    """Return the name of the MLP's activation function; the default is GPT-2's GELU (``gelu_new``)."""
    return common.act_of(fields, "gelu_new", "activation_function")


def gpt2(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a GPT-2 model from its checked config.

    Its Conv1D modules store matrices as [in, out]. bitsandbytes transposes them and replaces them like
    nn.Linear.
    """
    dims, layers, vocab = common.sizes(fields)
    h = dims.hidden
    positions = fields.integer("max_position_embeddings", limit="positions")
    inner = fields.integer("n_inner", 4 * h, limit="width")
    tied = fields.boolean("tie_word_embeddings", True)
    common.refuse(fields, "add_cross_attention", why="the planner cannot build cross attention")
    behind = common.number(fields, "resid_pdrop", 0.1)
    attention = Attention(
        "attn", dims, qkv="c_attn", out="c_proj", bias=True, out_bias=True, narrow=True,
        dropout=common.number(fields, "attn_pdrop", 0.1),
    )  # fmt: skip
    mlp = Mlp("mlp", h, inner, _act(fields), ("c_fc", "c_proj"), bias=True)
    layer = layer_of("pre", attention, mlp, _norms(h, "ln_1", "ln_2"), (behind, behind))
    embedding = Embedding(
        "transformer.wte", vocab, h, ("transformer.wpe", positions), common.number(fields, "embd_pdrop", 0.1)
    )
    recipe = Recipe(
        "transformer.h", embedding, (layer,) * layers, Norm("transformer.ln_f", h, "layer"), Head(tied),
        linear_class="Conv1D", taped=not fields.config.get("reorder_and_upcast_attn"),
    )  # fmt: skip
    return _made(
        fields, model_type, "GPT2LMHeadModel", recipe, dims, inner, max_model_len=positions,
        position_field=fields.name("max_position_embeddings"),
    )  # fmt: skip


def gpt_neo(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a GPT-Neo model: global and local layers alternate.

    Local layers see a window of ``window_size`` tokens.
    """
    dims, layers, vocab = common.sizes(fields)
    h = dims.hidden
    positions = fields.integer("max_position_embeddings", 2048, limit="positions")
    inner = fields.integer("intermediate_size", 4 * h, limit="width")
    window = fields.integer("window_size", 256, limit="positions")
    tied = fields.boolean("tie_word_embeddings", True)
    kinds = _neo_kinds(fields, layers)
    behind = common.number(fields, "resid_dropout", 0.0)
    mask = TensorSpec(
        "attn.attention.bias", (1, 1, positions, positions), "buffer", "GPTNeoSelfAttention", dtype="bool"
    )
    attention = Attention(
        "attn.attention", dims, out="out_proj", out_bias=True, upcast=True, extra=(mask,),
        dropout=common.number(fields, "attention_dropout", 0.0),
    )  # fmt: skip
    mlp = Mlp("mlp", h, inner, _act(fields), ("c_fc", "c_proj"), bias=True)
    layer = layer_of("pre", attention, mlp, _norms(h, "ln_1", "ln_2"), (behind, behind))
    embedding = Embedding(
        "transformer.wte", vocab, h, ("transformer.wpe", positions), common.number(fields, "embed_dropout", 0.0)
    )
    recipe = Recipe(
        "transformer.h", embedding, (layer,) * layers, Norm("transformer.ln_f", h, "layer"), Head(tied)
    )
    return _made(
        fields, model_type, "GPTNeoForCausalLM", recipe, dims, inner, max_model_len=positions,
        cache=common.cache_layers(kinds, window, dims),
    )  # fmt: skip


def _neo_kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    """Return each GPT-Neo layer's attention kind (global or local) from ``attention_types``.

    The config field ``attention_types`` is a list of [kinds, repetitions].
    """
    fields.ignore("attention_layers")
    value = fields.raw("attention_types")
    out: list[str] = []
    try:
        for kinds, times in value or [[["global", "local"], layers // 2]]:
            if type(times) is not int or not 0 <= times <= layers or len(out) + times * len(kinds) > layers:
                raise TypeError
            out += list(kinds) * times
    except (TypeError, ValueError):
        raise ConfigError(
            f"{shown(value)} is not a list of pairs [kinds, repetitions]", field="attention_types"
        ) from None
    names = {"global": "full_attention", "local": "sliding_attention"}
    if len(out) != layers or not all(isinstance(kind, str) and kind in names for kind in out):
        raise ConfigError(
            f"{shown(value)} does not state 'global' or 'local' for each of the {layers} layers",
            field="attention_types",
        )
    return tuple(names[kind] for kind in out)


def gptj(
    fields: Fields, model_type: str, class_name: str = "GPTJForCausalLM", fused: bool = False
) -> Architecture:
    """Return the architecture of a GPT-J model or, with ``fused``, of a CodeGen model.

    CodeGen fuses the projections of q, k and v.
    """
    dims, layers, vocab = common.sizes(fields)
    h = dims.hidden
    positions = fields.integer("max_position_embeddings", limit="positions")
    inner = fields.integer("n_inner", 4 * h, limit="width")
    rotary = fields.optional_integer("rotary_dim", 64, limit="width") or h
    tied = fields.boolean("tie_word_embeddings", False)
    behind = common.number(fields, "resid_pdrop", 0.0)
    table = TensorSpec("attn.embed_positions", (positions, rotary), "buffer", "GPTJAttention", dtype="float32")
    attention = Attention(
        "attn", dims, qkv="qkv_proj" if fused else None, out="out_proj", upcast=True,
        # CodeGen computes q, k and v in four groups of heads; v is copied when the groups are merged.
        copied="v" if fused else "",
        rope=Rope(rotary, joined=True, apart="wide" if fused else "typed"),
        dropout=common.number(fields, "attn_pdrop", 0.0), extra=(table,),
    )  # fmt: skip
    mlp = Mlp("mlp", h, inner, _act(fields), ("fc_in", "fc_out"), bias=True)
    layer = layer_of("parallel", attention, mlp, _norms(h, "ln_1"), (behind, behind))
    embedding = Embedding("transformer.wte", vocab, h, dropout=common.number(fields, "embd_pdrop", 0.0))
    recipe = Recipe(
        "transformer.h", embedding, (layer,) * layers, Norm("transformer.ln_f", h, "layer"), Head(tied, True)
    )
    return _made(
        fields, model_type, class_name, recipe, dims, inner,
        max_model_len=positions, position_field=fields.name("max_position_embeddings"),
        rotary=Rotary(rotary, 1),
    )  # fmt: skip


def opt(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of an OPT model, whose table of learned positions has two extra rows.

    In the 350M model the embedding is narrower than the hidden size and is projected to it. Its norms follow
    the residual additions.
    """
    dims, layers, vocab = common.sizes(fields)
    h = dims.hidden
    positions = fields.integer("max_position_embeddings", 2048, limit="positions")
    inner = fields.integer("ffn_dim", limit="width")
    width = fields.integer("word_embed_proj_dim", h, limit="width")
    before = fields.boolean("do_layer_norm_before", True)
    bias = fields.boolean("enable_bias", True)
    affine = fields.boolean("layer_norm_elementwise_affine", True)
    kind: Any = "layer" if affine else "layer-none"
    tied = fields.boolean("tie_word_embeddings", True)
    removed = fields.boolean("_remove_final_layer_norm", False)
    fields.ignore("layerdrop", "init_std", "dropout")
    behind = common.number(fields, "dropout", 0.1)
    attention = Attention(
        "self_attn", dims, out="out_proj", bias=bias, out_bias=bias,
        dropout=common.number(fields, "attention_dropout", 0.0),
    )  # fmt: skip
    mlp = Mlp("", h, inner, common.act_of(fields, "relu", "activation_function"), ("fc1", "fc2"), bias=bias)
    norms = _norms(h, "self_attn_layer_norm", "final_layer_norm", kind=kind)
    layer = layer_of("pre" if before else "summed", attention, mlp, norms, (behind, behind))
    embedding = Embedding(
        "model.decoder.embed_tokens", vocab, width, ("model.decoder.embed_positions", positions + 2), each=True,
        projected=("model.decoder.project_in", h) if width != h else None,
    )  # fmt: skip
    final = Norm("model.decoder.final_layer_norm", h, kind) if before and not removed else None
    recipe = Recipe(
        "model.decoder.layers", embedding, (layer,) * layers, final,
        Head(tied, projected="model.decoder.project_out" if width != h else None), taped=affine,
    )  # fmt: skip
    return _made(fields, model_type, "OPTForCausalLM", recipe, dims, inner, max_model_len=positions)


def bloom(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a BLOOM model: ALiBi positions and a norm after the embedding.

    There is no table of positions, so the architecture allows any length.
    """
    dims, layers, vocab = common.sizes(fields)
    h = dims.hidden
    tied = fields.boolean("tie_word_embeddings", True)
    fields.ignore("apply_residual_connection_post_layernorm", "slow_but_exact", "masked_softmax_fusion")
    fields.ignore("offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "unk_token_id", "n_inner")
    behind = common.number(fields, "hidden_dropout", 0.0)
    attention = Attention(
        "self_attention", dims, qkv="query_key_value", out="dense", bias=True, out_bias=True,
        dropout=common.number(fields, "attention_dropout", 0.0),
    )  # fmt: skip
    # For the backward pass, BloomGelu keeps only its input, as a fused activation function does.
    mlp = Mlp("mlp", h, 4 * h, "gelu", ("dense_h_to_4h", "dense_4h_to_h"), bias=True)
    norms = _norms(h, "input_layernorm", "post_attention_layernorm")
    layer = layer_of("pre", attention, mlp, norms, (behind, behind))
    embedding = Embedding(
        "transformer.word_embeddings", vocab, h,
        norm=Norm("transformer.word_embeddings_layernorm", h, "layer"),
    )  # fmt: skip
    recipe = Recipe(
        "transformer.h", embedding, (layer,) * layers, Norm("transformer.ln_f", h, "layer"), Head(tied),
        # With slow_but_exact, transformers multiplies matrices slice by slice. The recipe does not describe
        # this, so training activations cannot be derived from it.
        taped=not (fields.config.get("slow_but_exact") and fields.config.get("pretraining_tp") != 1),
    )  # fmt: skip
    # ``seq_length`` is the sequence length in training. vLLM 0.32.0 assumes 2048 if no field states a length.
    stated = fields.optional_integer("seq_length", 2048, limit="positions") or 2048
    return _made(
        fields, model_type, "BloomForCausalLM", recipe, dims, 4 * h, max_model_len=stated,
        position_field="seq_length",
    )  # fmt: skip


def mpt(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of an MPT model: ALiBi, no biases, attention options in ``attn_config``."""
    dims, layers, vocab = common.sizes(fields)
    h = dims.hidden
    # transformers always uses 4 as the MLP's expansion ratio, but engines read expansion_ratio.
    if fields.integer("expansion_ratio", 4, limit="width") != 4:
        raise UnsupportedArchitecture(
            "must be 4, the only value that transformers supports", field="expansion_ratio"
        )
    tied = fields.boolean("tie_word_embeddings", True)
    if not fields.boolean("no_bias", True):
        raise UnsupportedArchitecture("false is not supported; only true is", field="no_bias")
    options = fields.mapping("attn_config") or {}
    kv_heads = options.get("kv_n_heads") or dims.heads
    if options.get("attn_type") == "multiquery_attention":
        kv_heads = 1
    if options.get("qk_ln") or kv_heads != dims.heads or options.get("alibi") is False:
        raise UnsupportedArchitecture(
            "qk_ln, grouped heads and learned positions are not supported", field="attn_config"
        )
    fields.ignore(
        "learned_pos_emb", "norm_type", "embedding_fraction", "emb_pdrop", "logit_scale", "ffn_config"
    )
    # modeling_mpt.py applies attn_pdrop to the residuals too
    dropout = common.number(Fields(options), "attn_pdrop", 0.0)
    attention = Attention(
        "attn", dims, qkv="Wqkv", out="out_proj", clipped=bool(options.get("clip_qkv")), filled=True,
        dropout=dropout,
    )  # fmt: skip
    mlp = Mlp("ffn", h, 4 * h, "gelu", ("up_proj", "down_proj"))
    norms = _norms(h, "norm_1", "norm_2", kind="layer-weight")
    layer = layer_of("pre", attention, mlp, norms, (dropout, dropout))
    recipe = Recipe(
        "transformer.blocks", Embedding("transformer.wte", vocab, h), (layer,) * layers,
        Norm("transformer.norm_f", h, "layer-weight"), Head(tied),
    )  # fmt: skip
    length = fields.integer("max_seq_len", 2048, limit="positions")
    return _made(
        fields, model_type, "MptForCausalLM", recipe, dims, 4 * h, max_model_len=length,
        position_field="max_seq_len",
    )  # fmt: skip


_family = partial(Family, ignored=GPT_FIELDS)
FAMILIES = {
    "gpt2": _family(gpt2, aliases=GPT2_NAMES, lora=("c_attn",), ia3=("c_attn", "mlp.c_proj"), hf="served"),
    "gpt_neo": _family(
        gpt_neo, aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
        attentions=("flash",), hf="own attention",
    ),
    "gptj": _family(gptj, aliases=GPT2_NAMES, attentions=("flash",), hf="own attention"),
    "codegen": _family(
        partial(gptj, class_name="CodeGenForCausalLM", fused=True), aliases=GPT2_NAMES, attentions=EAGER,
        hf="own attention",
    ),
    "opt": _family(opt, lora=QV, ia3=("q_proj", "k_proj", "fc2"), hf="served"),
    "bloom": _family(
        bloom,
        aliases={"hidden_size": "n_embed", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
        attentions=EAGER, lora=("query_key_value",), ia3=("query_key_value", "mlp.dense_4h_to_h"), hf="alibi",
    ),
    "mpt": _family(
        mpt,
        aliases={"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
        attentions=EAGER, hf="alibi",
    ),
}  # fmt: skip
