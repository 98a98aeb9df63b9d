"""Request traces, one request per line; `block_traces` has the readers of other records.

- **Azure** (Azure Public Dataset, AzureLLMInferenceTrace 2023): CSV with the header
  ``TIMESTAMP,ContextTokens,GeneratedTokens``.
- **Mooncake** (FAST'25 traces): JSON lines with ``timestamp`` in milliseconds, ``input_length``,
  ``output_length`` and ``hash_ids``, one id per 512 tokens of the prompt. Equal ids after equal beginnings mean
  equal tokens.
- **The server's request log**: JSON lines or CSV with ``arrival`` (seconds), ``prompt_tokens`` and
  ``output_tokens``, and optionally ``max_tokens``, ``hash_ids``, ``hash_block`` (tokens per id, 512),
  ``tenant`` and ``priority``. `log_line` writes such a line.

A line that cannot be parsed or has impossible values is rejected, and the error names its line number.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from tonnage.cache.errors import CacheError
from tonnage.cache.replay import msgpack
from tonnage.cache.replay.block_traces import (
    EventReader,
    RagPulseReader,
    SessionReader,
    is_event_batch,
    is_rag_pulse,
    is_session,
)
from tonnage.cache.replay.columns import NAMES, NEEDED, cell, renamed
from tonnage.cache.replay.json_text import parse_json
from tonnage.cache.replay.trace_request import MOONCAKE_BLOCK, TraceRequest, as_count, as_number
from tonnage.planner.errors import did_you_mean

_AZURE = {"arrival": "TIMESTAMP", "prompt_tokens": "ContextTokens", "output_tokens": "GeneratedTokens"}


class TraceError(CacheError):
    """The error that a trace file, or one of its lines, cannot be read."""

    code = "invalid_trace"


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a trace file in order of arrival; ``skipped`` lines could not be parsed."""

    name: str
    format: str
    requests: tuple[TraceRequest, ...]
    skipped: int = 0

    @property
    def has_prefixes(self) -> bool:
        """Whether any request of the trace has hash ids, which show which prompts share a prefix."""
        return any(request.hash_ids is not None for request in self.requests)

    @property
    def longest_output(self) -> int:
        """Largest number of output tokens of any request of the trace."""
        return max(request.output_tokens for request in self.requests)


def read_trace(
    path: Path, *, limit: int | None = None, skip_bad_lines: bool = False,
    columns: Mapping[str, str] | None = None,
) -> Trace:  # fmt: skip
    """Read the first ``limit`` requests of a trace file in any of the formats.

    Args:
        path: The file, or a folder of agentic sessions.
        limit: Number of requests to read; None: all.
        skip_bad_lines: Count lines that cannot be parsed instead of raising.
        columns: Request-log field name -> column name of the trace (from ``columns.parse_columns``), for other
            formats.

    Raises:
        TraceError: The file is missing, its format is unknown, it has no request, or a line cannot be parsed.
    """
    try:
        if path.is_dir():
            return _read_sessions(sorted(path.glob("*.json")), path.name, limit)
        with path.open("rb") as binary:
            if msgpack.is_batch(binary.read(1)):
                data = msgpack.values(path.read_bytes())
                return _read_events(data, lambda batch: batch, "byte", path.name, limit)
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            return _read(file, path, limit, skip_bad_lines, columns)
    except OSError as error:
        raise TraceError(
            f"{path.name}: {error.strerror}", field="trace", hint="give a .csv or .jsonl file"
        ) from None


def log_line(request: TraceRequest) -> str:
    """Return one line of the server's request log without a line end; `read_trace` reads it back."""
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


def _read_sessions(paths: list[Path], name: str, limit: int | None) -> Trace:
    """Read a trace of agentic sessions, one JSON file per session; all sessions start at second 0."""
    reader, requests = SessionReader(), list[TraceRequest]()
    for path in paths:
        try:
            session = parse_json(path.read_text(encoding="utf-8", errors="replace"))
            if not is_session(session):
                raise ValueError("not an agentic session: requests or hash_id_scope is missing")
            requests += reader.read(session)
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path.name}: {_reason(error)}", field="trace") from None
    return _ordered(name, "weka", requests, limit)


def _read_events(
    pieces: Iterator[tuple[int, Any]], decode: Callable[[Any], Any], unit: str, name: str, limit: int | None
) -> Trace:
    """Read a trace from a file of KV event batches.

    Args:
        pieces: Place of each batch in the file, and the batch.
        decode: Function that returns the batch as lists and dicts.
        unit: What a place counts: ``line`` or ``byte``.
        name: Name of the file.
        limit: Number of requests to read; None: all.
    """
    reader = EventReader()
    try:
        for place, piece in pieces:
            try:
                reader.read(decode(piece))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise TraceError(f"{name} {unit} {place}: {_reason(error)}", field="trace") from None
        requests = list(reader.requests())
    except ValueError as error:
        raise TraceError(f"{name}: {error}", field="trace") from None
    return _ordered(name, "kv-events", requests, limit)


def _ordered(
    name: str, kind: str, requests: list[TraceRequest], limit: int | None = None, skipped: int = 0
) -> Trace:
    """Return the requests of a file as a trace in order of arrival, which begins at second 0."""
    if not requests:
        raise TraceError(f"{name} has no request", field="trace", hint=f"{skipped} lines were skipped")
    for request in requests:
        if not math.isfinite(request.arrival):
            raise TraceError(
                f"{name}: an arrival time is {request.arrival}, not a finite number", field="trace"
            )
    requests.sort(key=lambda request: request.arrival)
    zero = requests[0].arrival
    shifted = (replace(request, arrival=request.arrival - zero) for request in requests[:limit])
    return Trace(name, kind, tuple(shifted), skipped)


