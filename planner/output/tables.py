"""Tables of plans and sweeps, printed as CSV or Markdown."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from tonnage.planner.errors import escaped
from tonnage.planner.model.capacity import RequestCapacity
from tonnage.planner.plans import Plan


@dataclass(frozen=True, slots=True)
class Table:
    """A table for CSV or Markdown output. Each row has one value per column; sizes are integers in bytes."""

    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


def plan_table(plan: Plan) -> Table:
    """Return a plan as a table: memory of the rank that uses the most, then the KV pool's capacity."""
    rows: list[tuple[object, ...]] = [(name, size, note) for name, size, note in plan.memory_rows()]
    cache = plan.kv_cache
    rows += [
        ("blocks", cache.num_blocks, _bounds(plan, "num_blocks")),
        ("tokens", cache.tokens, _bounds(plan, "tokens")),
        ("max_concurrency", round(cache.max_concurrency, 2), _bounds(plan, "max_concurrency")),
        ("max_running", round(plan.running, 2), ""),
        *(_request_row(request) for request in plan.requests),
        ("fits", "yes" if plan.fits else "no", "; ".join(plan.reasons)),
    ]
    return Table(("component", "bytes", "bounds"), tuple(rows))


def _request_row(request: RequestCapacity) -> tuple[object, ...]:
    low, high = request.bounds
    ends = f"{low} to {high}" if low < high else ""
    return f"requests of {request.prompt_tokens}+{request.output_tokens}", request.at_once, ends


def _bounds(plan: Plan, name: str) -> str:
    if name not in plan.intervals:
        return ""
    low, high = plan.intervals[name]
    return f"{low} to {high}"


def print_table(table: Table, file: TextIO, *, markdown: bool) -> None:
    """Print a table as CSV or as Markdown."""
    if not markdown:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table.columns)
        writer.writerows(
            [[escaped(cell) if isinstance(cell, str) else cell for cell in row] for row in table.rows]
        )
        return
    print(_line(table.columns), file=file)
    print(_line(["---"] * len(table.columns)), file=file)
    for row in table.rows:
        print(_line([f"{cell:,}" if isinstance(cell, int) else escaped(str(cell)) for cell in row]), file=file)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
