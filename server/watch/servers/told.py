"""Reading JSON that somebody else wrote: what is not of the type expected is not there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def number(value: object) -> int | None:
    """A count: no bool, no fraction, not negative."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def objects(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def cards(models: object) -> list[Mapping[str, Any]]:
    """The models of /v1/models."""
    return objects(mapping(models).get("data"))
