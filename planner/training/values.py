"""Values of a tape: sizes symbolic in batch and sequence, tensors, and the kernels of a training stack."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Kernels(NamedTuple):
    """How the modules of a training stack differ from transformers' in what they keep.

    Attributes:
        as_input: adapters read the module's input without PEFT's fp32 copy.
        fp32_norm: RMSNorm is torch's F.rms_norm of the input in fp32, composed of single operations.
        repeats_kv: K and V are copied for every query head.
        tables: rotary tables are `shared` by all layers, a `buffer` of the model, or for packed sequences
            `taken` from it by position for each use.
        compiled: `inductor` for torch.compile. Its partitioner (functorch/partitioners.py, 2.13) recomputes
            pointwise operations in the backward pass, but keeps inputs of matrix products. `least` recomputes
            these as well.
        layers_only: the head is not compiled.
        quantized: the layers' matrices are unpacked for each use instead of cast.
    """

    as_input: bool = False
    fp32_norm: bool = False
    repeats_kv: bool = False
    tables: str = "shared"
    compiled: str = ""
    layers_only: bool = False
    quantized: bool = False


@dataclass(frozen=True, slots=True)
class Extent:
    """A number of elements or bytes as a polynomial in batch b and sequence s.

    The value is `token` x b s + `score` x b s^2 + `position` x s + `mask` x b s^2 + `fixed`.
    """

    token: int = 0
    score: int = 0
    position: int = 0
    mask: int = 0
    fixed: int = 0

    def __add__(self, other: Extent) -> Extent:
        return Extent(
            self.token + other.token, self.score + other.score, self.position + other.position,
            self.mask + other.mask, self.fixed + other.fixed,
        )  # fmt: skip

    def times(self, factor: int) -> Extent:
        """Return the size times a factor."""
        return Extent(
            self.token * factor, self.score * factor, self.position * factor, self.mask * factor,
            self.fixed * factor,
        )  # fmt: skip

    def at(self, batch: int, length: int) -> int:
        """Return the value for `batch` sequences of `length` tokens."""
        square = length * length
        return (
            self.token * batch * length + self.score * batch * square + self.position * length
            + self.mask * batch * square + self.fixed
        )  # fmt: skip


@dataclass(slots=True)
class Value:
    """A tensor on a tape.

    Attributes:
        size: elements.
        width: bytes of one element.
        grad: whether it needs a gradient.
        split: whether tensor parallelism splits it.
        base: the tensor whose storage it shares.
        pointwise: whether a compiler can recompute it from kept tensors.
        instead: a smaller tensor that a compiler keeps to recompute it.
        casts: casts of it by width, for a compiler that casts once.
    """

    size: Extent
    width: int
    grad: bool
    split: bool = False
    base: Value | None = None
    pointwise: bool = False
    instead: Value | None = None
    casts: dict[int, Value] = field(default_factory=dict)

    @property
    def storage(self) -> Value:
        """Return the tensor that owns the storage."""
        return self if self.base is None else self.base.storage
