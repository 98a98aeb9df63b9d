"""GPTBigCode (StarCoder, SantaCoder): learned positions and multi-query attention.

Shapes follow transformers 5.19, models/gpt_bigcode/.
"""

from __future__ import annotations

from dataclasses import replace

from tonnage.planner.families import common
from tonnage.planner.families.family import GPT2_NAMES, Family
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import Fields
from tonnage.planner.model.recipe import Attention, Embedding, Head, Mlp, Norm, Recipe, layer_of
from tonnage.planner.model.tensor import TensorSpec


def build(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a GPTBigCode model from its checked config."""
    dims, layers, vocab = common.sizes(fields)
    hidden = dims.hidden
    positions = fields.integer("max_position_embeddings", limit="positions")
    inner = fields.integer("n_inner", 4 * hidden, limit="width")
    if fields.boolean("multi_query", True):
        dims = replace(dims, kv_heads=1)
    fields.ignore("num_key_value_heads", "head_dim")
    tied = fields.boolean("tie_word_embeddings", True)
    common.refuse(fields, "add_cross_attention", why="the planner cannot build cross attention")
    fields.ignore(
        "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
        "summary_first_dropout", "inference_runner", "validate_runner_input", "pre_allocate_kv_cache",
        "max_sequence_length", "max_batch_size", "pad_key_length", "activation_function",
    )  # fmt: skip

    attention = Attention(
        "attn", dims, qkv="c_attn", out="c_proj", bias=True, out_bias=True,
        dropout=common.number(fields, "attn_pdrop", 0.1),
    )  # fmt: skip
    act = common.act_of(fields, "gelu_pytorch_tanh", "activation_function")
    dropout = common.number(fields, "resid_pdrop", 0.1)
    layer = layer_of(
        "pre", attention, Mlp("mlp", hidden, inner, act, ("c_fc", "c_proj"), bias=True),
        (Norm("ln_1", hidden, "layer"), Norm("ln_2", hidden, "layer")), (dropout, dropout),
    )  # fmt: skip
    # The buffer ``bias`` is the causal mask over all positions: 64 MiB for StarCoder's 8,192 positions.
    mask = TensorSpec("transformer.bias", (positions, positions), "buffer", "GPTBigCodeModel", dtype="bool")
    recipe = Recipe(
        "transformer.h",
        Embedding(
            "transformer.wte", vocab, hidden, ("transformer.wpe", positions),
            common.number(fields, "embd_pdrop", 0.1),
        ),
        (layer,) * layers, Norm("transformer.ln_f", hidden, "layer"), Head(tied, buffers=(mask,)),
    )  # fmt: skip
    return common.described(
        fields, model_type, "GPTBigCodeForCausalLM", recipe, dims, inner, max_model_len=positions,
        position_field=fields.name("max_position_embeddings"), gated=False,
    )  # fmt: skip


FAMILIES = {
    "gpt_bigcode": Family(
        build, aliases=GPT2_NAMES, lora=("c_attn",), ia3=("c_attn", "mlp.c_proj"), hf="served",
    ),
}  # fmt: skip
