"""GTE's own encoder (model_type ``new``): BERT with rotary positions and a gated MLP.

Shapes follow vLLM 0.32.0 (models/bert_with_rope.py, GteNewModel). The published files name the classes NewModel
and NewForSequenceClassification; --hf-overrides replaces them by vLLM's names, which begin with ``Gte``.
"""

from __future__ import annotations

from tonnage.planner.families import common
from tonnage.planner.families.bert import text_length
from tonnage.planner.families.family import Family, FileTraits, VLLMTraits
from tonnage.planner.families.seq2seq import Kind, wanted
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture, Rotary
from tonnage.planner.model.fields import Fields, label_count
from tonnage.planner.model.recipe import Heads

_NO_SHAPE = (
    "attention_probs_dropout_prob", "hidden_dropout_prob", "layer_norm_eps", "logn_attention_scale",
    "logn_attention_clip1", "unpad_inputs", "use_memory_efficient_attention", "classifier_dropout",
    "rotary_emb_dim",
)  # fmt: skip
_CLASSIFIER = "GteNewForSequenceClassification"


def build(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a GTE encoder, or of a classifier on it, from its checked config."""
    known: dict[str, Kind] = dict.fromkeys(
        ("GteNewModel", _CLASSIFIER, "NewModel", "NewForMaskedLM", "NewForSequenceClassification"), "encoder"
    )
    name, kind = wanted(fields, known, "GteNewModel")
    name = _CLASSIFIER if name.endswith("ForSequenceClassification") else "GteNewModel"
    common.only(
        fields, position_embedding_type="rope", layer_norm_type="layer_norm", hidden_act="gelu", pack_qkv=True
    )
    dims = common.heads_of(fields)
    hidden, heads, size = dims.hidden, dims.heads, dims.head_size
    layers, vocab = common.layers_and_vocab(fields)
    inner = fields.integer("intermediate_size", limit="width")
    types = fields.integer("type_vocab_size", 1, limit="vocab", minimum=0)
    positions = fields.integer("max_position_embeddings", limit="positions")
    at = "new." if name == _CLASSIFIER else ""
    t = Tensors()
    t.vocabulary(f"{at}embeddings.word_embeddings", vocab, hidden)
    if types:
        t.embedding(f"{at}embeddings.token_type_embeddings", types, hidden)
    t.norm(f"{at}embeddings.LayerNorm", hidden, "layer")
    for _, layer in t.layers(layers, f"{at}encoder.layer"):
        t.linear(f"{layer}.attention.qkv_proj", 3 * hidden, hidden, bias=True, shard="column")
        t.linear(f"{layer}.attention.o_proj", hidden, hidden, bias=True, shard="row")
        t.norm(f"{layer}.attn_ln", hidden, "layer")
        t.linear(f"{layer}.mlp.up_gate_proj", 2 * inner, hidden, "mlp", shard="column")
        t.linear(f"{layer}.mlp.down_proj", hidden, inner, "mlp", bias=True, shard="row")
        t.norm(f"{layer}.mlp_ln", hidden, "layer")
    if name == _CLASSIFIER:
        t.linear(f"{at}pooler.dense", hidden, hidden, "mlp", bias=True)
        t.linear("classifier", label_count(fields), hidden, "head", bias=True)
    t.rotary(size, f"{at}embeddings.rotary_emb.")
    return common.decoder(
        fields, model_type, name, t, Heads(hidden, heads, heads, size), (), layers=layers, inner=inner,
        vocab=vocab, rotary=Rotary(size, 1), max_model_len=text_length(fields, positions), kind=kind,
    )  # fmt: skip


FAMILIES = {
    "new": Family(
        build,
        ignored=_NO_SHAPE,
        reads_class=True,
        files=FileTraits(sentence_length=True),
        hf="encoder",
        vllm=VLLMTraits(embeddings="GteNewModel"),
    )
}
