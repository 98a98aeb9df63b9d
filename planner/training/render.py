"""Output of a `TrainingPlan`: JSON, plain lines, and a table with bars in a terminal."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, TextIO

from tonnage.planner.bars import cells, shades
from tonnage.planner.screen import Cell, Screen
from tonnage.planner.training.combinations import Combinations
from tonnage.planner.training.device import attention_of
from tonnage.planner.training.plans import SCHEMA_VERSION, Line, TrainingPlan
from tonnage.planner.training.stacks import stack_of
from tonnage.planner.training.step import kernel_of
from tonnage.planner.training.tricks import Trick
from tonnage.planner.units import gib

_PLACES = (("gpu", "GPU, per rank"), ("cpu", "CPU, per node"), ("nvme", "NVMe, per node"))


def plan_to_dict(plan: TrainingPlan, explain: bool = False) -> dict[str, Any]:
    """Return the training plan as a JSON object, with sizes as integers in bytes.

    Later versions of Tonnage may add keys, but never remove or rename a key.
    """
    setup, convention, traffic = plan.setup, plan.convention, plan.communication
    left_out = () if explain else ("formula", "source")
    lines = [{k: v for k, v in asdict(line).items() if k not in left_out} for line in plan.lines]
    return {
        "schema_version": SCHEMA_VERSION,
        "model": {
            "id": plan.model, "architecture": plan.architecture, "parameters": plan.parameters,
            "trainable": plan.trainable, "adapter_parameters": plan.adapters,
        },
        "setup": _setup(plan),
        "convention": {
            "name": convention.name, "weights": convention.weights, "master": convention.master,
            "gradients": convention.gradients, "state": convention.state,
            "bytes_per_parameter": convention.bytes_per_parameter, "used_by": convention.used_by,
        },
        "stack": _stack(plan, explain),
        "lines": lines,
        "gpu_bytes": plan.total(), "gpu_bounds": list(plan.bounds()),
        "cpu_bytes": plan.total("cpu"), "cpu_init_bytes": plan.cpu_init_bytes, "nvme_bytes": plan.total("nvme"),
        "peak_moment": plan.moment, "pipeline_stage": plan.stage,
        "effective_batch": setup.effective_batch,
        "communication": {
            "elements": traffic.elements, "bytes": traffic.bytes, "bytes_high": traffic.high_bytes,
            "inter_node_bytes": traffic.inter_node_bytes, "seconds": traffic.seconds,
            "collectives": [c._asdict() for c in traffic.collectives], "note": traffic.note,
        },
        "fits": plan.fits, "reasons": list(plan.reasons), "notes": list(plan.notes),
    }  # fmt: skip


def _stack(plan: TrainingPlan, explain: bool) -> dict[str, Any] | None:
    """Return the plan's training library (--stack, such as torchtune) as a JSON object, None without one."""
    stack = stack_of(plan.setup)
    if not stack.name:
        return None
    out: dict[str, Any] = {"name": stack.name, "version": stack.version}
    return {**out, "decisions": dict(stack.sources)} if explain else out


def _setup(plan: TrainingPlan) -> dict[str, Any]:
    """Return all flags of a training plan as a JSON object, with the planner's choices for flags not given."""
    out = asdict(plan.setup)
    out["sequence_length"] = plan.length
    out["convention"] = plan.convention.name
    out["attention"] = attention_of(plan.setup)
    out["optimizer_kernel"] = kernel_of(plan.setup)
    return out


