"""Request traces whose columns have other names than the server's request log.

An example is ``--columns arrival=t,prompt_tokens=in,output_tokens=out``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tonnage.cache.replay.json_text import parse_json
from tonnage.planner.errors import DeploymentError, did_you_mean

NEEDED = ("arrival", "prompt_tokens", "output_tokens")
NAMES = (*NEEDED, "arrival_ms", "max_tokens", "tenant", "priority", "hash_ids", "hash_block")
_ZONE = re.compile(r"(Z|[+-]\d\d:?\d\d)$")


def parse_columns(text: str) -> dict[str, str]:
    """Parse ``--columns`` into a mapping from request-log field names to the trace's column names.

    A required field that is left out is read from the column of the same name. Raises DeploymentError.
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, column = (word.strip() for word in part.partition("="))
        if not equals or not column:
            raise DeploymentError(
                f"{part[:60]!r} is not NAME=COLUMN", field="--columns", hint="for example arrival=t"
            )
        if name not in NAMES:
            hint = did_you_mean(name, NAMES) or f"one of {', '.join(NAMES)}"
            raise DeploymentError(f"{name[:60]!r} is not a field of a request", field="--columns", hint=hint)
        found[name] = column
    if "arrival" in found and "arrival_ms" in found:
        raise DeploymentError("names both arrival and arrival_ms; give one of them", field="--columns")
    for name in NEEDED:
        if name != "arrival" or "arrival_ms" not in found:
            found.setdefault(name, name)
    return found


def renamed(record: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a trace record with its columns renamed to the request log's fields, and times in seconds.

    Raises ValueError for an invalid time. Raises KeyError for a missing column, with its name in the trace.
    """
    out = {name: record[column] for name, column in columns.items() if name in NEEDED or column in record}
    if "arrival_ms" in columns:
        out["arrival"] = _milliseconds(record[columns["arrival_ms"]])
    elif isinstance(out["arrival"], str):
        out["arrival"] = seconds(out["arrival"])
    out.pop("arrival_ms", None)
    return out


def cell(text: str) -> Any:
    """Convert a CSV cell of a trace: a whole number to int, a JSON list to a list; else return the text."""
    if text.startswith("["):
        with contextlib.suppress(ValueError):
            return parse_json(text)
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else text


def seconds(text: str) -> float:
    """Convert a trace's time, a number or an ISO 8601 date (by default UTC), to seconds. Raises ValueError."""
    try:
        return float(text)
    except ValueError:
        pass
    if _ZONE.search(text) and ":" in text:
        return datetime.fromisoformat(text).timestamp()
    # Azure dates have seven decimal digits of a second; datetime accepts six.
    head, dot, digits = text.partition(".")
    return datetime.fromisoformat(head + "+00:00").timestamp() + float(f"0{dot}{digits}" if dot else 0)


def _milliseconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"the time is {value!r:.40}, not a number")
    return float(value) / 1000
