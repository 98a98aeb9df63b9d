"""Helpers to read an engine's start-up log; each engine's patterns are in ``Engine.read_log_line``.

Patterns match a line without its blanks (``squeezed``), because a terminal, mail client or container runtime
may wrap a line anywhere, even within a number. Blanks in a pattern are ignored and serve readability only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

NUMBER = r"(-?\d[\d,]*(?:\.\d+)?)"
Lines = tuple[tuple[str, float, str], ...]
"""Rows of (figure, unit in bytes, pattern of the line with the number as its first group)."""

_OPEN, _CLOSED, _QUOTES = "([{<", ")]}>", "'\""


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Return ``pattern`` compiled to match log lines whose blanks were removed."""
    return re.compile(pattern.replace(" ", ""))


@dataclass(slots=True)
class LogFigures:
    """The figures of one rank in a start-up log.

    Attributes:
        engine: Name of the engine that printed the log.
        version: Version of that engine.
        model: Name or path of the model.
        figures: Name of a figure -> its value, in bytes or as a count.
        flags: Flags of the engine, as the log prints them.
        pools: Sum of the caches that the log lists one by one, in bytes.
        cells: Tokens that the longest of the KV caches in the log holds.
        rounding: Name of a figure -> the rounding error of its printed value, in the figure's unit.
        state: Marks that the engine's log reader sets at some lines and needs to interpret later lines, such as
            "pools are complete".
    """

    engine: str | None = None
    version: str | None = None
    model: str | None = None
    figures: dict[str, float] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    pools: float = 0.0
    cells: float = 0.0
    rounding: dict[str, float] = field(default_factory=dict)
    state: set[str] = field(default_factory=set)


def squeezed(line: str) -> str:
    """Return a log line without its blanks."""
    return "".join(line.split())


def read_figures(engine: str, lines: Lines, line: str, out: LogFigures) -> None:
    """Add the memory figures in a log line to ``out``, by the patterns in ``lines``.

    ``line`` is the log line without its blanks. If the log prints a figure more than once, the value with the
    most decimals is kept. Of values with equally many decimals, the last one is kept.
    """
    for name, unit, pattern in lines:
        if match := compiled(pattern).search(line):
            keep(out, name, match[1], unit)
            out.engine = out.engine or engine


def keep(out: LogFigures, name: str, text: str, unit: float) -> None:
    """Store a log's figure ``name`` in ``out``.

    The log prints the figure as ``text``, in units of ``unit`` bytes (1 for a count).
    """
    decimals = len(text.partition(".")[2])
    # Engines round to hundredths and drop a trailing zero: 69.8 means 69.80.
    half = 0.5 * unit * 10.0 ** -max(decimals, 2) if unit > 1 else 0.0
    if name in out.figures and half > out.rounding.get(name, 0.0):
        return
    out.figures[name], out.rounding[name] = number(text) * unit, half


def number(text: str) -> float:
    """Return the number in ``text`` from a log, which may have thousands separators."""
    return float(text.replace(",", ""))


def arguments(text: str, sign: str) -> Iterator[tuple[str, str]]:
    """Yield the (name, value) pairs of a printed call or dict, such as ``a=1, b='x, y'`` or ``'a': 1}``.

    ``sign`` separates a name from its value ("=" or ":"). Commas within brackets and quotes do not separate
    pairs. An unmatched closing bracket ends the text.
    """
    name, value, depth, quote = "", "", 0, ""
    for place, char in enumerate(text):
        if quote:
            quote = "" if char == quote and text[place - 1] != "\\" else quote
        elif char in _QUOTES:
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSED and text[max(0, place - 1)] not in "-=":
            depth -= 1
            if depth < 0:
                break
        elif char == "," and depth == 0:
            if name:
                yield _bare(name), _bare(value)
            name, value = "", ""
            continue
        elif char == sign and depth == 0 and not name:
            name, value = value, ""
            continue
        value += char
    if name:
        yield _bare(name), _bare(value)


def _bare(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] in _QUOTES and text[-1] == text[0] else text
