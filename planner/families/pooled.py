"""Classes of vLLM's registry that pool a known model's hidden states: rewards, late interaction, embeddings.

Such a class builds the model without its output head, and adds a small head of its own. Some of the classes run
a decoder with attention in both directions, which keeps no KV cache. The heads follow vLLM 0.32.0,
model_executor/models/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import Fields, label_count, shown
from tonnage.planner.model.tensor import TensorSpec

Heads = Callable[[Fields, Architecture], tuple[TensorSpec, ...]]
# Config fields with the width of the vectors of late interaction (models/colbert.py, colqwen3.py), in the order
# in which vLLM reads them
_WIDTHS = ("embed_dim", "dims", "colbert_dim", "dim", "projection_dim")

_WIDTH = 128  # vector width of ColBERTv2, GTE-ModernColBERT and LFM2-ColBERT; their config.json lacks it


def _linear(name: str, out: int, into: int, *, bias: bool = True, wide: bool = True) -> tuple[TensorSpec, ...]:
    """Return the tensors of a pooling head's linear layer, which is never quantized.

    The layer is in float32 if ``wide`` (vLLM's ModelConfig.head_dtype).
    """
    dtype = "float32" if wide else None
    weight = TensorSpec(f"{name}.weight", (out, into), "head", "KeptLinear", dtype=dtype)
    return (weight, replace(weight, name=f"{name}.bias", shape=(out,))) if bias else (weight,)


def _no_head(fields: Fields, body: Architecture) -> tuple[TensorSpec, ...]:
    return ()


def _reward(fields: Fields, body: Architecture, *, labels: int) -> tuple[TensorSpec, ...]:
    """Return the tensors of Qwen2's reward head, two layers.

    vLLM fixes the number of labels (models/qwen2_rm.py).
    """
    width = body.hidden_size
    return (*_linear("score.0", width, width), *_linear("score.2", labels, width))


def _value(fields: Fields, body: Architecture) -> tuple[TensorSpec, ...]:
    """Return the tensors of InternLM2's value head, which gives a reward (models/internlm2.py)."""
    return _linear("v_head", 1, body.hidden_size, bias=False)


def _labels(fields: Fields, body: Architecture, *, name: str, wide: bool) -> tuple[TensorSpec, ...]:
    """Return the tensor of a classification head without bias: a matrix, one row per label in the config."""
    return _linear(name, label_count(fields), body.hidden_size, bias=False, wide=wide)


def _ranking(fields: Fields, body: Architecture) -> tuple[TensorSpec, ...]:
    """Return the tensors of jina-reranker-v3's projector to 512 values (models/jina.py, config.py)."""
    width = body.hidden_size
    first = _linear("projector.0", width // 2, width, bias=False, wide=False)
    return (*first, *_linear("projector.2", 512, width // 2, bias=False, wide=False))


def _scorer(fields: Fields, body: Architecture) -> tuple[TensorSpec, ...]:
    """Return the tensors of jina-reranker-m0's scoring head, which has one label (models/jina_vl.py)."""
    width = body.hidden_size
    return (*_linear("score.dense", width, width), *_linear("score.out_proj", 1, width))


def _bge(fields: Fields, body: Architecture) -> tuple[TensorSpec, ...]:
    """Return the tensors of BGE-M3's two heads: sparse and multi-vector embeddings (models/roberta.py)."""
    width = body.hidden_size
    return (*_linear("sparse_linear", 1, width), *_linear("colbert_linear", width, width))


def _stated_width(fields: Fields) -> str | None:
    """Return the name of the config field with the width of late-interaction vectors, None if none is set."""
    return next((field for field in _WIDTHS if fields.raw(field)), None)


def _late(
    fields: Fields, body: Architecture, *, name: str = "linear", bias: bool = False
) -> tuple[TensorSpec, ...]:
    """Return the tensors of the projection to late-interaction vectors.

    The config may state the vectors' width. If it does not, the planner assumes 128, but vLLM reads the width
    from the weights.
    """
    field = _stated_width(fields)
    width = fields.integer(field, limit="width") if field else _WIDTH
    return _linear(name, width, body.hidden_size, bias=bias)


def _aligner(fields: Fields, body: Architecture) -> tuple[TensorSpec, ...]:
    """Return the tensor of the head of Qwen3's forced aligner, with a row per time stamp.

    Source: models/qwen3_asr_forced_aligner.py.
    """
    published = fields.mapping("thinker_config")
    rows = (fields if published is None else Fields(published)).integer("classify_num", limit="vocab")
    return _linear("classifier", rows, body.hidden_size, bias=False, wide=False)


@dataclass(frozen=True, slots=True)
class PooledClass:
    """One class of vLLM that pools the hidden states of a known model.

    Attributes:
        types: model_type in config.json -> model_type of the pooled model's family in the planner.
        base: class of that family. The pooled class has the tensors of this class, except its output head.
        head: function that returns the tensors of the class's own head.
        both: whether attention is bidirectional, so that there is no KV cache.
        late: whether the head projects to vectors of late interaction, whose width the config may leave out.
        own: config fields that only this class reads, not the pooled model.
    """

    types: Mapping[str, str]
    base: str
    head: Heads = _no_head
    both: bool = False
    late: bool = False
    own: tuple[str, ...] = ()


_LLAMA = {"llama": "llama", "llama_bidirec": "llama"}
_QWEN3 = {"qwen3": "qwen3"}
_BI = ("pooling", "temperature", "num_labels", "id2label", "label2id", "is_causal", "problem_type")
_VISION = {"qwen3_vl": "qwen3_vl"}
_col = partial(_late, name="custom_text_proj")
_VL = (*_WIDTHS, "pooling")
CLASSES: dict[str, PooledClass] = {
    "Qwen2ForRewardModel": PooledClass({"qwen2": "qwen2"}, "Qwen2Model", partial(_reward, labels=1)),
    "Qwen2ForProcessRewardModel": PooledClass({"qwen2": "qwen2"}, "Qwen2Model", partial(_reward, labels=2)),
    "InternLM2ForRewardModel": PooledClass({"internlm2": "internlm2"}, "InternLM2Model", _value),
    "LlamaBidirectionalModel": PooledClass(_LLAMA, "LlamaModel", both=True, own=_BI),
    "LlamaBidirectionalForSequenceClassification": PooledClass(
        _LLAMA, "LlamaModel", partial(_labels, name="score", wide=True), both=True, own=_BI
    ),
    "DeepseekV3BidirectionalModel": PooledClass({"deepseek_v3": "deepseek_v3"}, "DeepseekV3Model", own=_BI),
    "VoyageQwen3BidirectionalEmbedModel": PooledClass(
        _QWEN3, "Qwen3Model", partial(_labels, name="linear", wide=False), both=True, own=_BI
    ),
    "JinaEmbeddingsV5Model": PooledClass(_QWEN3, "Qwen3Model", own=("jina_task", "task_names")),
    "JinaForRanking": PooledClass(_QWEN3, "Qwen3Model", _ranking, own=("embedding_size",)),
    "JinaVLForRanking": PooledClass(
        {"qwen2_vl": "qwen2_vl"}, "Qwen2VLForConditionalGeneration", _scorer, own=("num_labels",)
    ),
    "BgeM3EmbeddingModel": PooledClass({"xlm-roberta": "xlm-roberta"}, "XLMRobertaModel", _bge, both=True),
    "HF_ColBERT": PooledClass({"bert": "bert"}, "BertModel", _late, both=True, late=True, own=_WIDTHS),
    "ColBERTModernBertModel": PooledClass(
        {"modernbert": "modernbert"}, "ModernBertModel", _late, both=True, late=True, own=_WIDTHS
    ),
    "ColBERTJinaRobertaModel": PooledClass(
        {"xlm-roberta": "xlm-roberta"}, "XLMRobertaModel", _late, both=True, late=True,
        own=(*_WIDTHS, "use_flash_attn", "rotary_emb_base", "use_reg_tokens", "num_reg_tokens", "emb_pooler"),
    ),
    "ColBERTLfm2Model": PooledClass({"lfm2": "lfm2"}, "Lfm2Model", _late, late=True, own=_WIDTHS),
    "ColQwen3": PooledClass(
        {**_VISION, "colqwen3": "qwen3_vl"}, "Qwen3VLForConditionalGeneration", _col, late=True, own=_VL
    ),
    "OpsColQwen3Model": PooledClass(
        {**_VISION, "ops_colqwen3": "qwen3_vl"}, "Qwen3VLForConditionalGeneration", _col, late=True, own=_VL
    ),
    "Qwen3VLNemotronEmbedModel": PooledClass(
        {**_VISION, "qwen3_vl_nemotron_embed": "qwen3_vl"}, "Qwen3VLForConditionalGeneration", _col, late=True,
        own=_VL,
    ),
    "ColQwen3_5": PooledClass(
        {"qwen3_5": "qwen3_5", "colqwen3_5": "qwen3_5"}, "Qwen3_5ForConditionalGeneration",
        partial(_col, bias=True), late=True, own=_VL,
    ),
    "Qwen3ASRForcedAlignerForTokenClassification": PooledClass(
        {"qwen3_asr": "qwen3_asr"}, "Qwen3ASRForConditionalGeneration", _aligner, own=("classify_num",)
    ),
}  # fmt: skip


def base_config(config: Mapping[str, Any]) -> tuple[PooledClass, dict[str, Any]] | None:
    """Return the pooled class (`PooledClass`) that a config names, and the config of the model that it pools.

    The result is None when the config names no such class.

    Raises:
        UnsupportedArchitecture: the class is not known to pool a model of this ``model_type``.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return None
    if names[0] not in CLASSES:
        return None
    row, model_type = CLASSES[names[0]], config.get("model_type")
    if not isinstance(model_type, str) or model_type not in row.types:
        raise UnsupportedArchitecture(
            f"{shown(model_type)} is not supported for {names[0]}; {', '.join(row.types)} is",
            field="model_type",
        )
    left = {name: value for name, value in config.items() if name not in row.own}
    return row, {**left, "architectures": [row.base], "model_type": row.types[model_type]}


def pooled(row: PooledClass, config: Mapping[str, Any], body: Architecture) -> Architecture:
    """Return the architecture of a pooled class: ``body``, the pooled model, with the class's own head."""
    name = config["architectures"][0]
    kept = tuple(tensor for tensor in body.tensors if tensor.role != "head")
    found = replace(
        body, class_name=name, declared=(name,), tensors=(*kept, *row.head(Fields(config), body)), recipe=None,
        pooled=True,
    )  # fmt: skip
    if row.late and _stated_width(Fields(config)) is None:
        found = replace(found, assumed=(*found.assumed, f"colbert_dim {_WIDTH} of most such models"))
    if row.both:
        found = replace(found, kind="encoder", cache_layers=())
    return found
