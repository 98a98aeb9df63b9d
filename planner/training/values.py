"""Tensors of a symbolic forward pass, with sizes as polynomials in batch and sequence length."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Kernels(NamedTuple):
    """Differences between a training stack's modules and transformers' modules in the tensors that they keep.

    Attributes:
        as_input: whether adapters read the module's input without PEFT's fp32 copy.
        fp32_norm: whether RMSNorm is torch's F.rms_norm of the input in fp32, composed of single operations.
        repeats_kv: whether K and V are copied for every query head.
        tables: the rotary tables: `shared` by all layers, a `buffer` of the model, or `taken` from that buffer
            by position for each use (packed sequences).
        compiled: empty (not compiled), `inductor` or `least`. With `inductor`, torch.compile's partitioner
            (functorch/partitioners.py, 2.13) recomputes pointwise operations in the backward pass, but keeps
            the inputs of matrix products. With `least`, these inputs are recomputed as well.
        layers_only: whether only the layers are compiled, not the head.
        quantized: whether the layers' matrices are unpacked for each use instead of cast.
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
    """A number of elements or bytes as a polynomial in batch b and sequence length s (tokens).

    The value is `token` x b s + `score` x b s^2 + `position` x s + `mask` x b s^2 + `fixed`. `score` counts
    attention scores, which selective checkpointing recomputes. `mask` counts attention masks.
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
        """Return this polynomial in batch and sequence length with all coefficients multiplied by `factor`."""
        return Extent(
            self.token * factor, self.score * factor, self.position * factor, self.mask * factor,
            self.fixed * factor,
        )  # fmt: skip

    def at(self, batch: int, length: int) -> int:
        """Return the polynomial's value for `batch` sequences of `length` tokens."""
        square = length * length
        return (
            self.token * batch * length + self.score * batch * square + self.position * length
            + self.mask * batch * square + self.fixed
        )  # fmt: skip


@dataclass(slots=True)
class Value:
    """A tensor of the symbolic forward pass (`Tape`), with its size, element width and properties.

    Attributes:
        size: number of elements, as a polynomial in batch and sequence length.
        width: bytes of one element.
        grad: whether the tensor needs a gradient.
        split: whether tensor parallelism splits the tensor.
        base: the tensor whose storage this view shares, None for a tensor with its own storage.
        pointwise: whether a compiler can recompute the tensor from kept tensors.
        instead: a smaller tensor that a compiler keeps in place of this one, to recompute it.
        casts: copies of the tensor in other dtypes, by bytes per element; a compiler casts only once.
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
        """Return the tensor that owns the storage: this tensor, or the tensor behind a chain of views."""
        return self if self.base is None else self.base.storage
