"""Bytes of each tensor under a quantization scheme: in the file, after load, and after the first forward pass.

The bytes after load are those of the process's memory: storages of parameters, buffers and quantization state.
Tests compare them with bitsandbytes 0.50 on a CPU, with difference 0 (tests/planner/test_quantization_real.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tonnage.planner.errors import DeploymentError
from tonnage.planner.model.dtypes import ELEMENT_BYTES
from tonnage.planner.model.tensor import TOWER_ROLES, TensorSpec
from tonnage.planner.quantization.linear import LinearFormat
from tonnage.planner.quantization.rules import Patterns, spelling

_SIZES: dict[tuple[LinearFormat, tuple[int, int, int]], int] = {}


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization of a model's linear weights, module by module.

    Attributes:
        scheme: name of the scheme, printed and compared with --quantization.
        skip: modules left in the model's dtype. None means transformers' default rule: the output head and
            modules tied to it (5.19, quantizers/base.py get_keys_to_not_convert).
        origin: flag or config field that requests the quantization, for error messages.
        linear: format of all linear layers outside `named`; None if only modules in `named` are quantized.
        named: module name, normalized as by `rules.spelling` -> the format of that module.
        experts: format of routed experts if it differs from `linear`, else None.
        method: quant_method of the checkpoint; None if a flag requests the quantization.
    """

    scheme: str = "none"
    skip: Patterns | None = None
    origin: str = "--quantization"
    linear: LinearFormat | None = None
    named: Mapping[str, LinearFormat] = field(default_factory=dict)
    experts: LinearFormat | None = None
    method: str | None = None

    def format_of(self, tensor: TensorSpec) -> LinearFormat | None:
        """Return the quantization format of the weight `tensor`, or None if it stays in its dtype."""
        if self.scheme == "none" or tensor.role in ("norm", "buffer", "embedding"):
            return None
        kind = self._default().kind
        if tensor.role == "router" and not kind.while_loading:
            return None
        if tensor.role == "expert":
            return self._expert_format(tensor)
        if not tensor.name.endswith(".weight") or len(tensor.shape) != 2:
            return None
        # DeepSeek-V4's grouped projection is a subclass of nn.Linear; FP8 checkpoints quantize it as nn.Linear
        classes = kind.classes if kind.while_loading else (*kind.classes, "GroupedLinear")
        if tensor.module_class not in classes:
            return None
        if self.named:
            own = self.named.get(spelling(tensor.module))
            if own is not None or self.linear is None:
                return own
        if kind.language_model_only and tensor.role in TOWER_ROLES:
            return None
        if self.skip is not None and self.skip.match(tensor.module):
            return None
        if tensor.role == "head" and (self.skip is None or not kind.while_loading):
            return None
        return self.linear

    def _expert_format(self, tensor: TensorSpec) -> LinearFormat | None:
        """Return the quantization format of routed experts' weights, or None if they stay in their dtype."""
        # transformers' fused experts are parameters instead of nn.Linear, so bitsandbytes does not convert them
        if self._default().kind.while_loading or len(tensor.shape) != 3 or tensor.name.endswith("_bias"):
            return None
        chosen = self.experts or self.linear
        if self.named:
            at = spelling(tensor.module)
            first = "up_proj" if tensor.name.endswith(("up_proj", "gate_up_proj")) else "down_proj"
            for name in (at, f"{at}.0.{first}", f"{at}.0.{'w3' if first == 'up_proj' else 'w2'}"):
                if name in self.named:
                    return self.named[name]
            if self.linear is None and self.experts is None:
                return None
        if self.skip is not None and (
            self.skip.match(tensor.module)
            or self.skip.match(f"{tensor.module}.0.{tensor.name.rpartition('.')[2]}")
        ):
            return None
        return chosen

    def _default(self) -> LinearFormat:
        """Return the scheme's main format: of linear layers, else of experts, else of its first module."""
        return self.linear or self.experts or next(iter(self.named.values()))

    def converts(self, tensor: TensorSpec) -> bool:
        """Return whether the scheme quantizes the weight `tensor`."""
        return self.format_of(tensor) is not None

    def bytes_after_load(self, tensor: TensorSpec, dtype: str) -> int:
        """Return the bytes of `tensor` in memory after load, for a model in `dtype`; 0 for a tied tensor."""
        if tensor.tied_to is not None:
            return 0
        found = self.format_of(tensor)
        if found is None:
            return tensor.elements * ELEMENT_BYTES[tensor.dtype or dtype]
        return self._bytes(tensor, found)

    def loaded_parts(self, tensor: TensorSpec, kernels: Mapping[str, str]) -> dict[str, int]:
        """Return name -> bytes of the tensors that store one quantized weight after an engine has loaded it.

        `kernels` maps the name of a format to the kernel that repacks it.
        """
        found = self.format_of(tensor) or self._default()
        return self._parts(tensor, found, kernels.get(found.kind.name))

    def bytes_in_file(self, tensor: TensorSpec, dtype: str) -> int:
        """Return the bytes of `tensor` in the checkpoint's files; a buffer that files do not store counts 0."""
        if tensor.tied_to is not None or not (tensor.is_parameter or tensor.stored):
            return 0
        found = self.format_of(tensor)
        if found is None and tensor.stored is not None:
            return tensor.elements * ELEMENT_BYTES[dtype if tensor.stored == "model" else tensor.stored]
        extra = 0 if found is None else matrices(tensor)[0] * found.kind.extra_in_file(found)
        return self.bytes_after_load(tensor, dtype) + extra

    def bytes_after_warmup(self, tensor: TensorSpec, dtype: str, kernel: str | None) -> int:
        """Return the bytes of `tensor` in memory after the first forward pass with `kernel`."""
        found = self.format_of(tensor) if tensor.tied_to is None else None
        if found is None:
            return self.bytes_after_load(tensor, dtype)
        count, out, into = matrices(tensor)
        return count * sum(found.after_warmup(kernel, out, into, tensor.module).values())

    def parts(self, tensor: TensorSpec) -> dict[str, int]:
        """Return name -> bytes of the tensors that store one quantized weight [out, in]."""
        found = self.format_of(tensor) or self.linear
        if found is None:
            raise DeploymentError(f"{tensor.name} is not quantized", field=self.origin)
        return self._parts(tensor, found)

    def _bytes(self, tensor: TensorSpec, found: LinearFormat) -> int:
        """Return the bytes of all tensors that store one weight, cached because layers share a few shapes."""
        key = (found, matrices(tensor))
        size = _SIZES.get(key)
        if size is None:
            if len(_SIZES) > 4096:  # the limit keeps the cache small in a sweep over many models
                _SIZES.clear()
            size = _SIZES[key] = sum(self._parts(tensor, found).values())
        return size

    def _parts(self, tensor: TensorSpec, found: LinearFormat, kernel: str | None = None) -> dict[str, int]:
        """Return name -> bytes of the tensors that store a weight in the format `found`, loaded by `kernel`."""
        count, out, into = matrices(tensor)
        parts = found.loaded_by(kernel, out, into, tensor.module)
        return {name: count * size for name, size in parts.items()}

    def describe(self) -> str:
        """Return the quantization scheme's name and the details of its format as text."""
        detail = self.linear.kind.detail if self.linear is not None else None
        return f"{self.scheme}, {detail(self.linear)}" if detail else self.scheme


def matrices(tensor: TensorSpec) -> tuple[int, int, int]:
    """Return (count, out, in): the number of matrices that store a weight, and their shape [out, in].

    Each expert is stored as a matrix of its own.
    """
    if len(tensor.shape) == 2:
        rows, columns = tensor.shape
        return (1, columns, rows) if tensor.module_class == "Conv1D" else (1, rows, columns)
    experts, rows, columns = tensor.shape
    if tensor.transposed:
        rows, columns = columns, rows
    return experts * tensor.matrices, rows // tensor.matrices, columns
