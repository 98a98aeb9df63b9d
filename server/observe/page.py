"""The HTML status page at /, without scripts and external files; the browser reloads it every 5 seconds."""

from __future__ import annotations

import base64
import hashlib
from html import escape

from tonnage.server.observe.status import TITLES, Status

REFRESH_SECONDS = 5

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--dim:#667;--line:#dde3ea;--paper:#fff;--empty:#eef1f5}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--dim:#9aa4b2;--line:#333b47;--paper:#14181f;
--empty:#262d38}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:60rem;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem;margin:0}p{margin:.2rem 0}small,dt,footer{color:var(--dim)}
.state{font-weight:600}.ready{color:#2e8b57}.loading,.draining{color:#b8860b}.restarting,.failed{color:#c0392b}
svg{display:block;width:100%;height:1.5rem;margin:1.2rem 0 .4rem;background:var(--empty)}
.used{--of:#3b6ea5}.reserved{--of:#d9a441}.cached{--of:#9dbfe0}.free{--of:var(--empty)}
rect{fill:var(--of)}i{display:inline-block;width:.8rem;height:.8rem;margin:0 .4rem 0 1rem;background:var(--of)}
small i:first-child{margin-left:0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem;margin:1rem 0}dd{margin:0}
table{border-collapse:collapse;width:100%}
td,th{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--line)}
td:first-child,th:first-child{text-align:left}
"""
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

_LINKS = (("docs", "API"), ("memory", "memory as JSON"), ("metrics", "metrics"))


def status_page(status: Status) -> str:
    """Return a server's status as an HTML page, to be sent with the response headers of HEADERS."""
    title = f"{status.model}: {status.state}"
    facts = "".join(f"<dt>{escape(name)}<dd>{escape(text)}" for name, text in status.facts)
    head = "".join(f"<th>{escape(cell)}" for cell in TITLES)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in status.memory)
    links = " &middot; ".join(f'<a href="{path}">{escape(name)}</a>' for path, name in _LINKS)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content={REFRESH_SECONDS}>"
        '<meta name=viewport content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(status.model)}</h1>"
        f'<p><span class="state {escape(status.state)}">{escape(status.state)}</span> {escape(status.since)}'
        f"<p><small>{escape(status.plan)}</small>"
        f"{_bar(status)}<dl>{facts}</dl><table><thead><tr>{head}<tbody>{rows}</table>"
        f"<footer><p>{links}</footer></html>\n"
    )


def _bar(status: Status) -> str:
    """Return an HTML bar of the KV pool's blocks by state, with titles for tooltips and screen readers."""
    if not status.usable:
        return ""
    at, parts, keys = 0.0, [], []
    for state, blocks in status.pool.items():
        width = 1000 * blocks / status.usable
        shape = f'<rect class={state} x="{at:.2f}" width="{width:.2f}" height="10">'
        parts.append(f"{shape}<title>{blocks:,} blocks {state}</title></rect>")
        keys.append(f"<i class={state}></i>{state}")
        at += width
    bar = f'<svg viewBox="0 0 1000 10" preserveAspectRatio="none" role=img>{"".join(parts)}</svg>'
    return f"{bar}<p><small>{''.join(keys)}</small>"
