"""HTML pages of sweeps and of version comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tonnage.planner.markup import Facts, bar, key, paragraphs, table, write_page
from tonnage.planner.sweep.rows import SweepRow
from tonnage.planner.sweep.table import device_cell
from tonnage.planner.units import gib

_MOST_NAMED = 6  # maximum number of GPU names at the top of a page
_LEGEND = (("weights", "weights"), ("activation", "runtime, LoRA slots and draft"),
           ("kv_pool", "KV cache pool"), ("free", "left over"))  # fmt: skip


def write_sweep_page(
    path: str, model: str, rows: Sequence[SweepRow], engine: str, words: Sequence[str], lines: Sequence[str]
) -> None:
    """Write the HTML page of a sweep, with one table row and one memory bar per combination.

    Args:
        path: the file to write.
        model: names of the models.
        rows: the sweep's rows, one per combination of flag values.
        engine: name and version of the engine.
        words: words of the command line, which the page quotes.
        lines: paragraphs below the table.
    """
    many = len({row.model for row in rows}) > 1
    body = []
    for row in rows:
        head = f"<td>{escape(row.model)}</td>" if many else ""
        head += f"<td class=left>{escape(device_cell(row))}</td><td class=left>{escape(row.quantization)}</td>"
        head += f"<td class=left>{escape(row.kv_cache_dtype)}</td>"
        if row.refused or ((row.unsupported or row.stops) and not row.fits):
            why = escape(row.refused or row.unsupported or row.stops)
            body.append(f"<tr>{head}<td colspan=6 class='words no'>{why}</td></tr>")
            continue
        parts = (
            ("weights", row.weights_bytes),
            ("activation", row.runtime_bytes + row.added_bytes),
            ("kv_pool", row.kv_pool_bytes),
        )
        price = "no price" if row.usd_per_hour is None else f"{row.usd_per_hour:.2f}"
        each = "" if row.usd_per_sequence is None else f"{row.usd_per_sequence:.4f}"
        body.append(
            f"<tr>{head}<td>{gib(row.weights_bytes)}</td><td>{row.tokens:,}</td><td>{_verdict(row)}</td>"
            f"<td>{price}</td><td>{each}</td><td>{bar(parts, row.total_bytes)}</td></tr>"
        )
    heads = [*(["model"] if many else []), "device", "quantization", "KV", "weights", "tokens", "sequences",
             "USD/h", "each sequence", "memory of one device"]  # fmt: skip
    legend = " ".join(key(kind, name) for kind, name in _LEGEND)
    found = sum(row.fits for row in rows)
    verdict = f"{found:,} of {len(rows):,} fit" if rows else "No combination was found"
    text = f"{paragraphs([verdict], 'verdict')}<p><small>{legend}</small></p>"
    text += table(heads, body, ("device", "quantization", "KV")) + paragraphs(lines)
    facts = (("model", model), ("engine", engine), ("device", _devices(rows)))
    write_page(path, f"Sweep of {model}", text, words, facts)


def _verdict(row: SweepRow) -> str:
    if not row.fits:
        return "<span class=no>does not fit</span>"
    said = f"{row.sequences:.1f}"
    if row.least_sequences < row.sequences:
        said += f" <small>at least {row.least_sequences:.1f}</small>"
    if row.sequences < row.max_concurrency:
        said += f" <small>the pool holds {row.max_concurrency:.1f}</small>"
    return said


def _devices(rows: Sequence[SweepRow]) -> str:
    named = list(dict.fromkeys(device_cell(row) for row in rows))
    more = len(named) - _MOST_NAMED
    return ", ".join(named[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def write_upgrade_page(
    path: str, headline: Sequence[str], heads: Sequence[str], terms: Sequence[Sequence[str]],
    reasons: Sequence[str], steps: Sequence[tuple[str, str]], words: Sequence[str], facts: Facts,
) -> None:  # fmt: skip
    """Write an HTML page that compares the plans of a deployment for two versions of an engine.

    Args:
        path: the file to write.
        headline: paragraphs at the top.
        heads: column titles of the table of memory terms.
        terms: rows of the table of memory terms.
        reasons: reasons why one of the versions does not run the deployment.
        steps: (release with its changes, their effect on the plan).
        words: words of the command line, which the page quotes.
        facts: names and values at the top of the page.
    """
    body = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in terms)
    told = (
        f"<tr><td class=words>{escape(step)}</td><td class=words>{escape(did)}</td></tr>" for step, did in steps
    )
    between = paragraphs(["No release between changes this plan."])
    if steps:
        between = table(("release", "what it changes"), told, ("what it changes",))
    text = paragraphs(headline) + paragraphs(reasons, "verdict no") + table(heads, body)
    text += f"<h2>Releases</h2>{between}"
    write_page(path, f"Upgrade from {heads[1]} to {heads[2]}", text, words, facts)
