"""Encoders in BERT's layout: BERT, RoBERTa, XLM-RoBERTa, CamemBERT, MPNet and DistilBERT.

The planner supports the bare encoder (``...Model``), the encoder with its pretraining head
(``...ForMaskedLM``), and a classifier. Shapes follow transformers 5.19. An encoder reads a whole text in one
step and keeps nothing between steps, so it has no KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.family import Family, FileTraits, VLLMTraits
from tonnage.planner.families.seq2seq import IGNORED, Kind, wanted
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import CLASSIFIERS, Architecture, Rotary
from tonnage.planner.model.fields import Fields, label_count, shown

# Config fields about training, the tokenizer or other heads, found in published files. No tensor shape depends
# on these fields.
_NO_SHAPE = (
    "attention_probs_dropout_prob", "hidden_dropout_prob", "directionality", "pooler_fc_size",
    "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type",
    "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "output_past", "activation",
)  # fmt: skip
_SPLADE = "BertSpladeSparseEmbeddingModel"


@dataclass(frozen=True, slots=True)
class EncoderVariant:
    """Module names and optional modules of one family of BERT-like encoders.

    Attributes:
        name: prefix of the class names (``Bert`` of ``BertForMaskedLM``).
        body: name of the encoder's module in a model with a head.
        layers: name of the module that holds the layers.
        names: module names in a layer: query, key, value, attention output, its norm, MLP up, MLP down, last
            norm.
        token_types: whether there is an embedding table of token types.
        pooler: whether the bare encoder has a pooler.
        pooled: whether the classifier reads the pooler's output.
        unused: number of rows at the start of the position table that no token uses; None means pad_token_id +
            1.
        buckets: whether there is a table of relative position buckets besides the absolute positions.
        masked_head: names of the dense layer, norm and decoder of the pretraining head.
        rotary: whether the family may have rotary positions instead of a table (Jina's XLM-RoBERTa; vLLM
            0.32.0, models/bert_with_rope.py).
        shared_bias: parameter of the pretraining head to which the decoder's bias may be tied; None means there
            is none.
        classifier: linear layers of the classifier; all but the last keep the hidden size.
    """

    name: str
    body: str
    layers: str = "encoder.layer"
    names: tuple[str, ...] = (
        "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
        "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm",
    )  # fmt: skip
    token_types: bool = True
    pooler: bool = True
    pooled: bool = False
    unused: int | None = 0
    buckets: bool = False
    rotary: bool = False
    masked_head: tuple[str, str, str] = ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder")
    shared_bias: str | None = "lm_head.bias"
    classifier: tuple[str, ...] = ("classifier.dense", "classifier.out_proj")

    def build(self, fields: Fields, model_type: str) -> Architecture:
        """Return the architecture of a BERT-like encoder of this family from its checked config."""
        class_name, kind = wanted_class(fields, self.name)
        dims, layers, vocab = common.sizes(fields)
        hidden = dims.hidden
        inner = fields.integer("intermediate_size", limit="width")
        positions = fields.integer("max_position_embeddings", limit="positions")
        rotates = self.rotary and fields.raw("position_embedding_type") == "rotary"
        if not rotates and fields.raw("position_embedding_type") not in (None, "absolute"):
            raise UnsupportedArchitecture(
                f"{shown(fields.raw('position_embedding_type'))} is not supported; only absolute positions are",
                field="position_embedding_type",
            )
        t = Tensors()
        masks = class_name.endswith("ForMaskedLM") or class_name == _SPLADE
        headed = masks or not class_name.endswith("Model")
        at = f"{self.body}." if headed else ""
        _embeddings(t, at, fields, self, (vocab, positions, hidden), table=not rotates)
        for _, layer in t.layers(layers, f"{at}{self.layers}"):
            query, key, value, out, norm, up, down, last = (f"{layer}.{name}" for name in self.names)
            for name in (query, key, value):
                t.linear(name, hidden, hidden, bias=True, shard="column")
            t.linear(out, hidden, hidden, bias=True, shard="row")
            t.norm(norm, hidden, "layer")
            t.linear(up, inner, hidden, "mlp", bias=True, shard="column")
            t.linear(down, hidden, inner, "mlp", bias=True, shard="row")
            t.norm(last, hidden, "layer")
        if self.buckets:
            t.embedding(
                f"{at}encoder.relative_attention_bias",
                fields.integer("relative_attention_num_buckets", 32, limit="vocab"), dims.heads,
            )  # fmt: skip
        if self.pooler and (not headed or (self.pooled and class_name.endswith("ForSequenceClassification"))):
            t.linear(f"{at}pooler.dense", hidden, hidden, "mlp", bias=True)
        if masks:
            _masked_head(t, fields, self, vocab, hidden)
        elif headed:
            _classifier(t, fields, self, hidden, tagger=class_name.endswith("ForTokenClassification"))
        longest = text_length(fields, positions - (0 if rotates else _unused(fields, self)))
        rotary = Rotary(dims.head_size, 1, positions=-(-positions // 8) * 8) if rotates else None
        return common.decoder(
            fields, model_type, class_name, t, dims, (), layers=layers, inner=inner, vocab=vocab, rotary=rotary,
            max_model_len=longest, gated=False, kind=kind,
        )  # fmt: skip


def wanted_class(fields: Fields, name: str) -> tuple[str, Kind]:
    """Return (class that the config names in ``architectures``, its kind: encoder or kind of head).

    Without ``architectures``, the class is the bare encoder.

    Raises:
        UnsupportedArchitecture: the config turns the encoder into a decoder, whose layers differ, or names an
            unknown class.
    """
    common.refuse(fields, "is_decoder", "add_cross_attention", why=f"{name} is planned as an encoder only")
    known: dict[str, Kind] = {f"{name}{suffix}": "encoder" for suffix in ("Model", "ForMaskedLM", *CLASSIFIERS)}
    if name == "Bert":  # vLLM's class for sparse embeddings has the masked-LM head (models/bert.py)
        known[_SPLADE] = "encoder"
    return wanted(fields, known, f"{name}Model")


def text_length(fields: Fields, positions: int) -> int:
    """Return the maximum text length in tokens: ``positions``, or less if sentence-transformers limits it.

    The limit is ``max_seq_length`` of sentence_bert_config.json, which planner/source/resolve.py adds to the
    fields of config.json.
    """
    if positions < 1:
        raise UnsupportedArchitecture(
            "is too small: the position table has no rows after the row of the padding token",
            field="max_position_embeddings",
        )
    return min(positions, fields.optional_integer("max_seq_length", limit="positions") or positions)


def _unused(fields: Fields, variant: EncoderVariant) -> int:
    """Return the number of rows at the start of the position table that no token uses."""
    if variant.unused is None:
        return fields.integer("pad_token_id", 1, limit="vocab", minimum=0) + 1
    return variant.unused


def _embeddings(
    t: Tensors, at: str, fields: Fields, variant: EncoderVariant, sizes: tuple[int, int, int], *, table: bool
) -> None:
    """Add the tensors of the word, position and token-type embeddings and of their norm.

    ``sizes`` is (vocabulary, positions, width); ``table`` says whether there is a table of positions.
    """
    vocab, positions, hidden = sizes
    t.vocabulary(f"{at}embeddings.word_embeddings", vocab, hidden)
    if table:
        t.embedding(f"{at}embeddings.position_embeddings", positions, hidden)
        t.buffer(f"{at}embeddings.position_ids", (1, positions), "Embeddings", "int64")
    if variant.token_types:
        types = fields.integer("type_vocab_size", 2, limit="vocab")
        t.embedding(f"{at}embeddings.token_type_embeddings", types, hidden)
        t.buffer(f"{at}embeddings.token_type_ids", (1, positions), "Embeddings", "int64")
    t.norm(f"{at}embeddings.LayerNorm", hidden, "layer")


def _masked_head(t: Tensors, fields: Fields, variant: EncoderVariant, vocab: int, hidden: int) -> None:
    """Add the tensors of the pretraining head: a dense layer, its norm and the matrix to the vocabulary.

    With tie_word_embeddings, this matrix is the word embedding.
    """
    tied = fields.boolean("tie_word_embeddings", True)
    words = f"{variant.body}.embeddings.word_embeddings.weight"
    dense, norm, decoder = variant.masked_head
    bias = variant.shared_bias
    t.linear(dense, hidden, hidden, "head", bias=True)
    t.norm(norm, hidden, "layer")
    t.head(decoder, vocab, hidden, words if tied else None)
    if bias is not None:
        t.add(bias, (vocab,), "head", "Head", shard=0)
    t.add(f"{decoder}.bias", (vocab,), "head", "Linear", shard=0, tied_to=bias if tied else None)


def _classifier(t: Tensors, fields: Fields, variant: EncoderVariant, hidden: int, *, tagger: bool) -> None:
    """Add the linear layers of a classification head.

    With ``tagger`` the head classifies tokens and has one layer; otherwise it classifies texts.
    """
    *inner, last = ("classifier",) if tagger else variant.classifier
    for name in inner:
        t.linear(name, hidden, hidden, "head", bias=True)
    t.linear(last, label_count(fields), hidden, "head", bias=True)


_family = partial(
    Family, ignored=(*IGNORED, *_NO_SHAPE), reads_class=True,
    files=FileTraits(renamed=True, sentence_length=True),
)  # fmt: skip
FAMILIES = {
    "bert": _family(
        EncoderVariant(
            "Bert", "bert", pooled=True, classifier=("classifier",), shared_bias="cls.predictions.bias",
            masked_head=(
                "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm",
                "cls.predictions.decoder",
            ),
        ).build,
        hf="encoder", vllm=VLLMTraits(embeddings="BertModel", masked="BertForMaskedLM"),
    ),
    "roberta": _family(
        EncoderVariant("Roberta", "roberta", unused=None).build, hf="encoder",
        vllm=VLLMTraits(embeddings="RobertaModel", masked="RobertaForMaskedLM"),
    ),
    "xlm-roberta": _family(
        EncoderVariant("XLMRoberta", "roberta", unused=None, rotary=True).build, hf="encoder",
        vllm=VLLMTraits(embeddings="XLMRobertaModel"),
    ),
    "camembert": _family(EncoderVariant("Camembert", "roberta", unused=None).build, hf="encoder"),
    "mpnet": _family(
        EncoderVariant(
            # Position ids start at 2, whatever pad_token_id is (MPNetEmbeddings.padding_idx).
            "MPNet", "mpnet", token_types=False, unused=2, buckets=True,
            names=(
                "attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o",
                "attention.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm",
            ),
        ).build,
    ),
    "distilbert": _family(
        EncoderVariant(
            "DistilBert", "distilbert", "transformer.layer", token_types=False, pooler=False,
            names=(
                "attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin",
                "sa_layer_norm", "ffn.lin1", "ffn.lin2", "output_layer_norm",
            ),
            masked_head=("vocab_transform", "vocab_layer_norm", "vocab_projector"), shared_bias=None,
            classifier=("pre_classifier", "classifier"),
        ).build,
        aliases={
            "hidden_size": "dim", "intermediate_size": "hidden_dim", "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
        },
    ),
}  # fmt: skip
