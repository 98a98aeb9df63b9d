"""What the lines of an engine's start-up log say: each engine reads its own (Engine.read_log_line)."""

from __future__ import annotations

import re
from functools import cache

from tonnage.planner.records import dataclass, field

NUMBER = r"(-?[\d,]+(?:\.\d+)?)"
compiled = cache(re.compile)
Lines = tuple[tuple[str, float, str], ...]
"""(figure, unit, pattern of the line with the number as its first group)"""


@dataclass(slots=True)
class LogFigures:
    """``figures``: name -> bytes or a count; ``flags``: what the log says the engine was started with.
    ``pools``: bytes of the caches it names one by one; ``cells``: of the longest."""

    engine: str | None = None
    version: str | None = None
    model: str | None = None
    figures: dict[str, float] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    pools: float = 0.0
    cells: float = 0.0


def read_figures(engine: str, lines: Lines, line: str, out: LogFigures) -> None:
    for name, unit, pattern in lines:
        if match := compiled(pattern).search(line):
            out.figures[name] = number(match[1]) * unit
            out.engine = out.engine or engine


def number(text: str) -> float:
    return float(text.replace(",", ""))
