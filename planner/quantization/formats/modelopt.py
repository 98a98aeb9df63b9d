"""NVFP4 and FP8 formats of ModelOpt 0.33, with one algorithm for the whole model or one per layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.model.fields import shown
from tonnage.planner.quantization.fields import AT, skipped
from tonnage.planner.quantization.formats.fp8 import FP8, read_fp8
from tonnage.planner.quantization.formats.microscaling import MXFP4, MXFP8
from tonnage.planner.quantization.linear import Kind, LinearFormat, Storages
from tonnage.planner.quantization.rules import spelling
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.units import ceil_div

_BLOCK = 16  # number of values that share an fp8 scale (torch/quantization/qtensor/nvfp4_tensor.py)


def _nvfp4(f: LinearFormat, out: int, into: int, where: str) -> Storages:
    """Return the bytes of a matrix's tensors in NVFP4.

    They are two values per byte, an fp8 scale per 16 values, and a global scale.
    """
    scales = {"weight": out * ceil_div(into, 2), "weight_scale": out * ceil_div(into, _BLOCK)}
    return {**scales, "weight_scale_2": 4, **({"input_scale": 4} if f.input_scale else {})}


NVFP4 = Kind("nvfp4", _nvfp4)
FLAGS = {"nvfp4": LinearFormat(NVFP4, input_scale=True)}
_ALGORITHMS = {
    "FP8": LinearFormat(FP8, input_scale=True),
    "FP8_PER_CHANNEL_PER_TOKEN": LinearFormat(FP8, block=(1, 0)),
    "FP8_PB_WO": LinearFormat(FP8, block=(128, 128)),
    "NVFP4": LinearFormat(NVFP4, input_scale=True),
    "W4A16_NVFP4": LinearFormat(NVFP4),
    "NVFP4_AWQ": LinearFormat(NVFP4, input_scale=True),
    "MXFP8": LinearFormat(MXFP8),
    "MXFP4": LinearFormat(MXFP4),
}


def _format(algorithm: object, field: str) -> LinearFormat:
    """Return the format of ModelOpt's algorithm `algorithm`, from the config field `field`."""
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise UnsupportedArchitecture(f"{shown(algorithm)} is not supported yet", field=f"{AT}.{field}")
    return _ALGORITHMS[algorithm]


def _read(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    """Return the quantization in ModelOpt's config: one algorithm, or MIXED_PRECISION with one per layer.

    If the config has no list of excluded modules, only the output head stays in 16 bits, as by ModelOpt 0.33's
    default.
    """
    algorithm = found.get("quant_algo")
    skip = skipped(found, "exclude_modules", "ignore")
    layers = found.get("quantized_layers")
    if algorithm == "MIXED_PRECISION" or (algorithm is None and layers):
        return Quantization("modelopt-mixed", skip, AT, named=_layers(layers), method="modelopt")
    made = _format(algorithm, "quant_algo")
    return Quantization(str(algorithm).lower(), skip, AT, made, method="modelopt")


def _layers(layers: object) -> dict[str, LinearFormat]:
    """Return ModelOpt's config field `quantized_layers` as a dict from a module's name to its format."""
    if not isinstance(layers, dict) or not layers:
        raise ConfigError(
            f"{shown(layers)} is not an object that maps modules to formats", field=f"{AT}.quantized_layers"
        )
    out = {}
    for name, entry in layers.items():
        algorithm = entry.get("quant_algo") if isinstance(entry, dict) else None
        out[spelling(name)] = _format(algorithm, f"quantized_layers.{name[:80]}")
    return out


def _read_mixed(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    """Return the quantization in DeepSeek-V4's ModelOpt config: NVFP4 experts, block-scaled FP8 elsewhere."""
    base = read_fp8({k: v for k, v in found.items() if k != "quantized_layers"}, config)
    named = _layers(found["quantized_layers"])
    kinds = set(named.values())
    if len(kinds) != 1 or not all(name.endswith("experts") for name in named):
        raise UnsupportedArchitecture(
            "only routed experts may have another format than other modules", field=f"{AT}.quantized_layers"
        )
    return Quantization("fp8-block+nvfp4", None, AT, base.linear, experts=kinds.pop(), method="modelopt")


READERS = {"modelopt": _read, "modelopt_fp4": _read, "fp8-mixed": _read_mixed}