def headline(plan: TrainingPlan) -> list[str]:
    """Return the first text lines of a training plan: model, method, GPUs, precision and batch."""
    setup, c = plan.setup, plan.convention
    share = 100 * plan.trainable / (plan.parameters + plan.adapters) if plan.parameters else 0
    adapters = f", {plan.adapters:,} of them in adapters" if plan.adapters else ""
    where = (
        f"{setup.nodes} node{'s' if setup.nodes > 1 else ''} x {setup.gpus} GPU{'s' if setup.gpus > 1 else ''}"
    )
    parts = [
        f"{label} {value}"
        for label, value in (
            ("TP", setup.tensor_parallel), ("PP", setup.pipeline_parallel), ("CP", setup.context_parallel),
            ("EP", setup.expert_parallel),
        )
        if value > 1
    ]  # fmt: skip
    loop = f"{stack_of(setup).shown}, " if setup.stack else ""
    return [
        f"{plan.model}: {plan.architecture}, {plan.parameters:,} parameters, {plan.trainable:,} trained "
        f"({share:.2f} %{adapters})",
        f"{loop}method {setup.method}, precision {setup.precision}, optimizer {setup.optimizer}, "
        f"{setup.strategy} on " + ", ".join([where, *parts]),
        f"convention {c.name}: {c.weights} weights + {c.master} master + {c.gradients} gradients + "
        f"2 x {c.state} AdamW states = {c.bytes_per_parameter} bytes a parameter ({c.used_by})",
        f"batch: {setup.micro_batch} x {setup.gradient_accumulation} step(s) x {setup.data_parallel} rank(s) = "
        f"{setup.effective_batch} sequence{'s' if setup.effective_batch > 1 else ''} of {plan.length:,} tokens"
        + (" (packed)" if setup.packing else ""),
    ]


def bounds(line: Line) -> str:
    """Return a component's lower and upper bound in a training plan as text, `exact` if they are equal."""
    return "exact" if line.low == line.high else f"{gib(line.low)} to {gib(line.high)}"


def place_rows(plan: TrainingPlan) -> list[tuple[str, list[Line]]]:
    """Return a pair (title, components) for each memory (GPU, CPU, NVMe) that a training plan uses."""
    rows = ((title, [line for line in plan.lines if line.place == place]) for place, title in _PLACES)
    return [(title, lines) for title, lines in rows if lines]


def tail(plan: TrainingPlan) -> list[str]:
    """Return the last text lines of a training plan: communication, CPU memory at initialization, notes."""
    out = []
    traffic = plan.communication
    for c in traffic.collectives:
        inter = f", {c.inter_node_bytes / 1e9:,.1f} GB leave each node" if c.inter_node_bytes else ""
        took = f", {c.seconds:.3f} s" if c.seconds is not None else ""
        out.append(f"step: {c.name} of {c.what}: {c.bytes / 1e9:,.2f} GB per rank (per {c.per}){inter}{took}")
    if traffic.note:
        out.append(f"step: {traffic.note}")
    if plan.cpu_init_bytes:
        out.append(
            f"CPU at initialization: {gib(plan.cpu_init_bytes)} per node (every rank builds the model in fp32, "
            "x 1.5; zero_init with stage 3 avoids it)"
        )
    out += [f"note: {note}" for note in plan.notes]
    return out


def verdict(plan: TrainingPlan) -> list[str]:
    """Return the text lines that say whether a training plan fits into memory, and why not."""
    if plan.fits is None:
        return ["No device was named: --gpu or --device-memory answers whether it fits."]
    if not plan.fits:
        return [f"Does not fit: {reason}" for reason in plan.reasons]
    memory, high = plan.setup.device_memory, plan.bounds()[1]
    if memory is not None and high > memory:
        return [f"Fits, but the upper end of the intervals, {gib(high)}, does not."]
    return ["Fits."]


def trick_lines(rows: tuple[Trick, ...]) -> list[str]:
    """Return a table of memory-saving tricks for training as lines of text."""
    return ["", "What would help (time relative to this setup at an A100's 40 %, transfers not hidden):",
            *_trick_rows(rows)]  # fmt: skip


