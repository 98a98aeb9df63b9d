"""What the lines of an engine's start-up log say: each engine reads its own (Engine.read_log_line).

Patterns are matched against a line without its blanks (``squeezed``): a log that a terminal, a mail or a
pod's runtime has wrapped breaks lines anywhere, within a number too. Blanks in a pattern are for its reader.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from tonnage.planner.records import dataclass, field

NUMBER = r"(-?\d[\d,]*(?:\.\d+)?)"
Lines = tuple[tuple[str, float, str], ...]
"""(figure, unit, pattern of the line with the number as its first group)"""

_OPEN, _CLOSED, _QUOTES = "([{<", ")]}>", "'\""


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Of a pattern for a squeezed line."""
    return re.compile(pattern.replace(" ", ""))


@dataclass(slots=True)
class LogFigures:
    """What one rank says. ``figures``: name -> bytes or a count; ``rounding``: how far the one printed may be
    from the true one; ``flags``: what the log says the engine was started with. ``pools``: bytes of the caches
    it names one by one; ``cells``: of the longest; ``state``: what a reader keeps between two lines."""

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
    """The line without its blanks."""
    return "".join(line.split())


def read_figures(engine: str, lines: Lines, line: str, out: LogFigures) -> None:
    """``line``: squeezed. A figure printed more than once keeps the most decimals, else the last."""
    for name, unit, pattern in lines:
        if match := compiled(pattern).search(line):
            keep(out, name, match[1], unit)
            out.engine = out.engine or engine


def keep(out: LogFigures, name: str, text: str, unit: float) -> None:
    """The figure ``name``, printed as ``text`` in ``unit`` bytes (1: a count)."""
    decimals = len(text.partition(".")[2])
    # engines round to hundredths and drop a last zero: 69.8 is 69.80
    half = 0.5 * unit * 10.0 ** -max(decimals, 2) if unit > 1 else 0.0
    if name in out.figures and half > out.rounding.get(name, 0.0):
        return
    out.figures[name], out.rounding[name] = number(text) * unit, half


def number(text: str) -> float:
    return float(text.replace(",", ""))


def arguments(text: str, sign: str) -> Iterator[tuple[str, str]]:
    """(name, value) of ``a=1, b='x, y'`` or ``'a': 1, 'b': {...}}``: what ``sign`` divides, up to the bracket
    that closes the whole; brackets and quotes keep what is in them together."""
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
