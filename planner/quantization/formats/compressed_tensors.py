"""Formats of compressed-tensors (llm-compressor): groups of target modules, each with a weight scheme."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.model.fields import shown
from tonnage.planner.quantization.fields import AT, sides_of, size_of, skipped
from tonnage.planner.quantization.formats.fp8 import FP8, bytes_and_scales
from tonnage.planner.quantization.formats.microscaling import MXFP4
from tonnage.planner.quantization.formats.modelopt import NVFP4
from tonnage.planner.quantization.linear import Kind, LinearFormat, Storages
from tonnage.planner.quantization.rules import Patterns
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.units import ceil_div


def _packed(f: LinearFormat, out: int, into: int, where: str) -> Storages:
    """Return the bytes of a `pack-quantized` matrix's tensors (compressed-tensors 0.12, pack_quantized.py).

    They are the values packed along the inputs into int32 words, one scale per group in the model's dtype, and
    the matrix's shape as two int64.
    """
    groups = f.groups(into)
    per_word = 32 // f.bits
    parts = {
        "weight_packed": out * ceil_div(into, per_word) * 4,
        "weight_scale": out * groups * f.scale_bytes,
        "weight_shape": 16,
    }
    if f.zero_points:
        parts["weight_zero_point"] = ceil_div(out, per_word) * groups * 4
    if f.act_order:
        parts["weight_g_idx"] = into * 4
    return parts


PACKED, INT8 = Kind("packed", _packed), Kind("int-w8", bytes_and_scales)
FLAGS = {
    "w8a8": LinearFormat(INT8, block=(1, 0), scale_bytes=2),
    "w4a16": LinearFormat(PACKED, scale_bytes=2, zero_points=False),
}


def _read(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    """Return the quantization in a compressed-tensors config with one or two groups of modules."""
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ConfigError(
            f"{shown(groups)} is not an object that maps names to groups", field=f"{AT}.config_groups"
        )
    skip = skipped(found, "ignore")
    width = 4 if config.get("dtype", config.get("torch_dtype")) == "float32" else 2
    made: list[tuple[str, LinearFormat, list[str]]] = []
    for name, group in groups.items():
        where = f"{AT}.config_groups.{name}"
        if not isinstance(group, dict):
            raise ConfigError(f"{shown(group)} is not an object", field=where)
        stored = group.get("format") or found.get("format")
        made.append((*_group(group, stored, where, width), _targets(group, where)))
    scheme, linear, targets = made[0]
    if len(made) == 1 and "Linear" in targets:
        return Quantization(scheme, skip, AT, linear, method="compressed-tensors")
    return _mixed(made, skip)


def _mixed(made: list[tuple[str, LinearFormat, list[str]]], skip: Patterns | None) -> Quantization:
    """Return the quantization in a config with two groups of modules, one of them the routed experts.

    No published checkpoint combines groups in another way, so any other combination is rejected.
    """
    experts = [e for e in made if all("experts" in target for target in e[2])]
    others = [e for e in made if e not in experts]
    if len(experts) != 1 or len(others) != 1:
        raise UnsupportedArchitecture(
            "must have one group (target Linear), or two groups of which one targets only the experts",
            field=f"{AT}.config_groups",
        )
    return Quantization(
        f"{others[0][0]}+{experts[0][0]}", skip, AT, others[0][1], experts=experts[0][1],
        method="compressed-tensors",
    )  # fmt: skip


def _targets(group: dict[str, Any], where: str) -> list[str]:
    """Return the names of the modules that a config group quantizes (its `targets`)."""
    targets = group.get("targets", ["Linear"])
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise ConfigError(f"{shown(targets)} is not a list of names", field=f"{where}.targets")
    return targets


def _group(group: dict[str, Any], stored: object, where: str, width: int) -> tuple[str, LinearFormat]:
    """Return scheme name and format of a group of modules in the config; `width` is the bytes of a scale."""
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise ConfigError(f"{shown(weights)} is not an object", field=f"{where}.weights")
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
    inputs = group.get("input_activations")
    static = isinstance(inputs, dict) and inputs.get("dynamic") is False
    if isinstance(bits, bool) or not isinstance(bits, int):
        raise ConfigError(f"{shown(bits)} is not an integer", field=f"{where}.weights.num_bits")
    if kind == "float" and bits == 8:
        return "fp8", LinearFormat(FP8, block=_strategy(weights, where), scale_bytes=width, input_scale=static)
    if kind == "float" and bits == 4 and stored == "mxfp4-pack-quantized":
        return "mxfp4", LinearFormat(MXFP4)
    if kind == "float" and bits == 4 and weights.get("group_size") == 16:
        # If activations are quantized dynamically ("local"), the file also has a global input scale.
        return "nvfp4", LinearFormat(NVFP4, input_scale=inputs is not None)
    if kind == "int" and stored == "pack-quantized" and bits in (4, 8):
        act_order = weights.get("actorder") in ("group", "dynamic", True)
        group_size = -1
        if strategy == "group" and weights.get("group_size") not in (None, 0, -1):
            group_size = size_of(weights, "group_size", None, f"{where}.weights")
        return f"w{bits}a16", LinearFormat(
            PACKED, bits, group_size, scale_bytes=width,
            zero_points=weights.get("symmetric") is False, act_order=act_order,
        )  # fmt: skip
    if kind == "int" and bits == 8:
        block = _strategy(weights, where)
        return "w8a8", LinearFormat(INT8, block=block, scale_bytes=width, input_scale=static)
    raise UnsupportedArchitecture(
        f"{bits} bits of {shown(kind)} stored as {shown(stored)} are not supported yet",
        field=f"{where}.weights",
    )


def _strategy(weights: dict[str, Any], where: str) -> tuple[int, int] | None:
    """Return the (rows, columns) of a matrix that share a scale, by the config's scaling strategy.

    The strategy is tensor, channel (row), group or block.
    """
    strategy = weights.get("strategy", "tensor")
    if strategy == "tensor":
        return None
    if strategy == "channel":
        return (1, 0)
    if strategy == "group":
        size = weights.get("group_size")
        if type(size) is int and size > 0:
            return (1, size)
    block = sides_of(weights.get("block_structure"))
    if strategy == "block" and block is not None:
        return block
    raise UnsupportedArchitecture(f"{shown(strategy)} is not supported yet", field=f"{where}.weights.strategy")


READERS = {"compressed-tensors": _read}
