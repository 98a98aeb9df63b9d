"""Weight-only integer formats of torchao 0.14."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.model.fields import shown
from tonnage.planner.quantization.fields import AT, size_of, skipped
from tonnage.planner.quantization.linear import Kind, LinearFormat, Storages
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.units import ceil_div


def _int4(f: LinearFormat, out: int, into: int, where: str) -> Storages:
    """Return the bytes of a matrix's tensors in int4_wo: values, a bf16 scale and zero point per group."""
    return {"packed_weight": out * into // 2, "scale_and_zero": 4 * out * ceil_div(into, f.group_size)}


def _int8(f: LinearFormat, out: int, into: int, where: str) -> Storages:
    """Return the bytes of a matrix's tensors in int8_wo: one byte per value and a scale per row."""
    return {"int_data": out * into, "scale": f.scale_bytes * out}


INT4, INT8 = Kind("torchao-int4", _int4), Kind("torchao-int8", _int8)
FLAGS = {"torchao-int4": LinearFormat(INT4), "torchao-int8": LinearFormat(INT8, scale_bytes=2)}


def _read(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    """Return the quantization that a `quantization_config` of torchao describes."""
    kind = found.get("quant_type")
    if isinstance(kind, dict):  # torchao >= 0.9 writes its config dataclass as JSON
        inner = kind.get("default", kind)
        kind = inner.get("_type") if isinstance(inner, dict) else None
        arguments = inner.get("_data", {}) if isinstance(inner, dict) else {}
    else:
        arguments = found.get("quant_type_kwargs") or {}
    if not isinstance(arguments, dict):
        raise ConfigError(f"{shown(arguments)} is not an object", field=f"{AT}.quant_type")
    skip = skipped(found, "modules_to_not_convert")
    if kind in ("int4_weight_only", "Int4WeightOnlyConfig"):
        made = LinearFormat(INT4, group_size=size_of(arguments, "group_size", 128))
        return Quantization("torchao-int4", skip, AT, made, method="torchao")
    if kind in ("int8_weight_only", "Int8WeightOnlyConfig"):
        return Quantization("torchao-int8", skip, AT, FLAGS["torchao-int8"], method="torchao")
    raise UnsupportedArchitecture(f"{shown(kind)} is not supported yet", field=f"{AT}.quant_type")


READERS = {"torchao": _read}
