"""HQQ: packed values, an fp16 scale and zero point per group (hqq 0.2, core/quantize.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.quantization.fields import AT, bits_of, size_of, skipped
from tonnage.planner.quantization.linear import Kind, LinearFormat, Storages
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.units import ceil_div


def _parts(f: LinearFormat, out: int, into: int, where: str) -> Storages:
    """Return the bytes of a matrix's tensors in HQQ: packed values, scales and zero points."""
    groups = ceil_div(out * into, f.group_size)
    return {"W_q": ceil_div(out * into * f.bits, 8), "scale": 2 * groups, "zero": 2 * groups}


HQQ = Kind("hqq", _parts)
FLAGS = {"hqq": LinearFormat(HQQ, group_size=64)}


def _read(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    """Return the quantization that a `quantization_config` of HQQ describes."""
    inner = found.get("quant_config")
    weights = inner.get("weight_quant_params") if isinstance(inner, dict) else None
    if not isinstance(weights, dict):
        raise UnsupportedArchitecture(
            "HQQ with different parameters for each layer is not supported", field=f"{AT}.quant_config"
        )
    bits = bits_of(weights, "nbits", (1, 2, 3, 4, 8))
    if bits == 3:
        raise UnsupportedArchitecture("HQQ with 3 bits is not supported", field=f"{AT}.quant_config.nbits")
    skip = skipped(found, "skip_modules")
    return Quantization(
        "hqq", skip, AT, LinearFormat(HQQ, bits, size_of(weights, "group_size", 64)), method="hqq"
    )


READERS = {"hqq": _read}
