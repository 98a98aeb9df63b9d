"""How one linear weight [out, in] is stored: a ``LinearFormat`` of some ``Kind`` (formats/)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tonnage.planner.records import dataclass, field

Storages = dict[str, int]
"""Bytes by the storage's name."""
Parts = Callable[[Any, int, int, str], Storages]
"""(LinearFormat, out, in, name of the module) -> storages of one matrix. Raises UnsupportedArchitecture."""


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A way of storing linear weights, and which weights the tool behind it replaces.

    ``parts``: the storages after load. ``loaded``, ``warmed``: what they are instead with an engine's kernel
    (Engine.kernels), once it has loaded them and after the first forward. ``extra_in_file``: bytes of the file
    that are not loaded (negative: fewer in the file); ``text_in_file``: (fewest, most) bytes of a text beside
    a matrix of that shape in a model of that dtype. ``suffix``: of the tensor in the file, where it is not
    ``.weight``. ``stored_as``: dtype of the values, None: the scheme's name says it.

    ``classes``: the modules that are replaced. ``KeptLinear``: an nn.Linear of a family's
    _keep_in_fp32_modules, which every quantizer of transformers leaves alone (5.19, quantizers/base.py).
    ``while_loading``: made of every nn.Linear while the model loads, a router too; experts and heads stay as
    they are, the other formats' tools leave routers alone. ``language_model_only``: towers stay.
    ``detail``: what is said of a format beside the scheme's name.
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
    """Format of one linear layer. ``block``: (rows, columns) that share a scale, 0 for the whole side, None:
    one scale for the matrix. ``scale_bytes``: of one scale. ``input_scale``: a static activation scale (fp32)
    is stored too. ``double``: the absmax of NF4 is quantized again. ``symmetric``: GPTQ's zero points are all
    the same (they are stored even so)."""

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
    code: str = "nf4"  # nf4 | fp4

    def parts(self, out: int, into: int, where: str = "") -> Storages:
        """Storages after load."""
        return self.kind.parts(self, out, into, where)

    def loaded_by(self, kernel: str | None, out: int, into: int, where: str = "") -> Storages:
        """Storages once an engine with that kernel has loaded the weight."""
        return self.kind.loaded.get(kernel or "", self.kind.parts)(self, out, into, where)

    def after_warmup(self, kernel: str | None, out: int, into: int, where: str = "") -> Storages:
        """Storages once that kernel has run; None: nothing is repacked."""
        changed = self.kind.warmed.get(kernel or "")
        return changed(self, out, into, where) if changed else self.loaded_by(kernel, out, into, where)

    @property
    def extra_in_file(self) -> int:
        return self.kind.extra_in_file(self) if self.kind.extra_in_file else 0
