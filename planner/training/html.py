"""The plan as one HTML file without scripts or outside references."""

from __future__ import annotations

from html import escape

from tonnage.planner.training.plans import TrainingPlan
from tonnage.planner.training.render import bounds, headline, place_rows, tail, verdict
from tonnage.planner.training.tricks import Trick
from tonnage.planner.units import gib

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:70em;color:#222}
table{border-collapse:collapse;width:100%;margin:.6em 0 1.4em}
td,th{padding:.2em .6em;text-align:left;border-bottom:1px solid #ddd}
td.n{text-align:right;font-variant-numeric:tabular-nums}
.bar{background:#3a7ca5;height:.8em}
.yes{color:#186a3b}.no{color:#a93226}
small{color:#666}
"""


def page(plan: TrainingPlan, rows: tuple[Trick, ...] = ()) -> str:
    """A complete document: components with bars and formulas, traffic, verdict, tricks."""
    out = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>{escape(plan.model)}: training plan</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(plan.model)}: training plan</h1>",
        *(f"<p>{escape(line)}</p>" for line in headline(plan)),
    ]
    for line in verdict(plan):
        out.append(f"<p class='{'no' if plan.fits is False else 'yes'}'><b>{escape(line)}</b></p>")
    for title, group in place_rows(plan):
        total = sum(line.bytes for line in group)
        scale = max(total, plan.setup.device_memory or 0, 1)
        out.append(f"<h2>{escape(title)}</h2><table>")
        for part in group:
            width = 100 * part.bytes / scale
            out.append(
                f"<tr><td>{escape(part.name)}<br><small>{escape(part.formula)} [{escape(part.source)}]</small>"
                "</td>"
                f"<td class='n'>{part.bytes:,}</td><td class='n'>{gib(part.bytes)}</td>"
                f"<td style='width:20em'><div class='bar' style='width:{width:.1f}%'></div></td>"
                f"<td>{escape(bounds(part))}</td></tr>"
            )
        out.append(
            f"<tr><th>total</th><td class='n'>{total:,}</td><td class='n'>{gib(total)}</td><td colspan=2></tr>"
        )
        out.append("</table>")
    out.append(f"<p>Peak moment: {escape(plan.moment)}</p><ul>")
    out += [f"<li>{escape(line)}</li>" for line in tail(plan)]
    out.append("</ul>")
    if rows:
        out.append("<h2>What would help</h2><table><tr><th>trick<th>GPU<th>CPU<th>time<th>fits<th>note</tr>")
        for t in rows:
            fits = {True: "yes", False: "no", None: ""}[t.fits]
            out.append(
                f"<tr><td>{escape(t.name)}<br><small>{escape(t.flags)}</small></td>"
                f"<td class='n'>{gib(t.gpu_bytes)}</td>"
                f"<td class='n'>{gib(t.cpu_bytes)}</td><td class='n'>{t.relative_time:.2f}x</td>"
                f"<td class='{fits}'>{fits}</td><td>{escape(t.note)}</td></tr>"
            )
        out.append("</table>")
    out.append("</body></html>")
    return "\n".join(out)
