"""FP8 weights of DeepSeek, transformers and FBGEMM: one byte per value and a scale per matrix, row or block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families.registry import family_of
from tonnage.planner.model.fields import shown
from tonnage.planner.quantization.fields import AT, sides_of, skipped
from tonnage.planner.quantization.formats.microscaling import MXFP4
from tonnage.planner.quantization.linear import Kind, LinearFormat, Storages
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.units import ceil_div


def bytes_and_scales(f: LinearFormat, out: int, into: int, where: str) -> Storages:
    """Return the bytes of the stored tensors of a matrix [out, into]: one byte per value, and scales.

    The format's `block` has the rows and columns that share a scale. A 0 means all rows, or all columns.
    """
    if f.block is None:
        scales = 1
    else:
        rows, columns = (side or size for side, size in zip(f.block, (out, into), strict=True))
        scales = ceil_div(out, rows) * ceil_div(into, columns)
    parts = {"weight": out * into, "weight_scale": scales * f.scale_bytes}
    return {**parts, "input_scale": 4} if f.input_scale else parts


FP8 = Kind("fp8", bytes_and_scales)
FLAGS = {
    "fp8": LinearFormat(FP8),
    "fp8-channel": LinearFormat(FP8, block=(1, 0)),
    "fp8-block": LinearFormat(FP8, block=(128, 128)),
}


def read_fp8(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    """Return the quantization in an FP8 config of DeepSeek or transformers, with its scales.

    There is one fp32 scale per 128 x 128 block or per matrix.
    """
    block = found.get("weight_block_size")
    size, static = sides_of(block), _activations(found)
    if block is not None and size is None:
        raise ConfigError(f"{shown(block)} is not two positive integers", field=f"{AT}.weight_block_size")
    files = family_of(config.get("model_type")).files
    exponent = found.get("scale_fmt") == "ue8m0" and files.exponent_scales
    made = LinearFormat(FP8, block=size, input_scale=static, scale_bytes=1 if exponent else 4)
    experts = LinearFormat(MXFP4) if config.get("expert_dtype") == "fp4" else None
    skip = skipped(found, "modules_to_not_convert", "ignored_layers")
    return Quantization("fp8-block" if block else "fp8", skip, AT, made, experts=experts, method="fp8")


def _activations(found: dict[str, Any]) -> bool:
    """Return whether an FP8 config has static activation scales, which are stored with the weights."""
    scheme = found.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static", None):
        raise UnsupportedArchitecture(
            f"{shown(scheme)} is not dynamic or static", field=f"{AT}.activation_scheme"
        )
    return bool(scheme == "static")


def _read_fbgemm(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    """Return the quantization in an FP8 config of FBGEMM, with an fp32 scale per output row."""
    skip = skipped(found, "modules_to_not_convert")
    return Quantization("fp8-channel", skip, AT, FLAGS["fp8-channel"], method="fbgemm_fp8")


READERS = {"fp8": read_fp8, "fbgemm_fp8": _read_fbgemm}
