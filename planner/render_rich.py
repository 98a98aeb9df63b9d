"""The plan in a terminal. Imported only there: rich takes longer to load than the plan to compute."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tonnage.planner import render
from tonnage.planner.plans import Plan
from tonnage.planner.units import gib

_BAR_WIDTH = 30
_OTHER_COLUMNS = 68  # what the columns beside the bar need


def print_rich(plan: Plan, explain: bool, file: TextIO) -> None:
    """Table of the worst rank with a bar per component, capacity, verdict and, if asked, every term."""
    console = Console(file=file, highlight=False)
    for line in render.headline(plan):
        console.print(escape(line))
    table = Table(box=None, pad_edge=False)
    for title, side in (("", "left"), ("", "right"), ("bytes", "right"), ("", "left"), ("bounds", "left")):
        table.add_column(title, justify=side, no_wrap=True)  # type: ignore[arg-type]
    width = max(8, min(_BAR_WIDTH, console.width - _OTHER_COLUMNS))
    total = max(1, plan.rank.total_bytes)
    for name, size, note in render.memory_rows(plan):
        cells = 0 if name == "device" else max(0, min(width, round(width * size / total)))
        colour = "red" if size < 0 else "green" if name == "free" else "cyan"
        table.add_row(name, gib(size), f"{size:,}", f"[{colour}]{'█' * cells}[/]", note)
    console.print(table)
    for line in render.capacity_lines(plan):
        console.print(escape(line))
    for line in render.verdict_lines(plan):
        console.print(f"[{'green' if plan.fits else 'red'}]{escape(line)}[/]")
    if explain:
        terms = Table(title="How each figure came about", title_justify="left", box=None, pad_edge=False)
        terms.add_column("term", overflow="fold")
        terms.add_column("bytes", justify="right")
        terms.add_column("formula", overflow="fold")
        terms.add_column("source", overflow="fold")
        for term in plan.terms:
            terms.add_row(escape(term.name), f"{term.value:,}", escape(term.formula), escape(term.source))
        console.print(terms)
