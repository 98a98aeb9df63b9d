"""GPT-NeoX (Pythia, RedPajama-INCITE). Shapes after transformers 5.19, models/gpt_neox/."""

from __future__ import annotations

from tonnage.planner.architecture import Architecture, Rotary
from tonnage.planner.errors import ConfigError
from tonnage.planner.families import common
from tonnage.planner.families.common import Heads, Tensors
from tonnage.planner.fields import Fields, shown


def build(fields: Fields, model_type: str) -> Architecture:
    hidden = fields.integer("hidden_size", limit="width")
    heads = fields.integer("num_attention_heads", limit="heads")
    common.divisible(hidden, heads, "hidden_size", "num_attention_heads")
    head_size = hidden // heads
    inner = fields.integer("intermediate_size", limit="width")
    layers = fields.integer("num_hidden_layers", limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
    bias = fields.boolean("attention_bias", True)
    tied = fields.boolean("tie_word_embeddings", False)
    fields.ignore("use_parallel_residual", "rotary_emb_base", "is_decoder", "classifier_dropout")
    rotary = Rotary(_rotary_dim(fields, head_size), 1)

    dims = Heads(hidden, heads, heads, head_size)
    t = Tensors()
    t.vocabulary("gpt_neox.embed_in", vocab, hidden)
    for _, at in t.layers(layers, "gpt_neox.layers"):
        t.fused_attention(f"{at}.attention", dims, qkv="query_key_value", out="dense", bias=bias, out_bias=bias)
        t.plain_mlp(f"{at}.mlp", hidden, inner, bias=True, names=("dense_h_to_4h", "dense_4h_to_h"))
        t.norm(f"{at}.input_layernorm", hidden, "layer")
        t.norm(f"{at}.post_attention_layernorm", hidden, "layer")
    t.norm("gpt_neox.final_layer_norm", hidden, "layer")
    t.head("lm_head", vocab, hidden, "gpt_neox.embed_in.weight" if tied else None)
    t.rotary(rotary.dim, "gpt_neox.rotary_emb.")
    return common.decoder(
        fields, model_type, "GPTNeoXForCausalLM", t, dims, common.full_layers(layers, dims), layers=layers,
        inner=inner, vocab=vocab, rotary=rotary, gated=False,
    )  # fmt: skip


def _rotary_dim(fields: Fields, head_size: int) -> int:
    """Only ``rotary_pct`` of each head is rotated (0.25 when absent)."""
    share = fields.number("rotary_pct", 0.25)
    parameters = fields.raw("rope_parameters")
    if isinstance(parameters, dict) and "partial_rotary_factor" in parameters:
        share = parameters["partial_rotary_factor"]
        if isinstance(share, bool) or not isinstance(share, int | float):
            raise ConfigError(f"{shown(share)} is not a number", field="rope_parameters.partial_rotary_factor")
    if not 0 < share <= 1:
        raise ConfigError(f"{shown(share)} is not in (0, 1]", field="rotary_pct")
    return int(head_size * share)
