"""Output of a plan as text: a table with bars in a terminal, plain lines in all other files."""

from __future__ import annotations

from typing import TextIO

from tonnage.planner.bars import cells, shades
from tonnage.planner.errors import escaped
from tonnage.planner.plans import Plan
from tonnage.planner.screen import Cell, Screen
from tonnage.planner.units import gib

_BAR_WIDTH = 30
_OTHER_COLUMNS = 68  # width, in characters, of all table columns except the memory bar


def print_plan(plan: Plan, explain: bool, file: TextIO) -> None:
    """Print a plan; with `explain`, also every memory term with its formula."""
    if file.isatty():
        _draw(plan, explain, file)
        return
    for line in plain_lines(plan, explain):
        print(escaped(line), file=file)  # escape the model's name: a folder's name may contain any characters


def for_this_cpu(plan: Plan, gpu: str | None, device: str | None, memory: int | None) -> str | None:
    """Return a line of text that says that a plan is for the CPU because the user named no GPU.

    Returns None for a plan on another device, or if a GPU or device was given.

    Args:
        plan: the plan.
        gpu: the --gpu that was given, or None.
        device: the --device that was given, or None.
        memory: the --device-memory that was given, or None.
    """
    if plan.deployment.device != "cpu" or device is not None or (gpu or "auto").lower() != "auto":
        return None
    whose = "this machine's CPU" if memory is None else "a CPU"
    about = f"For {whose}, {gib(plan.rank.total_bytes)} of memory, as no"
    if gpu is not None:
        return f"{about} NVIDIA GPU was found here; --gpu h100-80g plans for one"
    return f"{about} GPU was named; --gpu h100-80g plans for one, --gpu auto for this machine's"


def plain_lines(plan: Plan, explain: bool) -> list[str]:
    """Return the plan as lines of plain text; with `explain`, also every memory term with its formula."""
    lines = [*plan.headline(), ""]
    for name, size, note in plan.memory_rows():
        lines.append(f"{name:<14}{size:>20,} bytes {gib(size):>14}  {note}".rstrip())
    lines += ["", *plan.capacity_lines(), *plan.host_lines(), *plan.verdict_lines()]
    return [*lines, *_terms(plan)] if explain else lines


def _terms(plan: Plan) -> list[str]:
    lines = ["", "How each figure was computed (in bytes unless stated):"]
    for term in plan.terms:
        lines += [f"{term.name} = {term.value:,}", f"    {term.formula}  [{term.source}]"]
    return lines


def _draw(plan: Plan, explain: bool, file: TextIO) -> None:
    """Print a plan: a table with bars of the most used rank's memory, KV pool capacity, and verdict.

    With `explain`, also print every memory term with its formula.
    """
    screen = Screen(file)
    for line in plan.headline():
        screen.print(line)
    width, full = max(8, min(_BAR_WIDTH, screen.width - _OTHER_COLUMNS)), shades(file)[0]
    screen.print()
    rows: list[tuple[Cell, ...]] = [("", "", "bytes", "", "bounds")]
    for name, size, note in plan.memory_rows():
        bar = full * (0 if name == "device" else cells(size, plan.rank.total_bytes, width))
        colour = "red" if size < 0 else "green" if name == "free" else "cyan"
        rows.append((name, gib(size), f"{size:,}", (bar, colour), note))
    screen.table(rows, right=(1, 2), titles=True)
    screen.print()
    for line in (*plan.capacity_lines(), *plan.host_lines()):
        screen.print(line)
    for line in plan.verdict_lines():
        screen.print(line, "green" if plan.fits else "red")
    for line in _terms(plan) if explain else ():
        screen.print(line)
