"""ModernBERT: an encoder with rotary positions whose layers alternate between full and sliding attention.

Shapes follow transformers 5.19, models/modernbert/.
"""

from __future__ import annotations

from tonnage.planner.families import common
from tonnage.planner.families.bert import text_length, wanted_class
from tonnage.planner.families.family import Family, FileTraits, VLLMTraits
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture, Rotary
from tonnage.planner.model.fields import Fields, label_count
from tonnage.planner.model.recipe import Heads

# Config fields about training and output heads. No tensor shape depends on these fields.
_NO_SHAPE = (
    "classifier_activation", "classifier_dropout", "classifier_pooling", "decoder_bias", "classifier_bias",
    "deterministic_flash_attn", "initializer_cutoff_factor", "local_attention", "mlp_dropout", "pooling_mode",
    "reference_compile", "repad_logits_with_grad", "sparse_pred_ignore_index", "sparse_prediction",
    "layer_norm_eps", "position_embedding_type", "attention_layer", "cls_token_id",
)  # fmt: skip


def build(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a ModernBERT model from its checked config."""
    class_name, kind = wanted_class(fields, "ModernBert")
    dims = common.heads_of(fields)
    hidden, heads, head_size = dims.hidden, dims.heads, dims.head_size
    layers, vocab = common.layers_and_vocab(fields)
    inner = fields.integer("intermediate_size", limit="width")
    positions = fields.integer("max_position_embeddings", 8192, limit="positions")
    norm = "layer" if fields.boolean("norm_bias", False) else "layer-weight"
    attention_bias, mlp_bias = fields.boolean("attention_bias", False), fields.boolean("mlp_bias", False)
    kinds = _kinds(fields, layers)
    t = Tensors()
    headed = not class_name.endswith("Model")
    at = "model." if headed else ""
    t.vocabulary(f"{at}embeddings.tok_embeddings", vocab, hidden)
    t.norm(f"{at}embeddings.norm", hidden, norm)
    for index, layer in t.layers(layers, f"{at}layers"):
        if index:  # layer 0 has no attention norm, because a norm follows the embedding
            t.norm(f"{layer}.attn_norm", hidden, norm)
        t.linear(f"{layer}.attn.Wqkv", 3 * hidden, hidden, bias=attention_bias, shard="column")
        t.linear(f"{layer}.attn.Wo", hidden, hidden, bias=attention_bias, shard="row")
        t.norm(f"{layer}.mlp_norm", hidden, norm)
        t.plain_mlp(f"{layer}.mlp", hidden, inner, bias=mlp_bias, names=("Wi", "Wo"), fused_gate=True)
    t.norm(f"{at}final_norm", hidden, norm)
    t.rotary(head_size, *(f"{at}rotary_emb.{kind}_" for kind in sorted(set(kinds))))
    if headed:
        _head(t, fields, class_name, norm, vocab, hidden)
    rotary = Rotary(head_size, _tables(fields, kinds), positions=positions)
    return common.decoder(
        fields, model_type, class_name, t, Heads(hidden, heads, heads, head_size), (), layers=layers,
        inner=inner, vocab=vocab, rotary=rotary, max_model_len=text_length(fields, positions), kind=kind,
    )  # fmt: skip


def _kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    """Return the attention kind of each layer.

    ``layer_types`` states it; otherwise every ``global_attn_every_n_layers``-th layer (default 3), from layer 0
    on, has full attention.
    """
    every = fields.integer("global_attn_every_n_layers", 3, limit="layers")
    listed = fields.layer_types(layers)
    if listed is not None:
        return listed
    return tuple("sliding_attention" if i % every else "full_attention" for i in range(layers))


def _tables(fields: Fields, kinds: tuple[str, ...]) -> int:
    """Return how many distinct rotary tables an engine keeps for a ModernBERT model.

    ``rope_parameters`` states the parameters per attention kind. The first published files state
    global_rope_theta and local_rope_theta instead (defaults 160,000 and 10,000).
    """
    fields.ignore("rope_theta", "rope_scaling")
    given = fields.raw("rope_parameters")
    thetas = {
        "full_attention": fields.number("global_rope_theta", 160_000.0),
        "sliding_attention": fields.number("local_rope_theta", 10_000.0),
    }
    seen = set()
    for kind in set(kinds):
        rope = given.get(kind) if isinstance(given, dict) else None
        if rope is not None:
            common.rope_kind(rope, f"rope_parameters.{kind}")
        seen.add(repr(sorted(rope.items())) if isinstance(rope, dict) else repr(thetas[kind]))
    return len(seen)


def _head(t: Tensors, fields: Fields, class_name: str, norm: str, vocab: int, hidden: int) -> None:
    """Add the tensors of ModernBERT's head: dense layer, norm, and projection to vocabulary or labels."""
    t.linear("head.dense", hidden, hidden, "head", bias=fields.boolean("classifier_bias", False))
    t.norm("head.norm", hidden, norm)
    if class_name.endswith("ForMaskedLM"):
        tied = fields.boolean("tie_word_embeddings", True)
        words = "model.embeddings.tok_embeddings.weight" if tied else None
        t.head("decoder", vocab, hidden, words, bias=fields.boolean("decoder_bias", True))
    else:
        t.linear("classifier", label_count(fields), hidden, "head", bias=True)


FAMILIES = {
    "modernbert": Family(
        build, ignored=_NO_SHAPE, reads_class=True, hf="encoder", vllm=VLLMTraits(embeddings="ModernBertModel"),
        files=FileTraits(renamed=True, sentence_length=True),
    ),
}  # fmt: skip
