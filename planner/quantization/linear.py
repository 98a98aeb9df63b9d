"""How one linear weight [out, in] is stored: a `LinearFormat`, the parameters of one `Kind` of format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Storages = dict[str, int]
"""Name of a stored tensor -> its bytes."""
Parts = Callable[[Any, int, int, str], Storages]
"""(format, out, in, module name) -> stored tensors of one matrix. Raises UnsupportedArchitecture."""


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A way of storing linear weights, and the modules that the tool behind it replaces.

    Attributes:
        parts: bytes of each stored tensor of one matrix after load.
        loaded: the same by kernel name (`Engine.kernels`), for kernels that repack on load.
        warmed: the same by kernel name, for kernels that repack in the first forward pass.
        extra_in_file: bytes in the file that are not loaded; negative if the file has fewer.
        text_in_file: (fewest, most) bytes of a text stored beside a matrix of that shape and dtype.
        suffix: the tensor's name in the file, where it does not end in `.weight`.
        stored_as: dtype of the values; None if the scheme's name states it.
        classes: classes of the replaced modules. `KeptLinear`, an nn.Linear in a family's
            _keep_in_fp32_modules, is never replaced (transformers 5.19, quantizers/base.py).
        while_loading: whether every nn.Linear is converted on load, routers included, experts and heads
            excepted. Tools with other formats leave routers unquantized.
        language_model_only: whether vision and audio towers stay unquantized.
        detail: text that describes a format besides the scheme's name.
    """

    name: str
    parts: Parts
    loaded: Mapping[str, Parts] = field(default_factory=dict)
    warmed: Mapping[str, Parts] = field(default_factory=dict)
    extra_in_file: Callable[[Any], int] | None = None
    text_in_file: Callable[[Any, str, tuple[int, ...]], tuple[int, int]] | None = None
    suffix: str | None = None
    stored_as: str | None = None
    classes: tuple[str, ...] = ("Linear",)
    while_loading: bool = False
    language_model_only: bool = False
    detail: Callable[[Any], str] | None = None


@dataclass(frozen=True, slots=True)
class LinearFormat:
    """The storage format of one linear layer.

    Attributes:
        block: (rows, columns) that share a scale, 0 for a whole side; None for one scale per matrix.
        scale_bytes: bytes of one scale.
        input_scale: whether a static activation scale (fp32) is stored as well.
        double: whether NF4's absmax values are quantized again.
        symmetric: whether all zero points of GPTQ are equal; they are stored anyway.
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

    def parts(self, out: int, into: int, where: str = "") -> Storages:
        """Return the bytes of each stored tensor of a matrix [out, into] after load."""
        return self.kind.parts(self, out, into, where)

    def loaded_by(self, kernel: str | None, out: int, into: int, where: str = "") -> Storages:
        """Return the bytes of each stored tensor once an engine with `kernel` has loaded the matrix."""
        return self.kind.loaded.get(kernel or "", self.kind.parts)(self, out, into, where)

    def after_warmup(self, kernel: str | None, out: int, into: int, where: str = "") -> Storages:
        """Return the bytes of each stored tensor after `kernel` has run once.

        Without a kernel they are the bytes after load.
        """
        changed = self.kind.warmed.get(kernel or "")
        return changed(self, out, into, where) if changed else self.loaded_by(kernel, out, into, where)

    @property
    def extra_in_file(self) -> int:
        """Return the bytes per matrix that the file has and the loaded model lacks."""
        return self.kind.extra_in_file(self) if self.kind.extra_in_file else 0
