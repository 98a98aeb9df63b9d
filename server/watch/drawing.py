"""Tables of memory for a terminal and for plain text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from tonnage.server.observe.status import TITLES, Row


def aligned(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a memory table as text, with a title row and aligned columns; empty without rows."""
    return columns([titles_of(rows), *rows]) if rows else []


def columns(table: Sequence[Row]) -> list[str]:
    """Return the lines of a table of five columns as text; the three middle columns are right-aligned."""
    widths = [max(len(row[column]) for row in table) for column in range(5)]
    lines = []
    for row in table:
        cells = [f"{cell:>{width}}" for cell, width in zip(row[1:4], widths[1:4], strict=True)]
        lines.append("  ".join([f"{row[0]:<{widths[0]}}", *cells, row[4]]).rstrip())
    return lines


def titles_of(rows: Sequence[Row]) -> Row:
    """Return the column titles of a memory table; the verdict column has one only if a row has a verdict."""
    return TITLES if any(row[4] for row in rows) else (*TITLES[:4], "")


class MemoryTable:
    """A memory table for rich that fits the terminal's width without truncating a number.

    A narrow terminal gets GiB instead of exact bytes, and in a still narrower one cells are folded onto further
    lines.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Yield the memory table in the form that fits the console's width."""
        from rich.markup import escape  # imported here, because only output on a terminal needs rich
        from rich.table import Table

        titles, rows = titles_of(self._rows), self._rows
        if max(map(len, aligned(rows)), default=0) > options.max_width:
            rows = [(*row[:4], row[4].partition(",")[0]) for row in rows]
        if max(map(len, aligned(rows)), default=0) > options.max_width:
            first, planned, *rest = titles
            titles, rows = (first, planned.split()[0], rest[0], rest[1], rest[2]), [_short(row) for row in rows]
        count = 5 if titles[4] else 4
        table = Table(box=None, pad_edge=False)
        for place, title in enumerate(titles[:count]):
            table.add_column(title, justify="right" if 0 < place < 4 else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(escape, row[:count]))
        yield table


def _short(row: Row) -> Row:
    """Return a memory table's row without exact bytes: ``1.0 KiB`` in place of ``1,024 (1.0 KiB)``."""
    name, *cells = (re.sub(r"^\S+ \((.+)\)$", r"\1", cell) for cell in row)
    return name, cells[0], cells[1], cells[2], cells[3]
