"""What a tape records: sizes symbolic in batch and sequence, tensors, and how a stack's kernels keep them."""

from __future__ import annotations

from typing import NamedTuple

from tonnage.planner.records import dataclass, field


class Kernels(NamedTuple):
    """How a stack's own modules differ from transformers'.

    ``as_input``: adapters read the module's input as it is, without PEFT's fp32 copy. ``fp32_norm``: torch's
    F.rms_norm of the input in fp32, made of single operations. ``repeats_kv``: K and V are copied for every
    query head. ``tables``: ``shared`` by all layers, a ``buffer`` of the model, or, of packed sequences,
    ``taken`` from it by position for each use. ``compiled``: ``inductor``, torch.compile, whose
    partitioner (functorch/partitioners.py, 2.13) recomputes pointwise operations in the backward pass but keeps
    what a matrix product reads in both passes; ``least``, that recomputed too. ``layers_only``: not the head.
    ``quantized``: the layers' matrices are unpacked for each use, not cast."""

    as_input: bool = False
    fp32_norm: bool = False
    repeats_kv: bool = False
    tables: str = "shared"
    compiled: str = ""
    layers_only: bool = False
    quantized: bool = False


@dataclass(frozen=True, slots=True)
class Size:
    """A count or a number of bytes: ``token`` x b s + ``score`` x b s^2 + ``position`` x s + ``mask`` x b s^2 +
    ``fixed``."""

    token: int = 0
    score: int = 0
    position: int = 0
    mask: int = 0
    fixed: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(
            self.token + other.token, self.score + other.score, self.position + other.position,
            self.mask + other.mask, self.fixed + other.fixed,
        )  # fmt: skip

    def times(self, factor: int) -> Size:
        return Size(
            self.token * factor, self.score * factor, self.position * factor, self.mask * factor,
            self.fixed * factor,
        )  # fmt: skip

    def at(self, batch: int, length: int) -> int:
        """The value for ``batch`` sequences of ``length`` tokens."""
        square = length * length
        return (
            self.token * batch * length + self.score * batch * square + self.position * length
            + self.mask * batch * square + self.fixed
        )  # fmt: skip


@dataclass(slots=True)
class Value:
    """A tensor: ``size`` in elements, ``width`` bytes each, whether it needs a gradient, whether tensor
    parallelism splits it. ``base``: the tensor whose storage it shares. ``pointwise``: a compiler can compute
    it again from what is kept anyhow, ``instead``: from this as well."""

    size: Size
    width: int
    grad: bool
    split: bool = False
    base: Value | None = None
    pointwise: bool = False
    instead: Value | None = None
    casts: dict[int, Value] = field(default_factory=dict)

    @property
    def storage(self) -> Value:
        return self if self.base is None else self.base.storage
