"""Architecture: what the forward pass holds, tensor by tensor, before any engine or flag is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tonnage.planner.model.layout import GroupKind
from tonnage.planner.model.tensor import TOWER_ROLES, TensorSpec

if TYPE_CHECKING:  # not loaded for families without one
    from tonnage.planner.model.recipe import Recipe
    from tonnage.planner.model.vision import Vision


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor one layer keeps per sequence, whatever its length. ``dtype`` None: the model's dtype.
    Tensor parallelism divides ``shape[shard_dim]`` (None: every rank holds all). ``chunk``: tokens that its
    kernel takes at once (Mamba-2)."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    shard_dim: int | None = 0
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """What one layer keeps while it generates.

    ``full``, ``sliding``, ``chunked``, ``cross``: ``kv_heads`` x (``head_size`` for K +
    ``value_head_size`` for V, None: the same) elements per token. ``mla``: one latent of ``head_size``
    elements per token (compressed KV and the rotary key), the same on every rank; an engine that expands
    it keeps ``Architecture.heads`` x (``Architecture.head_size`` for K + ``value_head_size`` for V).
    ``state``: ``states``
    per sequence, nothing per token.

    ``window`` counts the tokens a query sees, itself included (``chunked``: the chunk size).
    ``transformers_kv_heads`` differs from ``kv_heads`` where transformers repeats K and V before it
    stores them. ``shares``: the layer whose cache this one reads; it stores nothing itself.
    ``compression``: one entry stands for so many tokens. ``index_size``: elements of the sparse indexer's key
    per token, beside (0: no indexer). ``source_tokens``: the most tokens a cross-attention cache holds (the
    encoder's output), None where the request decides.
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
        """Elements of one cached entry (one token, or ``compression`` tokens), without the indexer's key."""
        if self.kind == "mla":
            return self.head_size
        value = self.head_size if self.value_head_size is None else self.value_head_size
        return self.kv_heads * (self.head_size + value)


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary embedding: rotated dimensions per head, and how many distinct frequency tables there are
    (Gemma 3: one for full, one for sliding layers). ``mrope``: a position has three axes (time and a
    picture's two). ``positions``: rows of a table where they are not ``max_model_len``."""

    dim: int
    tables: int
    mrope: bool = False
    positions: int | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """Shapes of a model; ``tensors`` and ``cache_layers`` in layer order.

    ``layers``, ``hidden_size`` ... are those of the language model (of the decoder, where there is an
    encoder too). ``cache_layers`` is empty for an encoder. ``experts`` and ``experts_per_token`` count
    routed experts (0: dense); ``intermediate_size`` is the widest MLP of one token (with MoE: all experts
    a token goes through, and the shared ones). ``unread``: switches of the config that no adapter knows and
    that may add biases and norms to ``tensors``. ``recipe``: the layers as data (None: not written as one).
    ``vision``: the tower that reads pictures, where its processor's sizes are known.
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
    position_field: str  # the config field max_model_len came from
    gated_mlp: bool = True
    experts: int = 0
    experts_per_token: int = 0
    kind: Literal["decoder", "encoder-decoder", "encoder"] = "decoder"
    unread: tuple[str, ...] = ()
    via: Literal["adapter", "meta"] = "adapter"  # meta: transformers' own modules (planner/families/meta.py)
    recipe: Recipe | None = None
    vision: Vision | None = None

    @property
    def parameters(self) -> int:
        """Parameters, each tied tensor counted once (as ``model.parameters()`` does)."""
        return sum(t.elements for t in self.tensors if t.is_parameter and t.tied_to is None)

    @property
    def tower_parameters(self) -> dict[str, int]:
        """Parameters of vision, audio and projector modules by role; empty for a text model."""
        out: dict[str, int] = {}
        for tensor in self.tensors:
            if tensor.role in TOWER_ROLES and tensor.tied_to is None:
                out[tensor.role] = out.get(tensor.role, 0) + tensor.elements
        return out

    @property
    def attention(self) -> str:
        kinds = {layer.kind for layer in self.cache_layers}
        if kinds == {"state"}:
            return "none"
        if "mla" in kinds:
            return "MLA"
        if self.kv_heads == self.heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"
