"""Storage of one quantized linear weight [out, in]: a `LinearFormat` is a `Kind` of format with parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tonnage.planner.units import ceil_div

Storages = dict[str, int]
"""Name of a stored tensor -> its bytes."""
Parts = Callable[[Any, int, int, str], Storages]
"""(format, out, in, module name) -> stored tensors of one matrix. Raises UnsupportedArchitecture."""


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A storage format of linear weights, and the modules that its quantization tool replaces.

    Attributes:
        parts: function that returns the bytes of each stored tensor of one matrix after load.
        loaded: kernel name (a value of `Engine.kernels`) -> function like `parts`, for kernels that repack
            weights on load.
        warmed: kernel name -> function like `parts`, for kernels that repack weights in the first forward pass.
        extra_in_file: function that returns the bytes per matrix that the file has and the loaded model has
            not; negative if the file has fewer bytes.
        text_in_file: function that returns the (fewest, most) bytes of a text that the file stores with a
            matrix of a given dtype and shape.
        suffix: end of the tensor's name in the file, if it is not `.weight`.
        stored_as: dtype of the stored values; None if the scheme's name states it.
        classes: classes of the replaced modules. `KeptLinear`, an nn.Linear in a family's
            _keep_in_fp32_modules, is never replaced (transformers 5.19, quantizers/base.py).
        while_loading: whether the tool converts 16-bit weights on load. It then converts every nn.Linear,
            routers included, except experts and heads. Tools with other formats leave routers unquantized.
        language_model_only: whether vision and audio towers stay unquantized.
        detail: function that returns text to describe a format beyond the scheme's name.
    """

    name: str
    parts: Parts
    loaded: Mapping[str, Parts] = field(default_factory=dict)
    warmed: Mapping[str, Parts] = field(default_factory=dict)
    extra_in_file: Callable[[Any], int] = lambda f: 0
    text_in_file: Callable[[Any, str, tuple[int, ...]], tuple[int, int]] | None = None
    suffix: str | None = None
    stored_as: str | None = None
    classes: tuple[str, ...] = ("Linear",)
    while_loading: bool = False
    language_model_only: bool = False
    detail: Callable[[Any], str] | None = None


@dataclass(frozen=True, slots=True)
class LinearFormat:
    """The storage format of one linear layer's quantized weight.

    Attributes:
        kind: the kind of format.
        bits: bits per value.
        group_size: number of values that share a scale.
        block: (rows, columns) that share a scale, 0 for all rows or all columns; None for one scale per matrix.
        scale_bytes: bytes of one scale.
        input_scale: whether a static activation scale (fp32) is stored as well.
        double: whether NF4's absmax values are quantized again.
        symmetric: whether all zero points of GPTQ are equal; the file stores them anyway.
        code: `nf4` or `fp4`.
    """

    kind: Kind
    bits: int = 4
    group_size: int = 128
    double: bool = False
    block: tuple[int, int] | None = None
    scale_bytes: int = 4
    zero_points: bool = True
    act_order: bool = False
    input_scale: bool = False
    symmetric: bool = True
    code: str = "nf4"

    def groups(self, into: int) -> int:
        """Return the number of quantization groups along the `into` inputs of a matrix."""
        return 1 if self.group_size == -1 else ceil_div(into, self.group_size)

    def parts(self, out: int, into: int, where: str = "") -> Storages:
        """Return the bytes of each stored tensor of a quantized matrix [out, into] after load."""
        return self.kind.parts(self, out, into, where)

    def loaded_by(self, kernel: str | None, out: int, into: int, where: str = "") -> Storages:
        """Return the bytes of each stored tensor of a matrix [out, into] loaded by an engine with `kernel`."""
        return self.kind.loaded.get(kernel or "", self.kind.parts)(self, out, into, where)

    def after_warmup(self, kernel: str | None, out: int, into: int, where: str = "") -> Storages:
        """Return the bytes of each stored tensor of a matrix [out, into] after `kernel` has run once.

        Without a kernel they are the bytes after load.
        """
        changed = self.kind.warmed.get(kernel or "")
        return changed(self, out, into, where) if changed else self.loaded_by(kernel, out, into, where)
