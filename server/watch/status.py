"""Observation of a Tonnage server's /memory for ``tonnage status``: on a terminal, and as plain text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tonnage.planner.bars import cells
from tonnage.server.observe.status import POOL_STATES, Status, status_of
from tonnage.server.watch.client import Client, WatchError
from tonnage.server.watch.drawing import MemoryTable, aligned

# Width of the bar in characters. Together with the name before the bar it fits a terminal of 60 columns.
_BAR = 48

# Colours of the KV pool's states. Without colours, the characters of the bar distinguish the states.
_COLOURS = dict(zip(POOL_STATES, ("blue", "yellow", "cyan", "dim"), strict=True))
_STATE_COLOURS = {
    "ready": "green",
    "loading": "yellow",
    "draining": "yellow",
    "restarting": "red",
    "failed": "red",
}


@dataclass(frozen=True, slots=True)
class StatusObservation:
    """One observation of a Tonnage server; `report` is the JSON object of its /memory."""

    url: str
    report: Mapping[str, Any]
    status: Status


def observe(client: Client) -> StatusObservation:
    """Read /memory of a Tonnage server and return the observation.

    Raises:
        WatchError: the server does not answer, rejects the key, or is not a Tonnage server.
    """
    answer = client.get("/memory")
    report = answer.json()
    if not isinstance(report, dict) or "plan" not in report:
        raise WatchError(
            f"{client.url} is not a Tonnage server: /memory answered {answer.status}",
            hint=f"tonnage watch {client.url} shows vLLM, SGLang and llama.cpp",
        )
    try:
        return StatusObservation(client.url, report, status_of(report))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
        raise WatchError(
            f"{client.url}/memory has another format than this release's: {type(error).__name__} {error}",
            hint="use the server's release of tonnage",
        ) from None


def to_dict(observation: StatusObservation) -> dict[str, Any]:
    """Return an observation of a Tonnage server as a JSON object."""
    return {"url": observation.url, **observation.report}


def plain(observation: StatusObservation) -> str:
    """Return an observation of a Tonnage server as plain text."""
    status = observation.status
    width = max(len(name) for name, _ in status.facts)
    facts = [f"{name:<{width}}  {text}" for name, text in status.facts]
    lines = [*_head(observation), "", *facts, "", *aligned(status.memory)]
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines)


def drawn(observation: StatusObservation, shades: str, trouble: str | None = None) -> Any:
    """Return an observation of a Tonnage server as a rich renderable.

    `trouble` is the error of a later attempt that failed, or None.
    """
    from rich.console import Group  # imported here, because only output on a terminal needs rich
    from rich.markup import escape
    from rich.table import Table

    status = observation.status
    first, *rest = _head(observation)
    colour = _STATE_COLOURS.get(status.state, "bold")
    first = escape(first).replace(status.state, f"[{colour}]{status.state}[/]", 1)
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(style="dim", overflow="fold")
    facts.add_column(overflow="fold")
    if status.usable:
        facts.add_row("", pool_bar(status, shades))
    for name, text in status.facts:
        shown = escape(text)
        for (state, blocks), shade in zip(status.pool.items(), shades, strict=False):
            if name == "KV pool":
                said = f"{blocks:,} {state}"
                shown = shown.replace(said, f"[{_COLOURS[state]}]{shade}[/] {said}", 1)
        facts.add_row(name, shown)
    parts: list[Any] = [
        first,
        *(f"[dim]{escape(line)}[/]" for line in rest),
        "",
        facts,
        "",
        MemoryTable(status.memory),
    ]
    if trouble:
        parts += ["", f"[red]{escape(trouble)}[/]"]
    return Group(*parts)


def _head(observation: StatusObservation) -> list[str]:
    status = observation.status
    return [f"{status.state} {status.since}: {status.model} at {observation.url}", status.plan]


def pool_bar(status: Status, shades: str) -> str:
    """Return a bar that shows the KV pool's blocks by state, as rich markup.

    The borders between the states are rounded to characters, not the widths, so that the widths add up to the
    width of the bar.
    """
    at, before, parts = 0, 0, []
    for (state, blocks), shade in zip(status.pool.items(), shades, strict=True):
        at += blocks
        end = cells(at, status.usable, _BAR)
        parts.append(f"[{_COLOURS[state]}]{shade * (end - before)}[/]")
        before = end
    return "".join(parts)
