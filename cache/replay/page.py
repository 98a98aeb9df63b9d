"""The result of a trace replay as a self-contained HTML file with a table of figures and inline SVG plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from tonnage.cache.replay.result import Replay
from tonnage.cache.replay.tier_curve import SizeCurve
from tonnage.planner.markup import Facts, table
from tonnage.planner.markup import page as document
from tonnage.planner.units import gib

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 860, 180, 56, 22
_STYLE = """
.tonnage{--a:light-dark(#1d6fa5,#6cb4e4);--b:light-dark(#b4541a,#e89a66)}
svg{display:block;width:100%;min-width:34rem;height:auto;break-inside:avoid}
text{fill:var(--soft);font-size:13px}
.axis{stroke:var(--line)}
.a{stroke:var(--a)} .b{stroke:var(--b)} path{fill:none;stroke-width:1.5}
.lines{color:var(--soft);font-size:.9rem} .ka{color:var(--a)} .kb{color:var(--b)}
"""


def page(
    result: Replay, title: str, rows: list[tuple[str, str]], words: Sequence[str] = (), facts: Facts = (),
    curve: SizeCurve | None = None,
) -> str:  # fmt: skip
    """Return an HTML document with the figures and plots of a trace replay.

    Args:
        result: The replay's figures and samples over time.
        title: Title of the page.
        rows: The figures as (name, value) text, as the terminal's table shows them.
        words: Arguments of the command line that ran the replay.
        facts: Descriptions of the replayed model, trace and hardware.
        curve: The prefix cache's hit rate by its size; None: no plot of it.
    """
    samples = result.samples
    cells = (f"<tr><td>{escape(name)}</td><td class=words>{escape(value)}</td></tr>" for name, value in rows)
    time = samples.seconds
    plots = [
        _plot("Pool: share of the blocks", time, [("in use", samples.used), ("cached", samples.cached)], 1.0),
        _plot("Requests", time, [("running", samples.running), ("waiting", samples.waiting)], None),
        _distribution("Wait for admission, share of requests within so many seconds", result.waits),
        _distribution("Time to first token, share of requests within so many seconds", result.first_tokens),
    ]
    if curve is not None:
        plots.insert(0, _size_plot(curve))
    body = table(("", ""), cells) + "".join(plots)
    return document(title, body, words, facts, _STYLE)


def _size_plot(curve: SizeCurve) -> str:
    """Return the plot of hit rates by cache size on a logarithmic axis, with the knee as a vertical line."""
    title = "Hit rate by size of pool and tiers, share of prompt tokens"
    mark = (math.log2(curve.knee_bytes), f"knee: {gib(curve.knee_bytes)}") if curve.knee_bytes else None
    sizes = [math.log2(size) for size, _ in curve.points]
    rates = [rate for _, rate in curve.points]
    return _plot(title, sizes, [("LRU", rates)], 1.0, lambda at: gib(round(2**at)), mark)


def _distribution(title: str, values: list[float]) -> str:
    ordered = sorted(values)
    places = sorted({int(q / 400 * (len(ordered) - 1)) for q in range(401)}) if ordered else []
    shares = [(place + 1) / len(ordered) for place in places]
    return _plot(title, [ordered[place] for place in places], [("share", shares)], 1.0)


def _plot(
    title: str, x: list[float], series: list[tuple[str, list[float]]], top: float | None,
    label: Callable[[float], str] = lambda at: f"{_number(at)} s", mark: tuple[float, str] | None = None,
) -> str:  # fmt: skip
    """Return a line plot as SVG in HTML.

    Args:
        title: Heading of the plot.
        x: Values of the x axis, ascending.
        series: One or two lines, each with its name and a y value for each of ``x``.
        top: Upper end of the y axis; None: the largest value.
        label: Function that formats a value of the x axis.
        mark: Place of a vertical line on the x axis, and its label.
    """
    if len(x) < 2 or x[-1] <= x[0]:
        return f"<h2>{escape(title)}</h2><p class=lines>nothing to plot</p>"
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
            f"{escape(label(at))}</text>"
        )
    keys = []
    if mark is not None:
        across = point(mark[0], 0).split()[0]
        parts.append(f'<line class=b x1="{across}" x2="{across}" y1="8" y2="{8 + height}"/>')
        keys.append(f"<span class=kb>— {escape(mark[1])}</span>")
    for name, (key, values) in zip("ab", series, strict=False):
        path = "M" + " L".join(point(at, value) for at, value in zip(x, values, strict=True))
        parts.append(f'<path class={name} d="{path}"/>')
        keys.append(f"<span class=k{name}>— {escape(key)}</span>")
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}"'
    picture = f"<div class=scroll><svg {box}>{''.join(parts)}</svg></div>"
    return f"<h2>{escape(title)}</h2>{picture}<p class=lines>{' '.join(keys)}</p>"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
