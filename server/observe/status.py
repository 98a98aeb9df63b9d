"""The /memory report as table rows, text lines and a bar, for `tonnage status` and the page at /.

This module imports no other module of the server, so that the command starts fast.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tonnage.planner.units import gib

Row = tuple[str, str, str, str, str]
TITLES: Row = ("", "planned bytes", "measured", "difference", "verdict")
# Accepted relative excess of the measured over the planned memory of all processes. Weights and KV pool must
# match exactly, but allocations of libraries are only estimated.
PROCESS_BOUND = 0.10
OK, OUTSIDE = "ok", "OUTSIDE"  # verdicts on measured bytes, worded as in `tonnage demo` and `tonnage verify`

# name of a memory component -> its key in the JSON of one rank of the plan
COMPONENTS = {
    "weights": "weights_bytes",
    "kv_pool": "kv_pool_bytes",
    "activations": "activation_bytes",
    "cuda_graphs": "cuda_graph_bytes",
    "framework": "framework_bytes",
    "lora": "lora_bytes",
    "draft": "draft_bytes",
    "kv_tier": "kv_tier_bytes",
    "free": "free_bytes",
}
# States of the pool's blocks, in the order of the bar. The counts of all states add up to the usable blocks.
POOL_STATES = ("used", "reserved", "cached", "free")


@dataclass(frozen=True, slots=True)
class Status:
    """The status of a server as texts and numbers that are ready to be shown.

    Attributes:
        model: name of the model.
        state: loading, ready, restarting, draining or failed.
        since: when the state began, as a text.
        plan: one line that describes the plan.
        memory: rows of the memory table: component, planned bytes, measured bytes, difference, verdict.
        pool: number of KV blocks by POOL_STATES, empty for a model without KV cache. ``reserved`` counts blocks
            that are reserved for running requests but not yet held by them.
        facts: further lines, as pairs of name and text.
    """

    model: str
    state: str
    since: str
    plan: str
    memory: tuple[Row, ...]
    pool: Mapping[str, int]
    facts: tuple[tuple[str, str], ...]

    @property
    def usable(self) -> int:
        """Return the number of the KV pool's blocks that requests can use, summed over all states."""
        return sum(self.pool.values())


def status_of(report: Mapping[str, Any]) -> Status:
    """Return the server's status that ``report``, the JSON object of its /memory, describes.

    Raises:
        KeyError: a key is missing, because the report is from another release.
        TypeError: a value has another type, for the same reason.
        IndexError: a list is too short, for the same reason.
    """
    plan, flags = report["plan"], report["plan"]["deployment"]
    pool = _pool(report["pool"]["blocks"])
    length = f", context {flags['max_model_len']:,} tokens" if flags["max_model_len"] else ""
    return Status(
        model=report["model"],
        state=report["state"],
        since=_since(report),
        plan=f"{plan['model']['architecture']} on {flags['engine']}{length}; tonnage {report['version']}, "
        f"plan {plan['plan_id']}",
        memory=tuple(_memory(report)),
        pool=pool,
        facts=tuple(_facts(report, pool)),
    )


def memory_rows(
    planned: Mapping[str, int],
    measured: Mapping[str, int],
    bounds: Mapping[str, tuple[int, int]] | None = None,
) -> list[Row]:
    """Return a table row (component, planned, measured, difference, verdict) for each component that has bytes.

    The component ``free`` comes last.

    Args:
        planned: planned bytes by component.
        measured: measured bytes by component.
        bounds: lower and upper bound of each component's bytes; None leaves the verdicts out.
    """
    shown = {name: size for name, size in planned.items() if size or name in measured}
    names = [*shown, *(name for name in measured if name not in shown)]
    rows = [
        _row(name, shown.get(name), measured.get(name), (bounds or {}).get(name))
        for name in names
        if name != "free"
    ]
    return rows + ([_row("free", shown["free"], measured.get("free"))] if "free" in shown else [])


def span(seconds: float) -> str:
    """Return seconds as a text such as ``4.2 s``, ``3 min 5 s``, ``2 h 4 min`` or ``3 d 2 h``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, name, part, smaller in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {name}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def auto_text(auto: Mapping[str, Any]) -> str:
    """Return one line that describes the current rule of the admission mode `auto`.

    Args:
        auto: the JSON object of `tonnage.server.engines.stats.AutoStats.to_dict`.
    """
    parts = ["auto: vLLM's rule"]
    if auto["holds_back"]:
        parts = [f"auto: holds requests back at share {auto['share']:g}"]
        if auto["rehearsed_gain"] is not None:
            parts.append(f"{100 * (auto['rehearsed_gain'] - 1):+.0f} % tokens/s rehearsed")
    if auto["fallbacks"]:
        parts.append(f"back to vLLM's rule {auto['fallbacks']:,} x")
    cost = auto["step_cost_seconds"]
    if cost is not None:
        each = " + ".join(f"{_brief(cost[part])} {of}" for part, of in _COST_PARTS if cost[part])
        parts.append(f"step {_brief(cost['fixed'])}" + (f" + {each}" if each else ""))
    return ", ".join(parts)


_COST_PARTS = (
    ("prefill_token", "a prefill token"),
    ("sequence", "a sequence"),
    ("context_token", "a token of context"),
)


def _brief(seconds: float) -> str:
    """Return seconds as a text such as ``17.0 ms``, ``30.0 us`` or ``5.0 ns``."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 1e-9:.1f} ns"


