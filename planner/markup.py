"""HTML pages with memory bars, whatever they show: no script, no network, one file."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from tonnage.planner.errors import DeploymentError
from tonnage.planner.units import gib

_STYLE = """
.tonnage{font:15px/1.5 system-ui,sans-serif;max-width:70rem;color:#1c2430;background:#fff}
.tonnage table{border-collapse:collapse;width:100%}
.tonnage td,.tonnage th{padding:.25rem .6rem;text-align:right;border-bottom:1px solid #dde3ea}
.tonnage td:first-child,.tonnage th:first-child{text-align:left}
.tonnage .bar{display:flex;height:1rem;background:#eef1f5;min-width:14rem}
.tonnage .bar i{display:block;height:100%}
.tonnage .w{background:#3b6ea5}.tonnage .k{background:#4fa37a}.tonnage .r{background:#d9a441}
.tonnage .no{color:#a33}.tonnage small{color:#667}
"""
_PAGE_STYLE = "body{margin:2rem auto;max-width:70rem;padding:0 1rem}"


def memory_section(
    title: str, subtitle: str, rows: Iterable[tuple[str, int, str]], total: int, lines: Iterable[str]
) -> str:
    """A heading, a table of ``rows`` (name, bytes, note) with bars of ``total`` bytes, and ``lines`` below."""
    whole = max(1, total)
    table = "".join(
        f"<tr><td>{escape(name)}</td><td>{size:,}</td><td>{gib(size)}</td>"
        f"<td><div class=bar><i class=w style='width:{percent(size, whole)}%'></i></div></td>"
        f"<td>{escape(note)}</td></tr>"
        for name, size, note in rows
    )
    below = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return (
        f"<h2>{escape(title)}</h2><p>{escape(subtitle)}</p><table><tr><th>component<th>bytes<th><th>"
        f"share of {gib(whole)}<th>bounds</tr>{table}</table>{below}"
    )


def fragment(body: str) -> str:
    """``body`` for a page of others (a notebook): its style touches nothing outside it."""
    return f"<style>{_STYLE}</style>{_framed(body)}"


def _framed(body: str) -> str:
    return f"<div class=tonnage>{body}</div>"


def percent(size: int, total: int) -> str:
    """Width of a bar of ``size`` bytes of ``total``."""
    return f"{max(0.0, min(100.0, 100 * size / total)):.2f}"


def write_page(path: str, title: str, body: str) -> None:
    """One self-contained file. Raises DeploymentError when it cannot be written."""
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        f"<style>{_PAGE_STYLE}{_STYLE}</style>{_framed(body)}</html>\n"
    )
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise DeploymentError(f"cannot be written: {error.strerror}", field="--html", hint=path) from None
