"""Checked readers for the fields of `quantization_config`; each error is a ConfigError that names the field."""

from __future__ import annotations

from typing import Any

from tonnage.planner.errors import ConfigError
from tonnage.planner.model.fields import shown
from tonnage.planner.quantization.rules import Patterns, compile_patterns

AT = "quantization_config"


def bits_of(found: dict[str, Any], name: str, allowed: tuple[int, ...]) -> int:
    """Return the bit width in field `name` of a `quantization_config`, one of `allowed`."""
    bits = found.get(name)
    if isinstance(bits, bool) or bits not in allowed:
        listed = ", ".join(map(str, allowed[:-1])) + (" or " if len(allowed) > 1 else "") + str(allowed[-1])
        raise ConfigError(f"{shown(bits)} is not {listed}", field=f"{AT}.{name}")
    return int(bits)


def group_of(found: dict[str, Any], default: int) -> int:
    """Return a `quantization_config`'s group size: the number of values that share a scale, -1 for a row."""
    name = "q_group_size" if "q_group_size" in found else "group_size"
    group = found.get(name, default)
    if isinstance(group, bool) or not isinstance(group, int) or not (group == -1 or 0 < group <= 1 << 20):
        raise ConfigError(f"{shown(group)} is not -1 or a positive integer", field=f"{AT}.{name}")
    return group


def size_of(found: dict[str, Any], name: str, default: int | None, where: str = AT) -> int:
    """Return field `name` of a `quantization_config`, the number of values that share a scale."""
    size = found.get(name, default)
    if type(size) is not int or not 0 < size <= 1 << 20:
        raise ConfigError(f"{shown(size)} is not a positive integer", field=f"{where}.{name}")
    return size


def sides_of(block: object) -> tuple[int, int] | None:
    """Return (rows, columns) of a block that shares a scale, None if `block` is not two positive integers."""
    if not isinstance(block, list) or not all(type(side) is int and 0 < side <= 1 << 16 for side in block):
        return None
    return (block[0], block[1]) if len(block) == 2 else None


def flag(found: dict[str, Any], name: str, default: bool) -> bool:
    """Return the boolean in field `name` of a `quantization_config`, `default` if it is missing."""
    value = found.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"{shown(value)} is not true or false", field=f"{AT}.{name}")
    return value


def names_in(found: dict[str, Any], name: str) -> list[str] | None:
    """Return the module names in field `name` of a `quantization_config`, None if it is missing."""
    value = found.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{shown(value)} is not a list of module names", field=f"{AT}.{name}")
    return value


def skipped(found: dict[str, Any], *names: str) -> Patterns | None:
    """Return the modules that a `quantization_config` leaves unquantized.

    They are in the first of the fields `names` that exists. Returns None if no field exists.
    """
    for name in names:
        values = names_in(found, name)
        if values is not None:
            return compile_patterns(values, f"{AT}.{name}")
    return None
