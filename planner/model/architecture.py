"""Architecture: the tensor shapes and the KV cache layers of a model, independent of engine and flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tonnage.planner.model.layout import GroupKind
from tonnage.planner.model.tensor import TOWER_ROLES, TensorSpec

if TYPE_CHECKING:  # at run time, most model families do not need the imported modules
    from tonnage.planner.model.recipe import Recipe
    from tonnage.planner.model.vision import Vision


CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
"""Suffixes of classes whose head predicts labels from hidden states (transformers 5.23)."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of fixed size that one layer keeps per sequence, such as a Mamba state.

    Attributes:
        dtype: the tensor's dtype, or None for the model's dtype.
        shard_dim: dimension of `shape` that tensor parallelism divides; None if every rank holds the whole
            tensor.
        chunk: number of tokens that the Mamba-2 kernel processes at a time; None for other states.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    shard_dim: int | None = 0
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """The KV cache or recurrent state of one layer.

    A `full`, `sliding`, `chunked` or `cross` layer stores kv_heads x (head_size + value_head_size) elements per
    token. An `mla` layer stores one latent of head_size elements per token (compressed KV and the rotary key),
    the same on every rank. An engine that expands the latent stores Architecture.heads x
    (Architecture.head_size + value_head_size) elements. A `state` layer stores `states` per sequence and
    nothing per token.

    Attributes:
        window: number of tokens that a query attends to, including its own; for a `chunked` layer, the chunk
            size.
        transformers_kv_heads: number of KV heads that transformers caches, if it repeats K and V for all query
            heads before caching; else None.
        value_head_size: elements of V per head; None if it equals head_size.
        shares: index of the layer whose cache this layer reads instead of storing its own; else None.
        compression: tokens per cached entry.
        index_size: elements per token of the sparse indexer's key, which is cached in addition to K and V; 0
            without an indexer.
        source_tokens: maximum number of tokens in a cross-attention cache (the encoder's output); None if it
            depends on the request.
    """

    layer: int
    kind: GroupKind
    window: int | None
    kv_heads: int
    head_size: int
    transformers_kv_heads: int | None = None
    value_head_size: int | None = None
    states: tuple[StateTensor, ...] = ()
    shares: int | None = None
    compression: int = 1
    index_size: int = 0
    source_tokens: int | None = None

    @property
    def elements_per_entry(self) -> int:
        """Return the number of values in one KV cache entry (`compression` tokens), without indexer key."""
        if self.kind == "mla":
            return self.head_size
        value = self.head_size if self.value_head_size is None else self.value_head_size
        return self.kv_heads * (self.head_size + value)


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding of a model.

    Attributes:
        dim: rotated dimensions per head.
        tables: number of distinct frequency tables (Gemma 3: one for full, one for sliding layers).
        mrope: whether a position has three axes: time, height and width.
        positions: number of rows of the frequency table; None for max_model_len rows.
    """

    dim: int
    tables: int
    mrope: bool = False
    positions: int | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """The tensor shapes and sizes of a model; `tensors` and `cache_layers` are in layer order.

    `layers`, `hidden_size` and the other sizes describe the language model. In an encoder-decoder model, they
    describe the decoder.

    Attributes:
        intermediate_size: MLP width used per token; with MoE, the summed width of the selected experts and the
            shared experts.
        max_model_len: longest sequence in tokens.
        cache_layers: KV cache or state of each layer; empty for an encoder.
        declared: class names in the config field `architectures`.
        assumed: texts that name each size that the config leaves out, with the default value of transformers'
            config class that is used instead.
        position_field: the config field from which max_model_len was read.
        experts: number of routed experts; 0 for a dense model.
        experts_per_token: number of routed experts selected per token.
        index_topk: number of tokens that sparse attention selects for each query; 0 without sparse attention.
        pooled: whether the model's class pools the hidden states and has its own head (families/pooled.py).
        unread: boolean config fields that the planner does not know, and that may add biases or norms missing
            in `tensors`.
        via: source of the shapes: `adapter` for a function in planner/families, `meta` for transformers' own
            modules (planner/families/meta.py).
        recipe: description of the decoder's modules as data, or None if the model family has none.
        vision: the vision tower, or None if the image sizes of its processor are not known.
    """

    model_type: str
    class_name: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    max_model_len: int
    tensors: tuple[TensorSpec, ...]
    cache_layers: tuple[CacheLayer, ...]
    rotary: Rotary | None
    position_field: str
    gated_mlp: bool = True
    experts: int = 0
    experts_per_token: int = 0
    index_topk: int = 0
    kind: Literal["decoder", "encoder-decoder", "encoder"] = "decoder"
    pooled: bool = False
    unread: tuple[str, ...] = ()
    via: Literal["adapter", "meta"] = "adapter"
    recipe: Recipe | None = None
    vision: Vision | None = None
    declared: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def is_classifier(self) -> bool:
        """Return whether the model's head predicts labels (a classifier) instead of the next token."""
        return self.class_name.endswith(CLASSIFIERS)

    @property
    def parameters(self) -> int:
        """Return the model's number of parameters; a tied tensor counts once, as in `model.parameters()`."""
        return sum(t.elements for t in self.tensors if t.is_parameter and t.tied_to is None)

    @property
    def active_parameters(self) -> int:
        """Return the number of parameters used per token; only selected routed experts count."""
        if not self.experts:
            return self.parameters
        routed = sum(t.elements for t in self.tensors if t.role == "expert" and t.tied_to is None)
        return self.parameters - routed * (self.experts - self.experts_per_token) // self.experts

    @property
    def tower_parameters(self) -> dict[str, int]:
        """Return role -> parameter count of vision, audio and projector modules; empty for a text model."""
        out: dict[str, int] = {}
        for tensor in self.tensors:
            if tensor.role in TOWER_ROLES and tensor.tied_to is None:
                out[tensor.role] = out.get(tensor.role, 0) + tensor.elements
        return out

    @property
    def attention(self) -> str:
        """Return the model's kind of attention: MHA, GQA, MQA, MLA, or `none` if all layers are recurrent."""
        kinds = {layer.kind for layer in self.cache_layers}
        if kinds == {"state"}:
            return "none"
        if "mla" in kinds:
            return "MLA"
        if self.kv_heads == self.heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"
