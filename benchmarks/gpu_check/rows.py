"""Result rows of the steps, and the pipe on which a child process reports them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, TextIO

OK, OFF, INFO, SKIPPED, FAILED = "ok", "off", "info", "skipped", "failed"


@dataclass(frozen=True, slots=True)
class Row:
    """One measured figure of a step.

    Attributes:
        name: what was measured.
        value: the measured figure, or words.
        unit: unit of the figures, empty for words.
        planned: the planned figure, or None if nothing was planned.
        low: lower bound of the plan.
        high: upper bound of the plan.
        verdict: `ok`, `off` (outside the plan or unequal), `info` (nothing to compare with), `skipped` or
            `failed`.
        note: reason or explanation.
    """

    name: str
    value: float | str
    unit: str = ""
    planned: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: str = INFO
    note: str = ""

    def text(self) -> str:
        """Return the row as one line for a terminal."""
        figure = f"{self.value:,}" if isinstance(self.value, int) else str(self.value)
        if isinstance(self.value, float):
            figure = f"{self.value:,.4g}"
        parts = [f"{self.verdict:<8}{self.name}: {figure} {self.unit}".rstrip()]
        if self.planned is not None:
            parts.append(f"planned {self.planned:,}")
        if self.low is not None and self.high is not None and self.low != self.high:
            parts.append(f"{self.low:,} to {self.high:,}")
        return "; ".join([*parts, self.note] if self.note else parts)


def exact(name: str, value: int, planned: int) -> Row:
    """Return a row of bytes that must equal the plan."""
    return Row(name, value, "bytes", planned, verdict=OK if value == planned else OFF)


def within(name: str, value: int, planned: int, bounds: tuple[float, float], note: str = "") -> Row:
    """Return a row of bytes that must lie within the plan's bounds."""
    low, high = bounds
    return Row(name, value, "bytes", planned, int(low), int(high), OK if low <= value <= high else OFF, note)


def skipped(name: str, why: str) -> Row:
    """Return the row of a measurement that did not run."""
    return Row(name, "skipped", verdict=SKIPPED, note=why)


class Pipe:
    """The child's side of the pipe: it sends the begin, the rows and the end of each step at once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def send(self, **message: Any) -> None:
        """Send one message as a line of JSON."""
        print(json.dumps(message), file=self._stream, flush=True)

    def row(self, row: Row) -> None:
        """Send one row of the current step."""
        self.send(row=asdict(row))
