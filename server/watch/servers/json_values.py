"""Type checks for JSON of other programs: a value of an unexpected type counts as absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text(value: object) -> str | None:
    """Return a non-empty string, or None for any other value."""
    return value if isinstance(value, str) and value else None


def number(value: object) -> int | None:
    """Return an integer count, or None for a bool, a fraction or a negative value."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def mapping(value: object) -> Mapping[str, Any]:
    """Return a dict, or an empty one for any other value."""
    return value if isinstance(value, dict) else {}


def objects(value: object) -> list[Mapping[str, Any]]:
    """Return the dicts of a list, or an empty list for any other value."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def cards(models: object) -> list[Mapping[str, Any]]:
    """Return the models of /v1/models."""
    return objects(mapping(models).get("data"))
