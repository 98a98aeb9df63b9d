"""Parsing of start-up logs into figures, separately for each rank and pipeline stage.

Each engine's own module parses the lines of its log. A log may have colour codes, prefixes of a container
runtime, wrapped lines, and interleaved lines of several ranks. If a log has several starts of the engine, only
the last one is read, even if it failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from tonnage.planner.engines.base import Engine
from tonnage.planner.engines.log import LogFigures
from tonnage.planner.engines.registry import ENGINES, engine_of
from tonnage.planner.errors import ConfigError, printable

MAX_LOG_BYTES = 256 << 20
_LONGEST_RECORD = 200  # maximum lines of a wrapped record (60 were seen)

# Colour codes as a terminal receives them, as JSON or Java escapes, or as `cat -v` prints them.
_COLOURS = re.compile(r"(?:\x1b|\\u001b|\\x1b|\\033|#033|\^\[)\[[0-9;]*[mK]")
# Patterns of the beginning of a log record: level and date, process name, progress bar, error, or a function of
# llama.cpp
_LLAMA = "llama|llm|ggml|load|print_info|common|sched|srv|slot|main|build|system_info|clip|graph|create|set"
_BEGINS = re.compile(
    r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b[ :]+(?:\d|\[)|\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d"
    r"|^\W*\((?:APIServer|EngineCore|\w*Worker)|\d+%(?:\||\s+Completed)|^\W*Traceback|^\s*File \""
    r"|^\W*(?:[a-z_]+\.)*[A-Z]\w*(?:Error|Exception): "
    rf"|(?:^|\d [IWED] |[|>] )\W*(?:{_LLAMA})[\w.~<>()-]*\s?:\s"
)
_FAILURE = re.compile(
    r"(?:^|[\]:)] |\s)((?:[a-z_]+\.)*[A-Z]\w*(?:Error|Exception|OutOfMemory\w*|Interrupt)|AssertionError): (.+)"
)
_GENERIC = (  # Words of error messages that only report that another error occurred.
    "initialization failed", "core proc", "failed to start", "KeyboardInterrupt", "died unexpectedly",
    "engine is dead", "Engine core",
)  # fmt: skip
_RANK_FIGURES = (
    "weights_bytes", "activation_bytes", "non_torch_bytes", "cuda_graph_bytes", "graph_estimate_bytes",
    "consumed_bytes", "non_kv_bytes", "kv_pool_bytes", "requested_bytes", "free_bytes", "device_bytes",
    "init_non_torch_bytes", "peak_torch_bytes", "free_after_pool_bytes",
)  # fmt: skip
# Figures of which the smallest value counts if replicas log different values.
_LEAST = ("tokens", "num_blocks", "max_concurrency")


@dataclass(slots=True)
class StartLog:
    """The memory figures and flags in the start-up log of an engine.

    Attributes:
        ranks: figures of each rank, by the rank's name in the log ("" if the log names none).
        figures: figures by name, of the rank with the smallest KV pool and of the engine as a whole.
        rounding: maximum rounding error of each figure, by name: half a unit of the last printed digit.
        failure: the error that stopped the start, or None.
        ready: whether the engine reported that it serves requests.
        starts: number of engine starts in the log, of which the last counts.
        digest: hash of the log's text.
    """

    engine: str | None = None
    version: str | None = None
    model: str | None = None
    figures: dict[str, float] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    rounding: dict[str, float] = field(default_factory=dict)
    ranks: dict[str, LogFigures] = field(default_factory=dict)
    failure: str | None = None
    ready: bool = False
    starts: int = 1
    digest: str = ""


def read_log(path: Path) -> StartLog:
    """Read an engine's start-up log from a file.

    Raises:
        ConfigError: the file cannot be read, or has no line that any engine recognizes.
    """
    try:
        if path.stat().st_size > MAX_LOG_BYTES:
            raise ConfigError(f"is larger than {MAX_LOG_BYTES:,} bytes, the limit of a log", field=str(path))
        text = path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field=str(path)) from None
    found = parse_log(text)
    if not found.figures and not (found.failure and found.engine):
        *others, last = (engine.title for name in ENGINES if (engine := engine_of(name)).logs)
        raise ConfigError(
            f"holds no start-up line of {', '.join(others)} or {last}", field=str(path),
            hint="give the log from the engine's start, for example docker logs CONTAINER > start.log",
        )  # fmt: skip
    return found


def parse_log(text: str) -> StartLog:
    """Return the memory figures of the last engine start in the text of a start-up log."""
    reader = _Reader()
    for record in records(text.splitlines()):
        reader.read(record)
    found = reader.settle()
    found.digest = sha256(text.encode()).hexdigest()[:16]
    return found


def records(lines: Iterable[str]) -> Iterator[str]:
    """Yield the records of a start-up log, without colour codes and with wrapped lines joined."""
    held: list[str] = []
    for raw in lines:
        line = _COLOURS.sub("", raw)
        begins = _BEGINS.search(line) is not None
        if held and (begins or not line.strip() or len(held) > _LONGEST_RECORD):
            yield "".join(held)
            held = []
        if begins or held:
            held.append(line)
        elif line.strip():
            yield line
    if held:
        yield "".join(held)


class _Reader:
    """A parser of start-up logs that sorts the interleaved records of several ranks by rank."""

    def __init__(self) -> None:
        self._engines: list[Engine] = [e for name in ENGINES if (e := engine_of(name)).logs]
        self._starts = 1
        self._begin()

    def _begin(self) -> None:
        self._flags: dict[str, str] = {}
        self._ranks: dict[str, LogFigures] = {}
        self._names: dict[str, str] = {}  # process -> its rank, known once a record names both
        self._failures: list[str] = []
        self._ready = False

    def read(self, record: str) -> None:
        """Parse one record of a start-up log and store its memory figures under the record's rank."""
        if self._is_another_start(record):
            self._starts += 1
            self._begin()
        for engine in self._engines:
            name, process = engine.log_rank(record)
            if name or process:
                break
        out = self._ranks.setdefault(self._rank(name, process), LogFigures(flags=self._flags))
        for engine in self._engines:
            engine.read_log_line(record, out)
            self._ready = self._ready or engine.log_is_ready(record)
        if match := _FAILURE.search(record):
            self._failures.append(printable(f"{match[1].rpartition('.')[2]}: {match[2].strip()}"))

    def _rank(self, name: str, process: str) -> str:
        """Return the key under which the figures of a log record are collected.

        The key is the name of the rank that wrote the record, or its process until the log names the rank.
        """
        if not process:
            return name
        if name:
            unnamed = self._ranks.pop(f"process {process}", None)
            if unnamed is not None:
                self._ranks.setdefault(name, unnamed)
            self._names[process] = name
        return self._names.get(process, f"process {process}")

    def _is_another_start(self, record: str) -> bool:
        begins = "non-default args:" in record or "args: Namespace(" in record or "server_args=" in record
        return begins and any("weights_bytes" in rank.figures for rank in self._ranks.values())

    def settle(self) -> StartLog:
        """Return the memory figures of the log's last engine start, after all records were read."""
        whole = StartLog(flags=self._flags, ready=self._ready, starts=self._starts)
        for rank in self._ranks.values():
            for engine in self._engines:
                engine.finish_log(rank)
            if rank.cells:
                rank.figures["max_model_len"] = rank.cells
            if rank.pools:
                rank.figures.setdefault("kv_pool_bytes", rank.pools)
            whole.engine = whole.engine or rank.engine
            whole.version = rank.version or whole.version
            whole.model = rank.model or whole.model
            _add(whole, rank)
        whole.ranks = {
            name: rank
            for name, rank in sorted(self._ranks.items(), key=lambda pair: _order(pair[0]))
            if any(key in rank.figures for key in _RANK_FIGURES)
        }
        own = [failure for failure in self._failures if not any(mark in failure for mark in _GENERIC)]
        if not self._ready and self._failures:
            whole.failure = (own or self._failures)[0]
        return whole


def _add(whole: StartLog, rank: LogFigures) -> None:
    smaller = rank.figures.get("kv_pool_bytes", 0.0) < whole.figures.get("kv_pool_bytes", float("inf"))
    decides = "kv_pool_bytes" in rank.figures and smaller
    for name, value in rank.figures.items():
        if name not in _RANK_FIGURES:
            whole.figures[name] = min(value, whole.figures.get(name, value)) if name in _LEAST else value
        elif decides or name not in whole.figures:
            whole.figures[name] = value
            whole.rounding[name] = rank.rounding.get(name, 0.0)


def _order(name: str) -> list[tuple[str, int]]:
    return [(kind, int(digits)) for kind, digits in re.findall(r"([A-Za-z]+)\D*(\d+)", name)]
