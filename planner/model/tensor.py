"""Descriptions of tensors: TensorSpec for a loaded model, HeaderTensor for the header of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

Role = Literal[
    "embedding", "attention", "mlp", "expert", "router", "mixer", "norm", "head",
    "encoder", "vision", "audio", "projector", "buffer",
]  # fmt: skip
"""The part of a model to which a tensor belongs.

``mixer`` replaces attention (Mamba, delta net, convolution, RWKV). ``encoder`` is the encoder of an
encoder-decoder model. ``vision``, ``audio`` and ``projector`` are towers, which are counted separately.
"""

TOWER_ROLES = ("vision", "audio", "projector")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the loaded model, named as in transformers' state dict.

    The weights of all experts of a layer are one tensor [experts, out, in], or [experts, in, out] if
    `transposed`. A checkpoint stores each expert separately, as `matrices` matrices (2 for a fused gate and up
    projection).

    Attributes:
        module_class: class of the module that owns the tensor. Quantizers select modules by class (`Linear`,
            not its subclasses).
        tied_to: name of the tensor whose storage this tensor shares; None if it has its own. A tied tensor
            needs no memory.
        dtype: dtype of the loaded tensor, or None for the model's dtype. Buffers have a dtype of their own.
        shard_dim: dimension of `shape` that tensor parallelism divides; None if every rank holds the whole
            tensor.
        kv_rows: size of the part of dimension `shard_dim` that belongs to KV heads.
        kv_units: number of KV heads in `kv_rows`; a rank holds at least one whole head.
        stored: dtype in published checkpoints, `model` for the model's dtype. None means that a parameter is
            stored in `dtype`, and that a buffer is not stored.
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
        """Return the tensor's number of elements."""
        return prod(self.shape)

    @property
    def module(self) -> str:
        """Return the name of the module that owns the tensor."""
        return self.name.rpartition(".")[0]

    @property
    def is_parameter(self) -> bool:
        """Return whether the tensor is a parameter rather than a buffer."""
        return self.role != "buffer"


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """The entry of one tensor in the header of a safetensors or GGUF file.

    Attributes:
        dtype: dtype in the spelling of the file format.
        shape: shape in PyTorch's order.
        nbytes: bytes of the tensor in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
