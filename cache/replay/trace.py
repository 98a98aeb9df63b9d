"""Request traces: three formats, one value each line.

- **Azure** (Azure Public Dataset, AzureLLMInferenceTrace 2023): CSV with the header
  ``TIMESTAMP,ContextTokens,GeneratedTokens``.
- **Mooncake** (FAST'25 traces): JSON lines with ``timestamp`` in milliseconds, ``input_length``,
  ``output_length`` and ``hash_ids``, one id for each 512 tokens of the prompt; equal ids after equal
  beginnings mean equal tokens.
- **the server's request log**: JSON lines with ``arrival`` (seconds), ``prompt_tokens``, ``output_tokens``, and
  where known ``max_tokens``, ``hash_ids``, ``hash_block`` (tokens of an id, 512), ``tenant``, ``priority``.
  `log_line` writes one.

A line that does not parse, or says something impossible, is refused with its number; nothing is guessed.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from tonnage.cache.errors import CacheError

MOONCAKE_BLOCK = 512  # tokens of a hash id: Mooncake, FAST25-release/traces


class TraceError(CacheError):
    """A trace, or a line of it, that is not understood."""

    code = "invalid_trace"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. ``arrival`` in seconds from the first one; ``max_tokens`` None: not recorded."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None = None
    hash_ids: tuple[int, ...] | None = None
    hash_block: int = MOONCAKE_BLOCK
    tenant: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """``requests`` in order of arrival; ``skipped`` lines did not parse."""

    name: str
    format: str
    requests: tuple[TraceRequest, ...]
    skipped: int = 0

    @property
    def has_prefixes(self) -> bool:
        """Whether any request says which part of its prompt others share."""
        return any(request.hash_ids is not None for request in self.requests)

    @property
    def longest_output(self) -> int:
        return max(request.output_tokens for request in self.requests)


def read_trace(path: Path, *, limit: int | None = None, skip_bad_lines: bool = False) -> Trace:
    """The first ``limit`` requests of a trace file, whatever its format.

    Raises TraceError: no such file, unknown format, no request, or a line (with its number) that does not
    parse, unless ``skip_bad_lines``, which counts them.
    """
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            return _read(file, path.name, limit, skip_bad_lines)
    except OSError as error:
        raise TraceError(
            f"{path.name}: {error.strerror}", field="trace", hint="give a .csv or .jsonl file"
        ) from None


def log_line(request: TraceRequest) -> str:
    """One line of the server's request log, without the line end; `read_trace` reads it back."""
    record: dict[str, Any] = {
        "arrival": round(request.arrival, 6),
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
    }
    if request.max_tokens is not None:
        record["max_tokens"] = request.max_tokens
    if request.hash_ids is not None:
        record["hash_ids"], record["hash_block"] = list(request.hash_ids), request.hash_block
    if request.tenant:
        record["tenant"] = request.tenant
    if request.priority:
        record["priority"] = request.priority
    return json.dumps(record, separators=(",", ":"))


def _read(file: TextIO, name: str, limit: int | None, skip_bad_lines: bool) -> Trace:
    first = file.readline()
    requests: list[TraceRequest] = []
    skipped = 0
    kind, lines, parse = _format_of(first, file, name)
    for number, line in lines:
        if not line.strip():
            continue
        try:
            requests.append(parse(line))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            if not skip_bad_lines:
                raise TraceError(
                    f"{name} line {number}: {_reason(error)}",
                    field="trace",
                    hint="correct it, or --skip-bad-lines counts and leaves out such lines",
                ) from None
            skipped += 1
        if limit is not None and len(requests) == limit:
            break
    if not requests:
        raise TraceError(f"{name} has no request", field="trace", hint=f"{skipped} lines were skipped")
    requests.sort(key=lambda request: request.arrival)
    zero = requests[0].arrival
    return Trace(name, kind, tuple(_shifted(request, zero) for request in requests), skipped)


