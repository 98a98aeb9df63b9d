"""GPTBigCode (StarCoder, SantaCoder): learned positions, multi-query attention. transformers 5.19,
models/gpt_bigcode/."""

from __future__ import annotations

from tonnage.planner.architecture import Architecture
from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.common import Heads, Tensors
from tonnage.planner.fields import Fields


def build(fields: Fields, model_type: str) -> Architecture:
    hidden = fields.integer("hidden_size", limit="width")
    heads = fields.integer("num_attention_heads", limit="heads")
    common.divisible(hidden, heads, fields.name("hidden_size"), fields.name("num_attention_heads"))
    head_size = hidden // heads
    layers = fields.integer("num_hidden_layers", limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
    positions = fields.integer("max_position_embeddings", limit="positions")
    inner = fields.integer("n_inner", 4 * hidden, limit="width")
    kv_heads = 1 if fields.boolean("multi_query", True) else heads
    fields.ignore("num_key_value_heads", "head_dim")
    tied = fields.boolean("tie_word_embeddings", True)
    if fields.boolean("add_cross_attention", False):
        raise UnsupportedArchitecture("cross attention is not planned yet", field="add_cross_attention")
    fields.ignore(
        "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
        "summary_first_dropout", "inference_runner", "validate_runner_input", "pre_allocate_kv_cache",
        "max_sequence_length", "max_batch_size", "pad_key_length", "activation_function",
    )  # fmt: skip

    dims = Heads(hidden, heads, kv_heads, head_size)
    t = Tensors()
    t.vocabulary("transformer.wte", vocab, hidden)
    t.embedding("transformer.wpe", positions, hidden)
    for _, at in t.layers(layers, "transformer.h"):
        t.fused_attention(f"{at}.attn", dims, qkv="c_attn", out="c_proj", bias=True, out_bias=True)
        t.plain_mlp(f"{at}.mlp", hidden, inner, bias=True, names=("c_fc", "c_proj"))
        t.norm(f"{at}.ln_1", hidden, "layer")
        t.norm(f"{at}.ln_2", hidden, "layer")
    t.norm("transformer.ln_f", hidden, "layer")
    # the causal mask of all positions: 64 MiB for StarCoder's 8,192
    t.buffer("transformer.bias", (positions, positions), "GPTBigCodeModel", "bool")
    t.head("lm_head", vocab, hidden, "transformer.wte.weight" if tied else None)
    return common.decoder(
        fields, model_type, "GPTBigCodeForCausalLM", t, dims, common.full_layers(layers, dims), layers=layers,
        inner=inner, vocab=vocab, max_model_len=positions,
        position_field=fields.name("max_position_embeddings"), gated=False,
    )  # fmt: skip
