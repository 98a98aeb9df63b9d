"""A sweep as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tonnage.planner.markup import percent, write_page
from tonnage.planner.sweep.grid import SweepRow
from tonnage.planner.units import gib


def write_sweep_page(path: str, model: str, rows: Sequence[SweepRow]) -> None:
    """One line with a bar per combination."""
    lines = []
    many = len({row.model for row in rows}) > 1
    for row in rows:
        head = f"<td>{escape(row.model)}</td>" if many else ""
        head += f"<td>{row.gpus} x {escape(row.gpu)}</td><td>{escape(row.quantization)}</td>"
        head += f"<td>{escape(row.kv_cache_dtype)}</td>"
        if row.refused or (row.unsupported and not row.fits):
            why = escape(row.refused or row.unsupported)
            lines.append(f"<tr>{head}<td colspan=6 class=no>{why}</td></tr>")
            continue
        total = max(1, row.total_bytes)
        bar = "".join(
            f"<i class={kind} style='width:{percent(size, total)}%'></i>"
            for kind, size in (
                ("w", row.weights_bytes),
                ("r", row.runtime_bytes + row.added_bytes),
                ("k", row.kv_pool_bytes),
            )
        )
        verdict = "<span class=no>does not fit</span>"
        if row.fits:
            verdict = f"{row.sequences:.1f}"
            if row.least_sequences < row.sequences:
                verdict += f" <small>(at least {row.least_sequences:.1f})</small>"
            if row.sequences < row.max_concurrency:
                verdict += f" <small>(the pool holds {row.max_concurrency:.1f})</small>"
        price = "no price"
        if row.usd_per_hour is not None:
            price = f"{row.usd_per_hour:.2f} <small>{escape(row.price_source)}</small>"
        each = "" if row.usd_per_sequence is None else f"{row.usd_per_sequence:.4f}"
        lines.append(
            f"<tr>{head}<td><div class=bar>{bar}</div></td><td>{gib(row.weights_bytes)}</td>"
            f"<td>{row.tokens:,}</td><td>{verdict}</td><td>{price}</td><td>{each}</td></tr>"
        )
    legend = (
        "<p><small>blue: weights, yellow: runtime, LoRA slots and draft, green: KV cache pool, "
        "grey: left over</small></p>"
    )
    heads: tuple[str, ...] = (
        "GPUs",
        "quantization",
        "KV",
        "memory of one GPU",
        "weights",
        "tokens",
        "sequences",
    )
    heads = (*(("model",) if many else ()), *heads, "USD/h", "each sequence")
    table = f"<table><tr><th>{'<th>'.join(heads)}</tr>"
    write_page(path, f"Sweep of {model}", f"<h2>{escape(model)}</h2>{legend}{table}{''.join(lines)}</table>")
