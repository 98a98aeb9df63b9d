"""A tensor of a loaded model (TensorSpec), and as the header of a checkpoint describes it (HeaderTensor)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

Role = Literal[
    "embedding", "attention", "mlp", "expert", "router", "mixer", "norm", "head",
    "encoder", "vision", "audio", "projector", "buffer",
]  # fmt: skip
"""``mixer``: what stands in for attention (Mamba, delta net, convolution, RWKV). ``encoder``: the encoder of
an encoder-decoder model. ``vision``, ``audio``, ``projector``: towers, counted apart."""

TOWER_ROLES = ("vision", "audio", "projector")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the loaded model, named as in transformers' state dict.

    ``module_class`` is the class that owns it: quantizers replace by class (``Linear``, not its
    subclasses). ``tied_to`` names the tensor whose storage it shares: it costs nothing. ``dtype`` None:
    the model's dtype; buffers state their own. ``stored``: the dtype in published checkpoints (``model``: the
    model's). None: of a parameter ``dtype``, and a buffer is in none.

    Expert weights are one tensor [experts, out, in] (``transposed``: [experts, in, out]); a checkpoint
    stores ``matrices`` matrices per expert instead (2 for a fused gate and up projection).

    Tensor parallelism divides ``shape[shard_dim]`` (None: every rank holds all). Of it ``kv_rows`` belong
    to ``kv_units`` KV heads, which are not divided below one head.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    module_class: str
    layer: int | None = None
    tied_to: str | None = None
    dtype: str | None = None
    shard_dim: int | None = None
    kv_rows: int = 0
    kv_units: int = 0
    matrices: int = 1
    transposed: bool = False
    stored: str | None = None

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
class HeaderTensor:
    """``dtype`` in the file format's own spelling; ``shape`` in PyTorch order; ``nbytes`` in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
