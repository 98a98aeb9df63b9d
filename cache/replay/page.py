"""The replay as one HTML file: figures, and plots as inline SVG. Needs no network and no script."""

from __future__ import annotations

from html import escape

from tonnage.cache.replay.result import Replay

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 860, 180, 56, 22
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --soft: #64748b; --line: #d5dbe3; --a: #1d6fa5;
  --b: #b4541a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e9f0; --soft: #94a3b8; --line: #3b4656; --a: #6cb4e4;
  --b: #e89a66; } body { background: #14181d; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 920px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1rem; margin: 1.6rem 0 .2rem; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .2rem .6rem; text-align: right;
  border-bottom: 1px solid var(--line); } td:first-child, th:first-child { text-align: left; }
svg { width: 100%; height: auto; } .axis { stroke: var(--line); } text { fill: var(--soft); font-size: 11px; }
.a { stroke: var(--a); } .b { stroke: var(--b); } path { fill: none; stroke-width: 1.5; }
.key { color: var(--soft); font-size: .85rem; } .key i { font-style: normal; } .key .ka { color: var(--a); }
.key .kb { color: var(--b); }
"""


def page(result: Replay, title: str, rows: list[tuple[str, str]]) -> str:
    """The whole document. ``rows``: the figures, as the terminal's table shows them."""
    samples = result.samples
    figures = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    time = samples.seconds
    plots = [
        _plot("Pool: share of the blocks", time, [("in use", samples.used), ("cached", samples.cached)], 1.0),
        _plot("Requests", time, [("running", samples.running), ("waiting", samples.waiting)], None),
        _distribution("Wait for admission, share of requests within so many seconds", result.waits),
        _distribution("Time to first token, share of requests within so many seconds", result.first_tokens),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><h1>{escape(title)}</h1><table>{figures}</table>{''.join(plots)}</body></html>\n"
    )


def _distribution(title: str, values: list[float]) -> str:
    ordered = sorted(values)
    places = sorted({int(q / 400 * (len(ordered) - 1)) for q in range(401)}) if ordered else []
    shares = [(place + 1) / len(ordered) for place in places]
    return _plot(title, [ordered[place] for place in places], [("share", shares)], 1.0)


def _plot(title: str, x: list[float], series: list[tuple[str, list[float]]], top: float | None) -> str:
    if len(x) < 2 or x[-1] <= x[0]:
        return f"<h2>{escape(title)}</h2><p class=key>nothing to plot</p>"
    highest = top if top is not None else max(max(values) for _, values in series) or 1.0
    width, height = _WIDTH - _LEFT - 8, _HEIGHT - _BOTTOM - 8

    def point(at: float, value: float) -> str:
        across = _LEFT + width * (at - x[0]) / (x[-1] - x[0])
        return f"{across:.1f} {8 + height * (1 - value / highest):.1f}"

    parts = []
    for share in (0.0, 0.5, 1.0):
        down = 8 + height * (1 - share)
        parts.append(f'<line class=axis x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{down:.1f}" y2="{down:.1f}"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{_number(highest * share)}</text>'
        )
        at = x[0] + (x[-1] - x[0]) * share
        anchor = ("start", "middle", "end")[int(share * 2)]
        parts.append(
            f'<text x="{_LEFT + width * share:.1f}" y="{_HEIGHT - 4}" text-anchor="{anchor}">'
            f"{_number(at)} s</text>"
        )
    keys = []
    for name, (label, values) in zip("ab", series, strict=False):
        path = "M" + " L".join(point(at, value) for at, value in zip(x, values, strict=True))
        parts.append(f'<path class={name} d="{path}"/>')
        keys.append(f"<span class=k{name}>— {escape(label)}</span>")
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}"'
    picture = f"<svg {box}>{''.join(parts)}</svg>"
    return f"<h2>{escape(title)}</h2>{picture}<p class=key>{' '.join(keys)}</p>"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
