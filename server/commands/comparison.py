"""The table planned | measured | difference, and whether each difference is within its bound."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from tonnage.planner.engines.runtime.api import LIMIT_BYTES

# The plan is exact for weights and pool. For the processes it forecasts what libraries allocate as well.
PROCESS_BOUND = 0.10


@dataclass(frozen=True, slots=True)
class Row:
    """``planned`` and ``measured`` in bytes; ``bound`` the largest relative difference that is right."""

    name: str
    planned: int
    measured: int | None
    bound: float = 0.0

    @property
    def difference(self) -> int | None:
        return None if self.measured is None else self.measured - self.planned

    @property
    def within(self) -> bool:
        """A row that this engine does not measure says nothing against the plan."""
        return self.difference is None or abs(self.difference) <= self.bound * self.planned

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"difference": self.difference, "within": self.within}


def process_row(engine: str, device: str, used: int, measured: int | None) -> Row:
    """All processes under a load without grammars and large bodies: what a plan for a CPU keeps free for those
    is not held. ``used``: bytes of the whole plan."""
    kept_free = LIMIT_BYTES if engine in ("hf", "vllm") and device == "cpu" else 0
    return Row("process", used - kept_free, measured, PROCESS_BOUND)


def print_table(rows: Iterable[Row], file: TextIO | None = None) -> None:
    """Columns aligned with spaces; bytes in full and in MiB (2^20), differences with their sign."""
    out = sys.stdout if file is None else file
    table = [("", "planned", "measured", "difference", "")]
    for row in rows:
        if row.measured is None or row.difference is None:
            table.append((row.name, _bytes(row.planned), "not measured", "", ""))
            continue
        share = f" ({100 * row.difference / row.planned:+.1f} %)" if row.planned and row.difference else ""
        verdict = "ok" if row.within else "OUTSIDE"
        limit = f" (at most {100 * row.bound:.0f} %)" if row.bound else ""
        table.append(
            (
                row.name,
                _bytes(row.planned),
                _bytes(row.measured),
                f"{row.difference:+,} bytes{share}" if row.difference else "0 bytes",
                verdict + limit,
            )
        )
    widths = [max(len(line[column]) for line in table) for column in range(5)]
    for name, planned, measured, difference, verdict in table:
        line = (
            f"{name:<{widths[0]}}  {planned:>{widths[1]}}  {measured:>{widths[2]}}  {difference:>{widths[3]}}"
        )
        print(f"{line}  {verdict}".rstrip(), file=out)


def _bytes(value: int) -> str:
    return f"{value:,} ({value / 2**20:.1f} MiB)" if value >= 2**20 else f"{value:,}"