def _format_of(
    first: str, file: TextIO, name: str
) -> tuple[str, Iterator[tuple[int, str]], Callable[[str], TraceRequest]]:
    def all_lines() -> Iterator[tuple[int, str]]:
        yield 1, first
        yield from enumerate(file, start=2)

    columns = [column.strip() for column in first.lstrip("\ufeff").split(",")]
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(columns):
        return "azure", enumerate(file, start=2), _azure(columns)
    try:
        record = json.loads(first)
    except ValueError:
        record = None
    if isinstance(record, dict) and "input_length" in record:
        return "mooncake", all_lines(), _mooncake
    if isinstance(record, dict) and "prompt_tokens" in record:
        return "log", all_lines(), _log
    raise TraceError(
        f"{name} line 1: neither the header of an Azure trace nor a line of a Mooncake trace or a request log",
        field="trace",
        hint="columns TIMESTAMP,ContextTokens,GeneratedTokens, or JSON with input_length or prompt_tokens",
    )


def _azure(columns: list[str]) -> Callable[[str], TraceRequest]:
    at = [columns.index(name) for name in ("TIMESTAMP", "ContextTokens", "GeneratedTokens")]

    def parse(line: str) -> TraceRequest:
        cells = next(csv.reader([line]))
        if len(cells) != len(columns):
            raise ValueError(f"{len(cells)} columns, {len(columns)} expected")
        when, prompt, output = (cells[i].strip() for i in at)
        # Seven digits of a second; datetime takes six.
        head, dot, digits = when.partition(".")
        seconds = datetime.fromisoformat(head + "+00:00").timestamp() + float(f"0{dot}{digits}" if dot else 0)
        return _checked(seconds, int(prompt), int(output))

    return parse


def _mooncake(line: str) -> TraceRequest:
    record = _record(line)
    prompt = _count(record, "input_length")
    ids = _ids(record, prompt, MOONCAKE_BLOCK)
    return _checked(_number(record, "timestamp") / 1000, prompt, _count(record, "output_length"), hash_ids=ids)


def _log(line: str) -> TraceRequest:
    record = _record(line)
    prompt = _count(record, "prompt_tokens")
    block = _count(record, "hash_block") if "hash_block" in record else MOONCAKE_BLOCK
    if block < 1:
        raise ValueError(f"hash_block is {block}")
    return _checked(
        _number(record, "arrival"),
        prompt,
        _count(record, "output_tokens"),
        max_tokens=_count(record, "max_tokens") if record.get("max_tokens") is not None else None,
        hash_ids=_ids(record, prompt, block) if record.get("hash_ids") is not None else None,
        hash_block=block,
        tenant=str(record.get("tenant", "")),
        priority=_count(record, "priority", least=-(2**31)) if "priority" in record else 0,
    )


def _checked(arrival: float, prompt: int, output: int, **more: Any) -> TraceRequest:
    if not math.isfinite(arrival):
        raise ValueError(f"the time is {arrival}")
    if prompt < 1 or output < 1:
        raise ValueError(f"{prompt} prompt and {output} output tokens: both are at least 1")
    most = more.get("max_tokens")
    if most is not None and most < 1:
        raise ValueError(f"max_tokens is {most}")
    return TraceRequest(arrival, prompt, output, **more)


def _record(line: str) -> dict[str, Any]:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def _number(record: dict[str, Any], name: str) -> float:
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is {value!r:.40}, not a number")
    return float(value)


def _count(record: dict[str, Any], name: str, least: int = 0) -> int:
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise ValueError(f"{name} is {value!r:.40}, not a whole number that a count can be")
    return value


def _ids(record: dict[str, Any], prompt: int, block: int) -> tuple[int, ...]:
    ids = record["hash_ids"]
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**30 for i in ids):
        raise ValueError("hash_ids is not a list of whole numbers below 2^30")
    if len(ids) != -(-prompt // block):
        raise ValueError(f"{len(ids)} hash_ids for {prompt} tokens in blocks of {block}")
    return tuple(ids)


def _shifted(request: TraceRequest, zero: float) -> TraceRequest:
    values = {name: getattr(request, name) for name in TraceRequest.__slots__}
    return TraceRequest(**{**values, "arrival": request.arrival - zero})


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON: {error.msg} at column {error.colno}"
    return str(error)