def _trick_rows(rows: tuple[Trick, ...]) -> list[str]:
    """Return one or two lines of text per memory-saving trick."""
    out = []
    for t in rows:
        fits = {True: "fits", False: "does not fit", None: ""}[t.fits]
        out.append(
            f"  {t.name:<46}{gib(t.gpu_bytes):>13} GPU {gib(t.cpu_bytes):>13} CPU "
            f"{t.relative_time:>7.2f}x  {fits:<14}{t.note}".rstrip()
        )
        if t.flags:
            out.append(f"      {t.flags}")
    return out


_SHOWN = 6  # number of combinations of tricks that a terminal shows


def combination_lines(found: Combinations) -> list[str]:
    """Return text lines with the combinations of memory-saving tricks that fit.

    The last line names the smallest change that suffices, if any does: the fastest single trick that suffices
    alone, else the fastest combination.
    """
    out = []
    if found.rows:
        out += ["", "Together they fit, the quickest first:", *_trick_rows(found.rows[:_SHOWN])]
        if len(found.rows) > _SHOWN:
            out.append(f"  ... and {len(found.rows) - _SHOWN} more (--json lists all)")
    if found.tried:
        extent = "all that exist" if found.complete else "largest savings first"
        out.append(f"{found.tried} combinations were planned, {extent}.")
    if found.smallest is not None:
        out.append(f"The smallest change that fits: {found.smallest.name} ({found.smallest.flags})")
    elif found.tried:
        out.append("None of them fits.")
    return out


def plain_lines(plan: TrainingPlan, explain: bool) -> list[str]:
    """Return a training plan as text lines; with `explain`, formula and source follow each component."""
    lines = headline(plan)
    for title, rows in place_rows(plan):
        lines += ["", title]
        for row in rows:
            lines.append(f"  {row.name:<26}{row.bytes:>20,} bytes {gib(row.bytes):>14}  {bounds(row)}")
            if explain:
                lines.append(f"      {row.formula}  [{row.source}]")
        total = sum(row.bytes for row in rows)
        whole = f"  {gib(plan.bounds()[0])} to {gib(plan.bounds()[1])}" if title == _PLACES[0][1] else ""
        lines.append(f"  {'total':<26}{total:>20,} bytes {gib(total):>14}{whole}")
    if explain:
        stack = stack_of(plan.setup)
        lines += ["", *(f"{stack.shown}: {what}  [{source}]" for what, source in stack.sources if stack.name)]
    lines += ["", f"Peak moment: {plan.moment}", *tail(plan), *verdict(plan)]
    return lines


def print_plan(plan: TrainingPlan, explain: bool, file: TextIO) -> None:
    """Print a training plan: a table with bars in a terminal, plain text lines into any other file."""
    if not file.isatty():
        for line in plain_lines(plan, explain):
            print(line, file=file)
        return
    screen = Screen(file)
    for line in headline(plan):
        screen.print(line)
    width, full = max(8, min(30, screen.width - 74)), shades(file)[0]
    for title, rows in place_rows(plan):
        table: list[tuple[Cell, ...]] = [("", "", "bytes", "", "bounds")]
        scale = max(plan.setup.device_memory or 0, sum(row.bytes for row in rows), 1)
        for row in rows:
            bar = full * cells(row.bytes, scale, width)
            table.append((row.name, gib(row.bytes), f"{row.bytes:,}", (bar, "cyan"), bounds(row)))
        total = sum(row.bytes for row in rows)
        low, high = plan.bounds()
        whole = f"{gib(low)} to {gib(high)}" if title == _PLACES[0][1] else ""
        table.append(("total", gib(total), f"{total:,}", "", whole))
        screen.print(title, "bold")
        screen.table(table, right=(1, 2), titles=True)
        for row in rows if explain else ():
            screen.print(f"  {row.name}: {row.formula}  [{row.source}]", "dim")
    screen.print(f"Peak moment: {plan.moment}")
    for line in tail(plan):
        screen.print(line)
    for line in verdict(plan):
        screen.print(line, "red" if plan.fits is False else "green")
