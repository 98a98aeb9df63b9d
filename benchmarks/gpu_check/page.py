"""The page of a check (`--html`), with one table per step."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from tonnage.planner import markup

from .processes import Outcome
from .rows import Row

_HEADS = ("measurement", "verdict", "measured", "unit", "planned", "bounds", "note")


def write_page(path: str, device: str, outcomes: Mapping[str, Outcome]) -> None:
    """Write the rows of all steps to an HTML file that needs no other file.

    Raises:
        DeploymentError: the file cannot be written.
    """
    body = "".join(
        f"<h2>{escape(name)}: {found.status}, {found.seconds:.1f} s</h2>"
        + (markup.paragraphs([found.why]) if found.why else "")
        + (
            markup.table(_HEADS, map(_row, found.rows), words=("measurement", "verdict", "note"))
            if found.rows
            else ""
        )
        for name, found in outcomes.items()
    )
    markup.write_page(path, f"Tonnage on this {device}", body)


def _row(row: Row) -> str:
    bounds = "" if row.low is None or row.high is None else f"{row.low:,} to {row.high:,}"
    planned = "" if row.planned is None else f"{row.planned:,}"
    value = (
        f"{row.value:,.4g}"
        if isinstance(row.value, float)
        else f"{row.value:,}"
        if isinstance(row.value, int)
        else row.value
    )
    cells = (row.name, row.verdict, value, row.unit, planned, bounds, row.note)
    return "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>"
