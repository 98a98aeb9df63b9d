"""HTML pages of training plans and sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tonnage.planner.markup import Facts, bar, figures, page, paragraphs, table
from tonnage.planner.training.plans import TrainingPlan
from tonnage.planner.training.render import bounds, headline, place_rows, tail, verdict
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.stacks import stack_of
from tonnage.planner.training.sweep import Row
from tonnage.planner.training.tricks import Trick
from tonnage.planner.units import MiB, gib

_HEADS = ("component", "size", "bounds", "bytes", "formula", "share")


def facts_of(setup: TrainingSetup, model: str, gpu: str | None, swept: Sequence[str] = ()) -> Facts:
    """Return the (label, value) pairs at the top of a training plan's HTML page, such as model and device.

    Args:
        setup: the training flags.
        model: name of the model.
        gpu: the name given to --gpu, None without one.
        swept: the fields whose values differ between the rows of a sweep.
    """
    many = {"gpus", "nodes"} & {*swept}
    count = "" if many else f"{setup.nodes * setup.gpus:,} x "
    known = setup.device_memory is not None and "device_memory" not in swept
    memory = f" of {gib(setup.device_memory or 0)}" if known else ""
    engine = "of each row" if "stack" in swept else stack_of(setup).shown or "a loop in PyTorch"
    return ("model", model), ("engine", engine), ("device", f"{count}{gpu or 'GPU'}{memory}")


def plan_page(
    plan: TrainingPlan, rows: tuple[Trick, ...] = (), words: Sequence[str] = (), gpu: str | None = None
) -> str:
    """Return the HTML document of a training plan.

    The page shows whether the plan fits, the memory components with bars and formulas, the network traffic, and
    the memory-saving tricks in `rows`. `words` is the command line as a list of words, which the page quotes.
    """
    first, *served = headline(plan)
    low, high = plan.bounds()
    shown = [("GPU, per rank", gib(plan.total()), "" if low == high else f"{gib(low)} to {gib(high)}")]
    if plan.total("cpu") >= MiB:
        shown.append(("CPU, per node", gib(plan.total("cpu")), ""))
    if plan.total("nvme"):
        shown.append(("NVMe, per node", gib(plan.total("nvme")), ""))
    shown.append(("sequences a step", f"{plan.setup.effective_batch:,}", f"of {plan.length:,} tokens"))
    kind = {True: "verdict yes", False: "verdict no", None: "verdict"}[plan.fits]
    out = [f"<h2>{escape(first)}</h2>", paragraphs(served), paragraphs(verdict(plan), kind), figures(shown)]
    for title, group in place_rows(plan):
        total = sum(line.bytes for line in group)
        scale = max(total, plan.setup.device_memory or 0)
        cells = (
            f"<tr><td>{escape(part.name)}</td><td>{gib(part.bytes)}</td>"
            f"<td>{escape(bounds(part))}</td><td>{part.bytes:,}</td>"
            f"<td class=words>{escape(part.formula)}<small>{escape(part.source)}</small></td>"
            f"<td>{bar([('weights', part.bytes)], scale)}</td></tr>"
            for part in group
        )
        foot = f"<tr><th>total</th><td>{gib(total)}</td><td></td><td>{total:,}</td><td colspan=2></td></tr>"
        out.append(f"<h2>{escape(title)}</h2>{table(_HEADS, cells, ('formula',), foot)}")
    out.append(paragraphs([f"Peak moment: {plan.moment}", *tail(plan)]))
    if rows:
        out.append(f"<h2>What would help</h2>{_tricks(rows)}")
    return page(f"{plan.model}: training plan", "".join(out), words, facts_of(plan.setup, plan.model, gpu))


def _tricks(rows: tuple[Trick, ...]) -> str:
    """Return an HTML table of memory-saving tricks for training, one row per trick."""
    cells = []
    for t in rows:
        fits = {True: "yes", False: "no", None: ""}[t.fits]
        cells.append(
            f"<tr><td>{escape(t.name)}<small>{escape(t.flags)}</small></td><td>{gib(t.gpu_bytes)}</td>"
            f"<td>{gib(t.cpu_bytes)}</td><td>{t.relative_time:.2f}x</td>"
            f"<td class='{fits}'>{fits}</td><td class=words>{escape(t.note)}</td></tr>"
        )
    return table(("trick", "GPU", "CPU", "time", "fits", "note"), cells, ("note",))


def sweep_page(names: Sequence[str], rows: Sequence[Row], words: Sequence[str], facts: Facts) -> str:
    """Return the HTML document of a sweep over the training flags `names`, one table row per setup."""
    cells = []
    for row in rows:
        values = ("+".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in row.values)
        head = "".join(f"<td class=words>{escape(value)}</td>" for value in values)
        if row.refused:
            cells.append(f"<tr>{head}<td colspan=4 class='words no'>{escape(row.refused)}</td></tr>")
            continue
        sizes = "".join(f"<td>{gib(size or 0)}</td>" for size in (row.gpu_bytes, row.cpu_bytes, row.nvme_bytes))
        fits = {True: "yes", False: "no", None: ""}[row.fits]
        cells.append(f"<tr>{head}{sizes}<td class='{fits}'>{fits}</td></tr>")
    heads = (*names, "GPU", "CPU", "NVMe", "fits")
    return page(f"Training, {len(rows):,} settings", table(heads, cells, names), words, facts)