def _verdict(planned: int, measured: int, bounds: tuple[int, int]) -> str:
    """Return a text on whether measured bytes are within the plan's interval, and on what that interval is.

    The interval is left out when its bounds are equal. Bytes below the lower bound are reported as "below" and
    not as an error, because memory use may not have reached its peak yet.
    """
    low, high = bounds
    if low == high:
        return OK if measured == planned else OUTSIDE
    word = OUTSIDE if measured > high else OK if measured >= low else "below"
    return f"{word}, {gib(low)} to {gib(high)}"


def _row(name: str, planned: int | None, measured: int | None, bounds: tuple[int, int] | None = None) -> Row:
    difference = verdict = ""
    if planned is not None and measured is not None and bounds is not None:
        verdict = _verdict(planned, measured, bounds)
    if planned is not None and measured is not None:
        difference = f"{measured - planned:+,}" if measured != planned else "0"
        if planned and measured != planned and name != "free":
            difference += f" ({100 * (measured - planned) / planned:+.1f} %)"
    return (
        name,
        "" if planned is None else f"{planned:,} ({gib(planned)})",
        "" if measured is None else f"{measured:,} ({gib(measured)})",
        difference,
        verdict,
    )


def _since(report: Mapping[str, Any]) -> str:
    at = report["since"]
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    restarts = report["restarts"]
    again = f", restarted {restarts} x" if restarts else ""
    return f"since {clock} ({span(max(0.0, report['time'] - at))}){again}"


def _memory(report: Mapping[str, Any]) -> list[Row]:
    """Return the memory table's rows: one per component of the plan, and one for the peak of all processes."""
    plan, measured = report["plan"], report["measured"]
    rank = plan["ranks"][plan["worst_rank"]]
    planned = {name: rank[key] for name, key in COMPONENTS.items()}
    held = {name: size for name in planned if (size := measured.get(f"{name}_bytes")) is not None}
    peak, used = measured["process_peak_bytes"], rank["total_bytes"] - rank["free_bytes"]
    intervals, bounds = plan.get("intervals", {}), {}
    for name, key in COMPONENTS.items():
        low, high = intervals.get(key, (rank[key], rank[key]))
        bounds[name] = int(low), int(high)
    rows = memory_rows(planned, held, bounds)
    if peak is not None:
        word = OK if peak <= used * (1 + PROCESS_BOUND) else OUTSIDE
        rows.append((*_row("all processes", used, peak)[:4], f"{word}, at most +{100 * PROCESS_BOUND:.0f} %"))
    return rows


def _pool(blocks: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of KV blocks by state.

    Blocks that are reserved but not yet held are subtracted from the free blocks, then from the cached ones.
    """
    used, cached, free = blocks["used"], blocks["cached"] or 0, blocks["free"]
    reserved = min(blocks["promised_unused"], cached + free)
    taken = max(0, reserved - free)
    states = (used, reserved, cached - taken, max(0, free - reserved))
    return dict(zip(POOL_STATES, states, strict=True)) if blocks["usable"] else {}


def _facts(report: Mapping[str, Any], pool: Mapping[str, int]) -> list[tuple[str, str]]:
    requests, headroom, plan = report["requests"], report["headroom"], report["plan"]
    facts = []
    if pool:
        states = ", ".join(f"{count:,} {state}" for state, count in pool.items())
        size = plan["kv_cache"]["usable_blocks"] * report["pool"]["bytes_per_block"]
        blocks = f"{sum(pool.values()):,} blocks of {report['pool']['block_size_tokens']} tokens"
        facts.append(("KV pool", f"{states} of {blocks} ({gib(size)})"))
    if (auto := report["admission"]["auto"]) is not None:
        facts.append(("admission", auto_text(auto)))
    if requests is None:  # the counts are null when the client's API key may not see all tenants
        return facts
    running, waiting = requests["running"], requests["waiting"]
    limit = plan["deployment"]["max_num_seqs"]
    text = f"{running:,} of at most {limit:,}" if limit else f"{running:,}"
    facts.append(("running", _longest(text, running, requests["longest_running_seconds"])))
    facts.append(("waiting", _longest(f"{waiting:,}", waiting, requests["longest_waiting_seconds"])))
    of = "requests of the average size so far" if requests.get("received", 1) else "of the longest requests"
    room = f"{headroom['requests']:,} more {of}"
    if pool:
        room += f"; largest prompt now {headroom['prompt_tokens']:,} tokens"
        if (full := headroom["full_in_seconds"]) is not None:
            room += f"; full in {span(full)}" if full else "; full"
    facts.append(("headroom", room))
    facts.append(("drain", _drain(report["drain_seconds"], requests["in_flight"])))
    return facts


def _longest(text: str, count: int, seconds: float | None) -> str:
    return text if not count or seconds is None else f"{text}, the longest for {span(seconds)}"


def _drain(seconds: float | None, in_flight: int) -> str:
    if not in_flight:
        return "nothing in flight"
    if seconds is None:
        return f"{in_flight:,} in flight; too few have ended for an estimate"
    return f"{span(seconds)} for the {in_flight:,} in flight"
