"""Architecture: what the forward pass holds, tensor by tensor, before any engine or flag is known."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from tonnage.planner.layout import GroupKind

Role = Literal["embedding", "attention", "mlp", "norm", "head", "buffer"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the loaded model, named as in transformers' state dict.

    ``module_class`` is the class that owns it: quantizers replace by class (``Linear``, not its
    subclasses). ``tied_to`` names the tensor whose storage it shares: it costs nothing. ``dtype`` None:
    the model's dtype; buffers state their own.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    module_class: str
    layer: int | None = None
    tied_to: str | None = None
    dtype: str | None = None

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def is_parameter(self) -> bool:
        return self.role != "buffer"


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """K and V one layer keeps per token: 2 x ``kv_heads`` x ``head_size`` elements.

    ``window`` counts the tokens a query sees, itself included. ``transformers_kv_heads`` differs from
    ``kv_heads`` where transformers repeats K and V before it stores them.
    """

    layer: int
    kind: GroupKind
    window: int | None
    kv_heads: int
    head_size: int
    transformers_kv_heads: int | None = None


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary embedding: rotated dimensions per head, and how many distinct frequency tables there are
    (Gemma 3: one for full, one for sliding layers)."""

    dim: int
    tables: int


@dataclass(frozen=True, slots=True)
class Architecture:
    """Shapes of a dense decoder-only model; ``tensors`` and ``cache_layers`` in layer order."""

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

    @property
    def parameters(self) -> int:
        """Parameters, each tied tensor counted once (as ``model.parameters()`` does)."""
        return sum(t.elements for t in self.tensors if t.is_parameter and t.tied_to is None)

    @property
    def attention(self) -> str:
        if self.kv_heads == self.heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"
