"""One request of a trace, and the checks of the numbers in a trace's records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOONCAKE_BLOCK = 512  # tokens per hash id in Mooncake's traces (FAST25-release/traces)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace: its arrival, its lengths and the hash ids of its prompt.

    ``arrival`` is in seconds from the first request. ``max_tokens`` is None if the trace does not record it.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None = None
    hash_ids: tuple[int, ...] | None = None
    hash_block: int = MOONCAKE_BLOCK
    tenant: str = ""
    priority: int = 0


def as_number(record: Mapping[str, Any], name: str) -> float:
    """Return field ``name`` of a trace record as a number. Raises ValueError, or KeyError without the field."""
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is {value!r:.40}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is {value!r:.40}, too large for a number") from None


def as_count(record: Mapping[str, Any], name: str, least: int = 0) -> int:
    """Return the field ``name`` of a trace record as an int from ``least`` on; raise like `as_number`."""
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise ValueError(f"{name} is {value!r:.40}, not a whole number from {least} to 2^31 - 1")
    return value
