"""Type checks for JSON of other programs: a value of an unexpected type counts as absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text(value: object) -> str | None:
    """Return `value` if it is a non-empty string, else None."""
    return value if isinstance(value, str) and value else None


def number(value: object) -> int | None:
    """Return `value` if it is a non-negative integer, else None; a bool is not accepted."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def mapping(value: object) -> Mapping[str, Any]:
    """Return `value` if it is a dict, else an empty dict."""
    return value if isinstance(value, dict) else {}


def objects(value: object) -> list[Mapping[str, Any]]:
    """Return the dicts in the list `value`, or an empty list if it is not a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def cards(models: object) -> list[Mapping[str, Any]]:
    """Return the model objects (dicts) in ``models``, the JSON answer of /v1/models."""
    return objects(mapping(models).get("data"))
