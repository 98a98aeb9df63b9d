"""HTML of plans, tables and replays of request traces, as self-contained pages that look like `tonnage page`.

A page has one script, which sorts and filters its tables. HTML for a notebook has no script, and its CSS rules
apply only to this HTML. The colours are defined in planner/page/data/style.css.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from html import escape
from importlib import import_module
from pathlib import Path

from tonnage.planner.errors import DeploymentError
from tonnage.planner.tables import FIRST, SCRIPT
from tonnage.planner.units import gib

# Memory component of a plan (Plan.memory_rows) -> CSS class of its colour
_COLOURS = {
    "weights": "weights", "KV cache pool": "kv_pool", "activations": "activation", "framework": "framework",
    "CUDA graphs": "cuda_graph", "LoRA slots": "lora", "draft model": "draft",
    "KV tier": "kv_pool", "free": "free",
}  # fmt: skip

Facts = Iterable[tuple[str, str]]  # (name, value) pairs, not yet escaped for HTML

_STYLE = """
.tonnage{--paper:light-dark(#fff,#12171e);--ink:light-dark(#1c2430,#e5eaf1);--soft:light-dark(#566273,#a3aebd);
--line:light-dark(#d6dde6,#323c49);--field:light-dark(#f4f6f9,#1c232c);--accent:light-dark(#1f5f99,#7db6ea);
--bad:light-dark(#a02b2b,#f09a9a);--good:light-dark(#1d6b45,#86d3ac);--free:light-dark(#e6eaf0,#2a323d);
--weights:#3b6ea5;--pool:#3f8f68;--activation:#b97e18;--graphs:#8a5aa8;--framework:#77818f;--lora:#b0507a;
--draft:#2f8f9a;max-width:84rem;font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
.tonnage h2{margin:1.6rem 0 .4rem;font-size:1.1rem;overflow-wrap:anywhere}
.tonnage p,.tonnage li{margin:.4rem 0;overflow-wrap:anywhere}
.tonnage .scroll{overflow-x:auto}
.tonnage table{border-collapse:collapse;width:100%;font-size:1em;font-variant-numeric:tabular-nums}
.tonnage td,.tonnage th{padding:.3rem .6rem;text-align:right;vertical-align:top;white-space:nowrap;
color:inherit;background:var(--paper);border-bottom:1px solid var(--line)}
.tonnage td:first-child,.tonnage th:first-child,.tonnage .left,.tonnage .words{text-align:left}
.tonnage td.words{white-space:normal;min-width:8rem}
.tonnage .verdict{font-size:1.35rem;font-weight:600;margin:.2rem 0}
.tonnage .no{color:var(--bad)}
.tonnage .verdict.no{font-size:1.1rem}
.tonnage .yes{color:var(--good)}
.tonnage .figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(10rem,1fr));
gap:.7rem;margin:.8rem 0}
.tonnage .figures div{background:var(--field);border-radius:.4rem;padding:.5rem .8rem}
.tonnage dt,.tonnage small{color:var(--soft);font-size:.875rem;font-weight:400}
.tonnage dd{margin:0;overflow-wrap:anywhere}
.tonnage .figures dd{font-size:1.25rem;font-variant-numeric:tabular-nums}
.tonnage .figures small,.tonnage td small{display:block}
.tonnage .bar{display:flex;height:1rem;min-width:8rem;background:var(--free);border-radius:.3rem;
overflow:hidden;print-color-adjust:exact;-webkit-print-color-adjust:exact}
.tonnage .whole{height:2.2rem;margin:.7rem 0}
.tonnage .bar i{display:block;height:100%}
.tonnage .key{display:inline-block;width:.8em;height:.8em;border-radius:.15em;margin-right:.45em;
print-color-adjust:exact;-webkit-print-color-adjust:exact}
.tonnage .weights{background:var(--weights)}
.tonnage .kv_pool{background:var(--pool)}
.tonnage .activation{background:var(--activation)}
.tonnage .cuda_graph{background:var(--graphs)}
.tonnage .framework{background:var(--framework)}
.tonnage .lora{background:var(--lora)}
.tonnage .draft{background:var(--draft)}
.tonnage .free{background:var(--free)}
"""
_PAGE_STYLE = """
:root{color-scheme:light dark}
body{margin:0;background:light-dark(#fff,#12171e)}
.tonnage{margin:0 auto;padding:1rem 1rem 2rem}
h1{margin:0;font-size:1.5rem;overflow-wrap:anywhere}
.facts{display:flex;flex-wrap:wrap;gap:.3rem 1.6rem;margin:.6rem 0}
pre{background:var(--field);border:1px solid var(--line);border-radius:.4rem;padding:.6rem .8rem;margin:.6rem 0;
font-size:.9rem;white-space:pre-wrap;overflow-wrap:anywhere}
th button{all:unset;cursor:pointer}
.find{display:flex;flex-wrap:wrap;gap:.4rem .8rem;align-items:center}
.find input,.find button{font:inherit;color:inherit;background:var(--field);border:1px solid var(--line);
border-radius:.3rem;padding:.25rem .6rem}
.find input{flex:0 1 20rem;min-width:0}
tbody tr[hidden]{display:none!important}
th button::after{content:"\\2195";color:var(--soft);padding-left:.25em}
th[aria-sort=ascending] button::after{content:"\\2191"}
th[aria-sort=descending] button::after{content:"\\2193"}
:focus-visible{outline:3px solid var(--accent);outline-offset:1px}
@media(max-width:40rem){td:first-child,th:first-child{position:sticky;left:0;white-space:normal;min-width:6rem}
.wide,.wide tbody,.wide tfoot{display:block}
.wide thead tr{display:flex;flex-wrap:wrap}
.wide tbody tr,.wide tfoot tr{display:grid;grid-template-columns:1fr 1fr;padding:.5rem 0;
border-bottom:1px solid var(--line)}
.wide td,.wide th,.wide td:first-child{position:static;border:0;padding:.1rem .4rem;white-space:normal;
min-width:0;text-align:left}
.wide tbody td:first-child,.wide td[colspan],.wide td.words,.wide td:has(.bar){grid-column:1/-1}
.wide tbody td:first-child{font-weight:600}
.wide td[data-label]:not(:first-child,[colspan],:empty)::before{content:attr(data-label) " ";color:var(--soft);
font-size:.875rem}}
@media print{:root{color-scheme:light}.find label,.find input,.find button{display:none}
.tonnage{max-width:none;padding:0;font-size:9pt;line-height:1.3}
.scroll{overflow:visible}td,th{padding:.12rem .3rem;white-space:normal}th button::after{content:""}}
"""


def table(heads: Sequence[str], rows: Iterable[str], words: Collection[str] = (), foot: str = "") -> str:
    """Return an HTML table inside a container that scrolls horizontally.

    A table of more than three columns shows each row as a card on a phone. Only the first 100 rows are visible
    until the reader clicks a button.

    Args:
        heads: titles of the columns.
        rows: markup of each `<tr>`.
        words: titles of text columns, which are left-aligned as the first column is.
        foot: markup of the `<tr>` in the footer.
    """
    top = "".join(f"<th{' class=words' if head in words else ''}>{escape(head)}</th>" for head in heads)
    below = f"<tfoot>{foot}</tfoot>" if foot else ""
    drawn = (row if at < FIRST else row.replace("<tr", "<tr hidden", 1) for at, row in enumerate(rows))
    body = f"<tbody>{''.join(drawn)}</tbody>"
    wide = " class=wide" if len(heads) > 3 else ""
    return f"<div class=scroll><table{wide}><thead><tr>{top}</tr></thead>{body}{below}</table></div>"


def figures(shown: Iterable[tuple[str, str, str]]) -> str:
    """Return an HTML list of the most important figures of a plan or replay.

    Args:
        shown: (name, value, note) of each figure.
    """
    boxes = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}"
        f"{f'<small>{escape(note)}</small>' if note else ''}</dd></div>"
        for name, value, note in shown
    )
    return f"<dl class=figures>{''.join(boxes)}</dl>"


def bar(parts: Iterable[tuple[str, int]], total: int, whole: bool = False) -> str:
    """Return the HTML of a stacked bar that shows the parts of a memory size.

    Args:
        parts: (CSS class, bytes) of each coloured part of the bar.
        total: bytes that the full width of the bar stands for.
        whole: whether the bar is the large one at the top of a page.
    """
    drawn = "".join(f"<i class={kind} style='width:{percent(size, total)}%'></i>" for kind, size in parts)
    kind = "'bar whole'" if whole else "bar"
    return f"<div class={kind}>{drawn}</div>"


def key(kind: str, name: str) -> str:
    """Return `name` as HTML, after a square in the colour of the CSS class `kind`."""
    return f'<i class="key {kind}"></i>{escape(name)}'


def paragraphs(lines: Iterable[str], kind: str = "") -> str:
    """Return the HTML of `lines`, each a paragraph, with the CSS class `kind` if it is not empty."""
    return "".join(
        f'<p class="{kind}">{escape(line)}</p>' if kind else f"<p>{escape(line)}</p>" for line in lines
    )


def memory_section(
    title: str, subtitle: str, verdict: tuple[Iterable[str], bool], first: Iterable[tuple[str, str, str]],
    rows: Sequence[tuple[str, int, str]], total: int, lines: Iterable[str],
) -> str:  # fmt: skip
    """Return the HTML section that shows the memory plan of one deployment.

    Args:
        title: text of the heading.
        subtitle: line below the heading.
        verdict: (lines that say whether the plan fits, True if it fits).
        first: (name, value, note) of the most important figures.
        rows: (component, bytes, note) of each line of the memory table.
        total: bytes of the device.
        lines: paragraphs below the table.
    """
    said, good = verdict
    cells = (
        f"<tr><td>{key(_COLOURS[name], name)}</td><td>{gib(size)}</td><td>{escape(note)}</td>"
        f"<td>{100 * size / max(1, total):.2f} %</td><td>{size:,}</td></tr>"
        for name, size, note in rows
    )
    return (
        f"<h2>{escape(title)}</h2>{paragraphs([subtitle])}"
        f"{paragraphs(said, 'verdict yes' if good else 'verdict no')}{figures(first)}"
        f"<h2>Memory of one device, {gib(total)}</h2>"
        f"{bar(((_COLOURS[name], size) for name, size, _ in rows), total, whole=True)}"
        f"{table(('component', 'size', 'bounds', 'share', 'bytes'), cells)}{paragraphs(lines)}"
    )


def fragment(body: str) -> str:
    """Return the HTML `body` with its CSS for a notebook's cell; the CSS rules apply only to `body`."""
    return f"<style>{_STYLE}</style>{_framed(body)}"


def _framed(body: str) -> str:
    return f"<div class=tonnage>{body}</div>"


def percent(size: int, total: int) -> str:
    """Return the width in percent of a bar of `size` bytes out of `total`."""
    return f"{max(0.0, min(100.0, 100 * size / max(1, total))):.2f}"


def page(title: str, body: str, words: Sequence[str] = (), facts: Facts = (), style: str = "") -> str:
    """Return a complete HTML document.

    Args:
        title: title and first heading.
        body: markup of the page.
        words: arguments of the command line that produced the page.
        facts: names and values shown at the top; Tonnage's version and the date are added.
        style: additional CSS rules.
    """
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    made_by = f"Tonnage {import_module('tonnage').__version__}"
    told = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in (*facts, ("made by", made_by), ("made at", now))
        if value
    )
    asked = f"<pre>{escape(shlex.join(words))}</pre>" if words else ""
    head = f"<header><h1>{escape(title)}</h1>{asked}<dl class=facts>{told}</dl></header>"
    return (
        f"<!doctype html>\n<html lang=en><head><meta charset=utf-8><title>{escape(title)}</title>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}{_PAGE_STYLE}{style}</style>"
        "<noscript><style>tbody tr[hidden]{display:table-row!important}</style></noscript></head>"
        f"<body>{_framed(f'{head}<main>{body}</main>')}<script>{SCRIPT}</script></body></html>\n"
    )


def write_page(path: str, title: str, body: str, words: Sequence[str] = (), facts: Facts = ()) -> None:
    """Write the HTML document that `page` returns to the file `path`."""
    save(path, page(title, body, words, facts))


def save(path: str, text: str) -> None:
    """Write `text` to the file `path`; a file that cannot be written completely is removed.

    Raises:
        DeploymentError: the file cannot be written.
    """
    file, new = Path(path), False
    try:
        new = not file.exists()
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        if new:
            with suppress(OSError):
                file.unlink()
        raise DeploymentError(f"cannot be written: {error.strerror}", field="--html", hint=path) from None
