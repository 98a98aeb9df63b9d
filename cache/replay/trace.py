"""Request traces: three formats, one value each line.

- **Azure** (Azure Public Dataset, AzureLLMInferenceTrace 2023): CSV with the header
  ``TIMESTAMP,ContextTokens,GeneratedTokens``.
- **Mooncake** (FAST'25 traces): JSON lines with ``timestamp`` in milliseconds, ``input_length``,
  ``output_length`` and ``hash_ids``, one id for each 512 tokens of the prompt; equal ids after equal
  beginnings mean equal tokens.
- **the server's request log**: JSON lines, or CSV with these columns: ``arrival`` (seconds), ``prompt_tokens``,
  ``output_tokens``, and where known ``max_tokens``, ``hash_ids``, ``hash_block`` (tokens of an id, 512),
  ``tenant``, ``priority``. `log_line` writes one.

A line that does not parse, or says something impossible, is refused with its number; nothing is guessed.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tonnage.cache.errors import CacheError
from tonnage.cache.replay.columns import NAMES, NEEDED, cell, renamed
from tonnage.planner.errors import did_you_mean

MOONCAKE_BLOCK = 512  # tokens of a hash id: Mooncake, FAST25-release/traces
_AZURE = {"arrival": "TIMESTAMP", "prompt_tokens": "ContextTokens", "output_tokens": "GeneratedTokens"}


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


def read_trace(
    path: Path, *, limit: int | None = None, skip_bad_lines: bool = False,
    columns: Mapping[str, str] | None = None,
) -> Trace:  # fmt: skip
    """The first ``limit`` requests of a trace file, whatever its format. ``columns``: what it calls the fields
    of the request log (``columns.parse_columns``), where it is none of the three.

    Raises TraceError: no such file, unknown format, no request, or a line (with its number) that does not
    parse, unless ``skip_bad_lines``, which counts them.
    """
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            return _read(file, path.name, limit, skip_bad_lines, columns)
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


def _read(
    file: TextIO, name: str, limit: int | None, skip_bad_lines: bool, named: Mapping[str, str] | None
) -> Trace:
    first = file.readline()
    requests: list[TraceRequest] = []
    skipped = 0
    kind, lines, parse = _format_of(first, file, name, named)
    for number, line in lines:
        if not line.strip():
            continue
        try:
            requests.append(parse(line))
        except (ValueError, KeyError, TypeError, OverflowError, csv.Error) as error:
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
    first: str, file: TextIO, name: str, named: Mapping[str, str] | None
) -> tuple[str, Iterator[tuple[int, str]], Callable[[str], TraceRequest]]:
    def all_lines() -> Iterator[tuple[int, str]]:
        yield 1, first
        yield from enumerate(file, start=2)

    try:
        record = json.loads(first)
    except ValueError:
        record = None
    columns: list[str] = []
    if isinstance(record, dict) and named is not None:
        return "columns", all_lines(), lambda line: _request(renamed(_record(line), named))
    if isinstance(record, dict) and "input_length" in record:
        return "mooncake", all_lines(), _mooncake
    if isinstance(record, dict) and "prompt_tokens" in record:
        return "log", all_lines(), _log
    with contextlib.suppress(csv.Error):  # a field of a megabyte: no header
        columns = [column.strip() for column in next(csv.reader([first.lstrip("\ufeff")]), [])]
    if named is None and set(_AZURE.values()) <= set(columns):
        return "azure", enumerate(file, start=2), _table(columns, _AZURE)
    if named is not None or set(NEEDED) <= set(columns):
        named = named or {column: column for column in columns if column in NAMES}
        _check_columns(columns, named, name)
        return "columns", enumerate(file, start=2), _table(columns, named)
    raise TraceError(
        f"{name} line 1: neither the header of an Azure trace nor a line of a Mooncake trace or a request log",
        field="trace",
        hint="columns TIMESTAMP,ContextTokens,GeneratedTokens, JSON with input_length or prompt_tokens, or by "
        "--columns arrival=...,prompt_tokens=...,output_tokens=... what its columns are",
    )


def _check_columns(columns: list[str], named: Mapping[str, str], name: str) -> None:
    for column in named.values():
        if column not in columns:
            raise TraceError(
                f"{name} line 1 has no column {column[:60]!r}", field="--columns",
                hint=did_you_mean(column, columns) or f"it has {', '.join(columns)[:200]}",
            )  # fmt: skip


def _table(columns: list[str], named: Mapping[str, str]) -> Callable[[str], TraceRequest]:
    """Reader of the lines of a CSV file. ``named``: what it calls the fields of the request log."""

    def parse(line: str) -> TraceRequest:
        cells = [text.strip() for text in next(csv.reader([line]))]
        if len(cells) != len(columns):
            raise ValueError(f"{len(cells)} columns, {len(columns)} expected")
        found = {column: cell(text) for column, text in zip(columns, cells, strict=True) if text}
        return _request(renamed(found, named))

    return parse


def _mooncake(line: str) -> TraceRequest:
    record = _record(line)
    prompt = _count(record, "input_length")
    ids = _ids(record, prompt, MOONCAKE_BLOCK)
    return _checked(_number(record, "timestamp") / 1000, prompt, _count(record, "output_length"), hash_ids=ids)


def _log(line: str) -> TraceRequest:
    return _request(_record(line))


def _request(record: Mapping[str, Any]) -> TraceRequest:
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


def _number(record: Mapping[str, Any], name: str) -> float:
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is {value!r:.40}, not a number")
    return float(value)


def _count(record: Mapping[str, Any], name: str, least: int = 0) -> int:
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise ValueError(f"{name} is {value!r:.40}, not a whole number that a count can be")
    return value


def _ids(record: Mapping[str, Any], prompt: int, block: int) -> tuple[int, ...]:
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
