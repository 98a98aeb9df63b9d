"""Self-contained HTML pages with memory bars: no script, no network, one file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.planner.errors import DeploymentError
from tonnage.planner.render import capacity_lines, headline, memory_rows, verdict_lines
from tonnage.planner.units import gib

if TYPE_CHECKING:  # a Plan shows itself by what is here
    from tonnage.planner.plans import Plan
    from tonnage.planner.sweep import SweepRow

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


def write_plan_page(path: str, plans: Sequence[Plan]) -> None:
    """A page per list of plans. Raises DeploymentError when the file cannot be written."""
    _write(path, "Memory plan", "".join(map(_plan_section, plans)))


def plan_fragment(plan: Plan) -> str:
    """One plan for a page of others: its style touches nothing outside it."""
    return f"<style>{_STYLE}</style>{_framed(_plan_section(plan))}"


def _plan_section(plan: Plan) -> str:
    first, second = headline(plan)
    total = max(1, plan.rank.total_bytes)
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{size:,}</td><td>{gib(size)}</td>"
        f"<td><div class=bar><i class=w style='width:{_percent(size, total)}%'></i></div></td>"
        f"<td>{escape(note)}</td></tr>"
        for name, size, note in memory_rows(plan)
        if name != "device"
    )
    verdict = "".join(f"<p>{escape(line)}</p>" for line in (*capacity_lines(plan), *verdict_lines(plan)))
    return (
        f"<h2>{escape(first)}</h2><p>{escape(second)}</p><table><tr><th>component<th>bytes<th><th>"
        f"share of {gib(total)}<th>bounds</tr>{rows}</table>{verdict}"
    )


def write_sweep_page(path: str, model: str, rows: Sequence[SweepRow]) -> None:
    """One line with a bar per combination."""
    lines = []
    for row in rows:
        head = f"<td>{row.gpus} x {escape(row.gpu)}</td><td>{escape(row.quantization)}</td>"
        head += f"<td>{escape(row.kv_cache_dtype)}</td>"
        if row.refused:
            lines.append(f"<tr>{head}<td colspan=4 class=no>{escape(row.refused)}</td></tr>")
            continue
        total = max(1, row.total_bytes)
        bar = "".join(
            f"<i class={kind} style='width:{_percent(size, total)}%'></i>"
            for kind, size in (
                ("w", row.weights_bytes),
                ("r", row.runtime_bytes + row.added_bytes),
                ("k", row.kv_pool_bytes),
            )
        )
        verdict = f"{row.max_concurrency:.1f}" if row.fits else "<span class=no>does not fit</span>"
        lines.append(
            f"<tr>{head}<td><div class=bar>{bar}</div></td><td>{gib(row.weights_bytes)}</td>"
            f"<td>{row.tokens:,}</td><td>{verdict}</td></tr>"
        )
    legend = (
        "<p><small>blue: weights, yellow: runtime, LoRA slots and draft, green: KV cache pool, "
        "grey: left over</small></p>"
    )
    heads = "GPUs", "quantization", "KV", "memory of one GPU", "weights", "tokens", "sequences"
    table = f"<table><tr><th>{'<th>'.join(heads)}</tr>"
    _write(path, f"Sweep of {model}", f"<h2>{escape(model)}</h2>{legend}{table}{''.join(lines)}</table>")


def _framed(body: str) -> str:
    return f"<div class=tonnage>{body}</div>"


def _percent(size: int, total: int) -> str:
    return f"{max(0.0, min(100.0, 100 * size / total)):.2f}"


def _write(path: str, title: str, body: str) -> None:
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        f"<style>{_PAGE_STYLE}{_STYLE}</style>{_framed(body)}</html>\n"
    )
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise DeploymentError(f"cannot be written: {error.strerror}", field="--html", hint=path) from None
