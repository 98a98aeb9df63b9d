"""BERT: an encoder alone. Shapes after transformers 5.19, models/bert/."""

from __future__ import annotations

from typing import Any

from tonnage.planner.architecture import Architecture
from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.common import Heads, Tensors
from tonnage.planner.families.seq2seq import IGNORED, Kind, wanted
from tonnage.planner.fields import Fields


def build(fields: Fields, model_type: str) -> Architecture:
    """An encoder keeps nothing between requests: no cache."""
    fields.ignore(*IGNORED)
    known: dict[str, Kind] = {"BertModel": "encoder"}
    class_name, kind = wanted(fields, known, "BertModel")
    hidden = fields.integer("hidden_size", limit="width")
    heads = fields.integer("num_attention_heads", limit="heads")
    common.divisible(hidden, heads, "hidden_size", "num_attention_heads")
    layers = fields.integer("num_hidden_layers", limit="layers")
    vocab = fields.integer("vocab_size", limit="vocab")
    inner = fields.integer("intermediate_size", limit="width")
    positions = fields.integer("max_position_embeddings", limit="positions")
    types = fields.integer("type_vocab_size", 2, limit="vocab")
    if fields.raw("position_embedding_type") not in (None, "absolute"):
        raise UnsupportedArchitecture("only absolute positions are planned", field="position_embedding_type")
    fields.ignore("hidden_dropout_prob", "directionality", "pooler_fc_size", "pooler_num_attention_heads")
    fields.ignore("pooler_num_fc_layers", "pooler_size_per_head", "pooler_type")
    t = Tensors()
    t.vocabulary("embeddings.word_embeddings", vocab, hidden)
    t.embedding("embeddings.position_embeddings", positions, hidden)
    t.embedding("embeddings.token_type_embeddings", types, hidden)
    t.norm("embeddings.LayerNorm", hidden, "layer")
    t.buffer("embeddings.position_ids", (1, positions), "BertEmbeddings", "int64")
    t.buffer("embeddings.token_type_ids", (1, positions), "BertEmbeddings", "int64")
    for _, at in t.layers(layers, "encoder.layer"):
        for name in ("query", "key", "value"):
            t.linear(f"{at}.attention.self.{name}", hidden, hidden, bias=True, shard="column")
        t.linear(f"{at}.attention.output.dense", hidden, hidden, bias=True, shard="row")
        t.norm(f"{at}.attention.output.LayerNorm", hidden, "layer")
        t.plain_mlp(at, hidden, inner, bias=True, names=("intermediate.dense", "output.dense"))
        t.norm(f"{at}.output.LayerNorm", hidden, "layer")
    t.linear("pooler.dense", hidden, hidden, "head", bias=True)
    more: dict[str, Any] = {"max_model_len": positions, "gated": False, "kind": kind}
    return common.decoder(
        fields, model_type, class_name, t, Heads(hidden, heads, heads, hidden // heads), (), layers=layers,
        inner=inner, vocab=vocab, **more,
    )  # fmt: skip
