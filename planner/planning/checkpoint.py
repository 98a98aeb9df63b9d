"""Bytes of a published checkpoint, from its config alone: what its index states as ``total_size``.

Beside the parameters, old files store what their code had: this module knows those cases by the file's own
``transformers_version`` or ``model_type``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.families.registry import family_of
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import ELEMENT_BYTES
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.records import dataclass

# bitsandbytes stores NF4's state of each module as JSON: the fixed text, the shape's digits, and an offset
# printed with 17 to 22 characters (bitsandbytes 0.50, functional.py QuantState.as_dict).
_JSON_DIGITS = (17, 22)


@dataclass(frozen=True, slots=True)
class CheckpointSize:
    """``low`` and ``high`` differ by the digits of NF4's offsets alone."""

    low: int
    high: int


def checkpoint_size(
    architecture: Architecture, quantization: Quantization, config: Mapping[str, Any], dtype: str
) -> CheckpointSize:
    """Bytes of all tensors in the checkpoint's files."""
    total = sum(quantization.bytes_in_file(tensor, dtype) for tensor in architecture.tensors)
    total += _old_buffers(architecture, config, dtype)
    if family_of(config.get("model_type")).files.tied_head:
        total += sum(t.elements for t in architecture.tensors if t.tied_to) * ELEMENT_BYTES[dtype]
    low = high = total
    for tensor in architecture.tensors:
        if quantization.converts(tensor) and quantization.scheme in ("nf4", "nf4-double", "fp4", "fp4-double"):
            fixed = len(_state_text(quantization.scheme, dtype, tensor.shape))
            double = quantization.scheme.endswith("double")
            low += fixed + (_JSON_DIGITS[0] if double else 0)
            high += fixed + (_JSON_DIGITS[1] if double else 0)
    return CheckpointSize(low, high)


def _state_text(scheme: str, dtype: str, shape: tuple[int, ...]) -> str:
    """The JSON text without the offset's digits."""
    rows, columns = shape
    text = f'{{"quant_type": "{scheme[:3]}", "blocksize": 64, "dtype": "{dtype}", "shape": [{rows}, {columns}]'
    if scheme.endswith("double"):
        text += ', "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": '
    return text + "}"


def _old_buffers(architecture: Architecture, config: Mapping[str, Any], dtype: str) -> int:
    """The masks of ``InFiles.masks_before``."""
    version, before = config.get("transformers_version"), family_of(architecture.model_type).files.masks_before
    if before is None or not isinstance(version, str):
        return 0
    numbers = version.split(".")[:2]
    if not all(part.isdigit() for part in numbers) or tuple(map(int, numbers)) >= before:
        return 0
    positions, size = architecture.max_model_len, ELEMENT_BYTES[dtype]
    rotary = architecture.rotary.dim if architecture.rotary else 0
    return architecture.layers * (positions * positions // 8 + size + rotary // 2 * size)
