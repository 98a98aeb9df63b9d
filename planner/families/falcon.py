"""Falcon: multi-query (7B), grouped-query (40B and 180B, new_decoder_architecture) and multi-head attention.

Shapes follow transformers 5.19, models/falcon/. Falcon's linear layers have the class FalconLinear.
bitsandbytes does not replace them (integrations/bitsandbytes.py replaces ``type(module) is nn.Linear``).
"""

from __future__ import annotations

from dataclasses import replace

from tonnage.planner.errors import ConfigError
from tonnage.planner.families import common
from tonnage.planner.families.family import Family, FileTraits
from tonnage.planner.model.architecture import Architecture, CacheLayer, Rotary
from tonnage.planner.model.fields import Fields, shown
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
    """Return the architecture of a Falcon model from its checked config."""
    dims, layers, vocab = common.sizes(fields)
    hidden, heads, head_size = dims.hidden, dims.heads, dims.head_size
    new = fields.boolean("new_decoder_architecture", False)
    multi_query = fields.boolean("multi_query", True)
    parallel = fields.boolean("parallel_attn", True)
    bias = fields.boolean("bias", False)
    alibi = fields.boolean("alibi", False)
    inner = fields.integer("ffn_hidden_size", 4 * hidden, limit="width")
    tied = fields.boolean("tie_word_embeddings", True)
    stated = fields.optional_integer("num_kv_heads", limit="heads")
    if new:
        kv_heads = stated or heads
        common.divisible(heads, kv_heads, "num_attention_heads", "num_kv_heads")
    else:  # transformers reads num_kv_heads only in the new decoder architecture
        kv_heads = 1 if multi_query else heads
    norms = _norms(fields, new, parallel)
    _, factor = common.read_rope(fields)
    fields.ignore("apply_residual_connection_post_layernorm")

    dims = replace(dims, kv_heads=kv_heads)
    table = "transformer.rotary_emb."
    attention = Attention(
        "self_attention", dims, qkv="query_key_value", out="dense", bias=bias, out_bias=bias,
        copied="qkv" if new else "kv" if multi_query else "", broadcast=multi_query and not new,
        # The new decoder architecture copies K and V for every query head of a group.
        repeated=new, rope=None if alibi else Rope(head_size, table),
        # FalconModel passes an attention mask even if the attention kernel needs none.
        masked=True, narrow=True,
    )  # fmt: skip
    act = common.act_of(fields, "gelu", "hidden_act", "activation")
    mlp = Mlp("mlp", hidden, inner, act, ("dense_h_to_4h", "dense_4h_to_h"), bias=bias)
    dropout = common.number(fields, "hidden_dropout", 0.0)
    # Parallel attention and MLP have one dropout, which applies to the sum of their outputs.
    behind = 0.0 if parallel else common.number(fields, "attention_dropout", 0.0)
    layer = layer_of(
        "parallel" if parallel else "pre", attention, mlp,
        tuple(Norm(name, hidden, "layer") for name in norms), (behind, dropout),
    )  # fmt: skip
    recipe = Recipe(
        "transformer.h", Embedding("transformer.word_embeddings", vocab, hidden), (layer,) * layers,
        Norm("transformer.ln_f", hidden, "layer"), Head(tied),
        (Table(table, head_size),),  # the rotary table is built even when ALiBi replaces rotary positions
        linear_class="FalconLinear", taped=not alibi,  # ALiBi's attention mask differs by head
    )  # fmt: skip
    return common.described(
        fields, model_type, "FalconForCausalLM", recipe, dims, inner,
        # In the new decoder architecture, transformers caches K and V once per query head, not per KV head.
        tuple(CacheLayer(i, "full", None, kv_heads, head_size, heads if new else None) for i in range(layers)),
        rotary=None if alibi else Rotary(head_size, 1), gated=False,
        max_model_len=int(fields.integer("max_position_embeddings", 2048, limit="positions") * factor),
    )  # fmt: skip


def _norms(fields: Fields, new: bool, parallel: bool) -> tuple[str, ...]:
    """Return the names of the norms before attention and MLP in a Falcon layer."""
    count = fields.raw("num_ln_in_parallel_attn")
    if count is not None and (isinstance(count, bool) or count not in (1, 2)):
        raise ConfigError(f"{shown(count)} is not 1 or 2", field="num_ln_in_parallel_attn")
    if not parallel:
        if new:
            raise ConfigError(
                "false contradicts new_decoder_architecture, which is always parallel", field="parallel_attn"
            )
        return ("input_layernorm", "post_attention_layernorm")
    if (count or (2 if new else 1)) == 2:
        return ("ln_attn", "ln_mlp")
    return ("input_layernorm",)


def _refined(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of Falcon 40B's first release, which always has the new decoder architecture."""
    # The 40B files do not state new_decoder_architecture: the model_type RefinedWeb implies it.
    fields.config = {"new_decoder_architecture": True, **fields.config}
    return build(fields, "falcon")


def _refined_7b(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of Falcon 7B's first release, which has multi-query attention."""
    return build(fields, "falcon")


# Standard config field name -> its name in the first published Falcon files.
_REFINED = {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "num_kv_heads": "n_head_kv"}
FAMILIES = {
    "falcon": Family(
        build, lora=("query_key_value",), ia3=("query_key_value", "dense_4h_to_h"), hf="own attention",
    ),
    "RefinedWeb": Family(
        _refined, aliases=_REFINED, first_class="RWForCausalLM", lora=("query_key_value",),
        ia3=("query_key_value", "dense_4h_to_h"), files=FileTraits(tied_head=True),
    ),
    "RefinedWebModel": Family(
        _refined_7b, aliases=_REFINED, first_class="RWForCausalLM", lora=("query_key_value",),
        ia3=("query_key_value", "dense_4h_to_h"), files=FileTraits(tied_head=True),
    ),
}  # fmt: skip
