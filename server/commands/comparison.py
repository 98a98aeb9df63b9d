"""The table that compares planned with measured bytes, and checks each difference against its bound."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from tonnage.planner.engines.runtime.api import LIMIT_BYTES
from tonnage.server.observe.status import OK, OUTSIDE, PROCESS_BOUND
from tonnage.server.watch.drawing import columns


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One line of the comparison table: planned and measured bytes of one memory component.

    `bound` is the largest accepted difference, relative to the planned bytes.
    """

    name: str
    planned: int
    measured: int | None
    bound: float = 0.0

    @property
    def difference(self) -> int | None:
        """Return the component's measured minus planned bytes, or None when the row has no measurement."""
        return None if self.measured is None else self.measured - self.planned

    @property
    def within(self) -> bool:
        """Return whether planned and measured bytes differ by at most the bound; True without a measurement."""
        return self.difference is None or abs(self.difference) <= self.bound * self.planned

    def to_dict(self) -> dict[str, Any]:
        """Return the row of the comparison table as a JSON object."""
        return asdict(self) | {"difference": self.difference, "within": self.within}


def process_row(engine: str, device: str, used: int, measured: int | None) -> ComparisonRow:
    """Return the table row that compares planned and measured memory of all processes.

    The requests of the measurement have no grammars and no large bodies. A plan for a CPU reserves memory for
    grammars and large bodies, so this memory is subtracted from the planned bytes.

    Args:
        engine: name of the plan's engine.
        device: type of the plan's device, such as "cpu".
        used: planned bytes, without the bytes that the plan leaves free.
        measured: measured peak of all processes in bytes, None when not measured.
    """
    kept_free = LIMIT_BYTES if engine in ("hf", "vllm") and device == "cpu" else 0
    return ComparisonRow("process", used - kept_free, measured, PROCESS_BOUND)


def print_table(rows: Iterable[ComparisonRow]) -> None:
    """Print the comparison table in aligned columns: exact bytes, MiB (2^20 bytes) and signed differences."""
    table = [("", "planned", "measured", "difference", "")]
    for row in rows:
        if row.measured is None or row.difference is None:
            table.append((row.name, _bytes(row.planned), "not measured", "", ""))
            continue
        share = f" ({100 * row.difference / row.planned:+.1f} %)" if row.planned and row.difference else ""
        verdict = OK if row.within else OUTSIDE
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
    print("\n".join(columns(table)))


def _bytes(value: int) -> str:
    return f"{value:,} ({value / 2**20:.1f} MiB)" if value >= 2**20 else f"{value:,}"
