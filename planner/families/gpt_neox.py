"""GPT-NeoX (Pythia, RedPajama-INCITE). Shapes follow transformers 5.19, models/gpt_neox/."""

from __future__ import annotations

from tonnage.planner.families import common
from tonnage.planner.families.family import Family, FileTraits
from tonnage.planner.model.architecture import Architecture, Rotary
from tonnage.planner.model.fields import Fields
from tonnage.planner.model.recipe import (  # fmt: skip
    Attention,
    Embedding,
    Head,
    Mlp,
    Norm,
    Recipe,
    Rope,
    Table,
    layer_of,
)


def build(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a GPT-NeoX model from its checked config."""
    dims, layers, vocab = common.sizes(fields)
    hidden = dims.hidden
    inner = fields.integer("intermediate_size", limit="width")
    bias = fields.boolean("attention_bias", True)
    tied = fields.boolean("tie_word_embeddings", False)
    fields.ignore("use_parallel_residual", "rotary_emb_base", "is_decoder", "classifier_dropout")
    rotary = Rotary(int(dims.head_size * common.rotary_share(fields, 0.25, "rotary_pct")), 1)

    table = "gpt_neox.rotary_emb."
    attention = Attention(
        "attention", dims, qkv="query_key_value", out="dense", bias=bias, out_bias=bias,
        rope=Rope(rotary.dim, table, joined=True), dropout=common.number(fields, "attention_dropout", 0.0),
    )  # fmt: skip
    mlp = Mlp(
        "mlp", hidden, inner, common.act_of(fields, "gelu"), ("dense_h_to_4h", "dense_4h_to_h"), bias=True
    )
    dropout = common.number(fields, "hidden_dropout", 0.0)
    layer = layer_of(
        "parallel" if fields.config.get("use_parallel_residual", True) else "pre", attention, mlp,
        (Norm("input_layernorm", hidden, "layer"), Norm("post_attention_layernorm", hidden, "layer")),
        (dropout, dropout),
    )  # fmt: skip
    recipe = Recipe(
        "gpt_neox.layers", Embedding("gpt_neox.embed_in", vocab, hidden, dropout=dropout), (layer,) * layers,
        Norm("gpt_neox.final_layer_norm", hidden, "layer"), Head(tied), (Table(table, rotary.dim),),
    )  # fmt: skip
    return common.described(
        fields, model_type, "GPTNeoXForCausalLM", recipe, dims, inner, rotary=rotary, gated=False
    )


FAMILIES = {
    "gpt_neox": Family(
        build, lora=("query_key_value",), ia3=("query_key_value", "dense_4h_to_h"), hf="served",
        files=FileTraits(masks_before=(4, 32)),
    ),
}  # fmt: skip
