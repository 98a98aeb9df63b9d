"""MXFP4 and MXFP8 of the OCP Microscaling formats 1.0 (section 5.2): an 8-bit exponent per 32 values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.quantization.fields import AT, skipped
from tonnage.planner.quantization.linear import Kind, LinearFormat, Storages
from tonnage.planner.quantization.rules import compile_patterns
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.units import ceil_div

_BLOCK = 32


def _mxfp4(f: LinearFormat, out: int, into: int, where: str) -> Storages:
    """Return the bytes of a matrix's tensors in MXFP4: two values per byte, one exponent per 32 values."""
    return {"blocks": ceil_div(out * into, 2), "scales": out * ceil_div(into, _BLOCK)}


def _mxfp8(f: LinearFormat, out: int, into: int, where: str) -> Storages:
    """Return the bytes of a matrix's tensors in MXFP8: one value per byte, one exponent per 32 values."""
    return {"weight": out * into, "weight_scale": out * ceil_div(into, _BLOCK)}


MXFP4, MXFP8 = Kind("mxfp4", _mxfp4), Kind("mxfp8", _mxfp8)
FLAGS = {"mxfp4": LinearFormat(MXFP4), "mxfp8": LinearFormat(MXFP8)}


def _read(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    """Return the quantization in gpt-oss' MXFP4 config, by default of the routed experts only."""
    skip = skipped(found, "modules_to_not_convert")
    if skip is None:
        skip = compile_patterns(["*.self_attn.*", "*.router", "lm_head"], AT)
    return Quantization("mxfp4", skip, AT, FLAGS["mxfp4"], method="mxfp4")


READERS = {"mxfp4": _read}