def _read(
    file: TextIO, path: Path, limit: int | None, skip_bad_lines: bool, named: Mapping[str, str] | None
) -> Trace:
    first, name = file.readline(), path.name
    try:
        record = parse_json(first)
    except ValueError:
        record = None
    if path.suffix == ".json" or is_session(record):
        return _read_sessions([path], name, limit)
    if is_event_batch(record):
        numbered = chain([(1, first)], enumerate(file, start=2))
        batches = (line for line in numbered if line[1].strip())
        return _read_events(batches, parse_json, "line", name, limit)
    requests: list[TraceRequest] = []
    skipped = 0
    kind, lines, parse = _format_of(first, record, file, path, named)
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
                    hint="correct the line, or skip such lines with --skip-bad-lines",
                ) from None
            skipped += 1
        if limit is not None and len(requests) == limit:
            break
    return _ordered(name, kind, requests, None, skipped)


def _format_of(
    first: str, record: Any, file: TextIO, path: Path, named: Mapping[str, str] | None
) -> tuple[str, Iterator[tuple[int, str]], Callable[[str], TraceRequest]]:
    name, columns = path.name, list[str]()
    all_lines = partial(chain, [(1, first)], enumerate(file, start=2))
    if is_rag_pulse(record) and named is None:
        try:
            reader = RagPulseReader(path.parent, name)
        except (ValueError, KeyError) as error:
            raise TraceError(f"{name} is a trace of RAGPulse: {_reason(error)}", field="trace") from None
        return "ragpulse", all_lines(), lambda line: reader.read(_record(line))
    if isinstance(record, dict) and named is not None:
        return "columns", all_lines(), lambda line: _request(renamed(_record(line), named))
    if isinstance(record, dict) and "input_length" in record:
        return "mooncake", all_lines(), _mooncake
    if isinstance(record, dict) and "prompt_tokens" in record:
        return "log", all_lines(), lambda line: _request(_record(line))
    with contextlib.suppress(csv.Error):  # a line with a field above csv's size limit is no header
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
        hint="columns TIMESTAMP,ContextTokens,GeneratedTokens, JSON with input_length or prompt_tokens, or "
        "name its columns with --columns arrival=...,prompt_tokens=...,output_tokens=...",
    )


def _check_columns(columns: list[str], named: Mapping[str, str], name: str) -> None:
    for column in named.values():
        if column not in columns:
            raise TraceError(
                f"{name} line 1 has no column {column[:60]!r}", field="--columns",
                hint=did_you_mean(column, columns) or f"it has {', '.join(columns)[:200]}",
            )  # fmt: skip


def _table(columns: list[str], named: Mapping[str, str]) -> Callable[[str], TraceRequest]:
    """Return a parser of a trace's CSV lines; ``named`` maps the request log's fields to the file's columns."""

    def parse(line: str) -> TraceRequest:
        cells = [text.strip() for text in next(csv.reader([line]))]
        if len(cells) != len(columns):
            raise ValueError(f"the line has {len(cells)} columns, but the header has {len(columns)}")
        found = {column: cell(text) for column, text in zip(columns, cells, strict=True) if text}
        return _request(renamed(found, named))

    return parse


def _mooncake(line: str) -> TraceRequest:
    record = _record(line)
    prompt = as_count(record, "input_length")
    ids = _ids(record, prompt, MOONCAKE_BLOCK)
    return _checked(
        as_number(record, "timestamp") / 1000, prompt, as_count(record, "output_length"), hash_ids=ids
    )


def _request(record: Mapping[str, Any]) -> TraceRequest:
    prompt = as_count(record, "prompt_tokens")
    block = as_count(record, "hash_block", least=1) if "hash_block" in record else MOONCAKE_BLOCK
    return _checked(
        as_number(record, "arrival"),
        prompt,
        as_count(record, "output_tokens"),
        max_tokens=as_count(record, "max_tokens", least=1) if record.get("max_tokens") is not None else None,
        hash_ids=_ids(record, prompt, block) if record.get("hash_ids") is not None else None,
        hash_block=block,
        tenant=str(record.get("tenant", "")),
        priority=as_count(record, "priority", least=-(2**31)) if "priority" in record else 0,
    )


def _checked(arrival: float, prompt: int, output: int, **more: Any) -> TraceRequest:
    if not math.isfinite(arrival):
        raise ValueError(f"the arrival time is {arrival}, not a finite number")
    if prompt < 1 or output < 1:
        raise ValueError(f"{prompt} prompt and {output} output tokens: both must be at least 1")

    return TraceRequest(arrival, prompt, output, **more)


def _record(line: str) -> dict[str, Any]:
    record = parse_json(line)
    if not isinstance(record, dict):
        raise ValueError("the line is not a JSON object")
    return record


def _ids(record: Mapping[str, Any], prompt: int, block: int) -> tuple[int, ...]:
    ids = record["hash_ids"]
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**30 for i in ids):
        raise ValueError("hash_ids is not a list of whole numbers below 2^30")
    if len(ids) != -(-prompt // block):
        raise ValueError(
            f"{len(ids)} hash_ids for {prompt} prompt tokens, which are {-(-prompt // block)} blocks of {block}"
        )
    return tuple(ids)


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    if isinstance(error, json.JSONDecodeError):
        return f"invalid JSON: {error.msg} at column {error.colno}"
    return str(error)
