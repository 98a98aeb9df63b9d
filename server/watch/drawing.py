"""Tables of memory for a terminal and for plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tonnage.server.observe.status import TITLES, Row


def aligned(rows: Sequence[Row]) -> list[str]:
    """The rows under their titles; nothing without rows."""
    if not rows:
        return []
    table = [TITLES, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    lines = []
    for row in table:
        cells = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([f"{row[0]:<{widths[0]}}", *cells]).rstrip())
    return lines


def tabled(rows: Sequence[Row]) -> Any:
    """The same as a table of rich."""
    from rich.markup import escape  # only on a terminal
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in TITLES:
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    return table
