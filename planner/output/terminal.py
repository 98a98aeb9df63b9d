"""A plan for people: a table with bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import TextIO

from tonnage.planner.plans import Plan
from tonnage.planner.units import gib

_BAR_WIDTH = 30
_OTHER_COLUMNS = 68  # what the columns beside the bar need


def print_plan(plan: Plan, explain: bool, file: TextIO) -> None:
    """``explain``: with every term."""
    if file.isatty():
        _print_rich(plan, explain, file)
        return
    for line in plain_lines(plan, explain):
        print(line, file=file)


def plain_lines(plan: Plan, explain: bool) -> list[str]:
    lines = [*plan.headline(), ""]
    for name, size, note in plan.memory_rows():
        lines.append(f"{name:<14}{size:>20,} bytes {gib(size):>14}  {note}".rstrip())
    lines += ["", *plan.capacity_lines(), *plan.host_lines(), *plan.verdict_lines()]
    if explain:
        lines += ["", "How each figure came about (bytes unless said):"]
        for term in plan.terms:
            lines.append(f"{term.name} = {term.value:,}")
            lines.append(f"    {term.formula}  [{term.source}]")
    return lines


def _print_rich(plan: Plan, explain: bool, file: TextIO) -> None:
    """Table of the worst rank with a bar per component, capacity, verdict and, if asked, every term."""
    # imported here: rich takes longer to load than the plan to compute
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(file=file, highlight=False)
    for line in plan.headline():
        console.print(escape(line))
    table = Table(box=None, pad_edge=False)
    for title, side in (("", "left"), ("", "right"), ("bytes", "right"), ("", "left"), ("bounds", "left")):
        table.add_column(title, justify=side, no_wrap=True)  # type: ignore[arg-type]
    width = max(8, min(_BAR_WIDTH, console.width - _OTHER_COLUMNS))
    total = max(1, plan.rank.total_bytes)
    for name, size, note in plan.memory_rows():
        cells = 0 if name == "device" else max(0, min(width, round(width * size / total)))
        colour = "red" if size < 0 else "green" if name == "free" else "cyan"
        table.add_row(name, gib(size), f"{size:,}", f"[{colour}]{'█' * cells}[/]", note)
    console.print(table)
    for line in (*plan.capacity_lines(), *plan.host_lines()):
        console.print(escape(line))
    for line in plan.verdict_lines():
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
