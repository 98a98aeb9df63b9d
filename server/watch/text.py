"""An observation of a watched server as text and as a JSON object; unknown values are left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from tonnage.planner.bars import cells
from tonnage.planner.units import gib
from tonnage.server.observe.metrics.headroom import FOREVER_SECONDS
from tonnage.server.observe.status import Row, auto_text, memory_rows
from tonnage.server.watch.drawing import MemoryTable, aligned
from tonnage.server.watch.records import TierReading
from tonnage.server.watch.watcher import Observation

_BAR, _NEARLY_FULL = 40, 0.9


def headline(now: Observation) -> list[str]:
    """Return the first lines of an observation's text, which name the watched server and its plan."""
    facts, planned = now.facts, now.planned
    version = f" {facts.version}" if facts.version else ""
    lines = [f"{facts.title}{version} at {now.url}" + (f", serving {facts.served}" if facts.served else "")]
    if planned is not None:
        length = f", max_model_len {planned.max_model_len:,}" if planned.max_model_len else ""
        lines.append(f"planned as {planned.model} ({planned.architecture}) on {planned.engine}{length}")
    return lines


def _rows(now: Observation) -> list[Row]:
    return memory_rows({} if now.planned is None else now.planned.components, now.measured)


def line(now: Observation) -> str:
    """Return one line of text with the watched server's requests, KV pool, headroom and token rates."""
    return f"{time.strftime('%H:%M:%S', time.localtime(now.at))} " + "; ".join(_parts(now))


def _parts(now: Observation) -> Iterable[str]:
    reading = now.reading
    running, waiting = reading.sum_of("running"), reading.sum_of("waiting")
    if running is not None:
        yield f"{running} running" + ("" if waiting is None else f", {waiting} waiting")
    if pool := pool_line(now):
        yield pool
    if now.headroom is not None:
        yield headroom_line(now)
    if rates := rates_line(now):
        yield rates
    if now.reading.tier is not None:
        yield tier_line(now.reading.tier)
    if now.reading.auto is not None:
        yield f"admission {auto_text(now.reading.auto.to_dict())}"
    if now.restarts:
        yield f"restarted {now.restarts} x"


def pool_line(now: Observation) -> str | None:
    """Return one line of text on the watched server's KV pool and its use, or None when unknown."""
    reading = now.reading
    used, usable = reading.blocks("used"), reading.blocks("usable")
    if used is None or not usable:
        return None
    size = next(one.pool.block_size for one in reading.replicas if one.pool is not None)
    unit = "tokens" if size == 1 else f"blocks of {size} tokens"
    text = f"KV {100 * used / usable:.0f} %: {used:,} of {usable:,} {unit}"
    cached = reading.blocks("cached")
    return text if cached is None else f"{text}, {cached:,} cached"


def headroom_line(now: Observation) -> str:
    """Return one line with the requests and tokens that still fit; the observation must have a headroom."""
    room = now.headroom
    assert room is not None
    text = f"room for {room.requests:,} more, the largest prompt {room.prompt_tokens:,} tokens"
    if now.full_in == 0:
        text += ", full"
    elif now.full_in is not None and now.full_in < FOREVER_SECONDS:
        text += f", full in {now.full_in:,.0f} s"
    return text


def rates_line(now: Observation) -> str | None:
    """Return one line of text with token rates, preemptions and prefix hits, or None when all are unknown."""
    counters, change = now.reading.counters, now.change
    parts = []
    if change is not None and now.seconds > 0:
        for count, name in ((change.generation_tokens, "generated"), (change.prompt_tokens, "prompt")):
            if count is not None:
                parts.append(f"{count / now.seconds:,.0f} {name} tokens/s")
    if counters.preemptions is not None:
        more = "" if change is None or not change.preemptions else f" (+{change.preemptions:.0f})"
        parts.append(f"{counters.preemptions:.0f} preemptions{more}")
    if counters.prefix_query_tokens and counters.prefix_hit_tokens is not None:
        parts.append(f"{100 * counters.prefix_hit_tokens / counters.prefix_query_tokens:.0f} % prefix hits")
    return ", ".join(parts) or None


def tier_line(tier: TierReading) -> str:
    """Return one line about the KV tiers: how full they are, their hits, and the seconds saved and spent."""
    parts = []
    for where, used, size in (
        ("host", tier.host_used, tier.host_size),
        ("disk", tier.disk_used, tier.disk_size),
    ):
        if used is not None:
            parts.append(f"{where} {gib(used)}" + ("" if size is None else f" of {gib(size)}"))
        elif size is not None:
            parts.append(f"{where} {gib(size)}")
    if not parts and tier.host_share is not None:
        parts.append(f"host {100 * tier.host_share:.0f} % full")
    if tier.hit_tokens is not None:
        parts.append(f"{tier.hit_tokens:,} tokens hit")
    saved, spent = tier.saved_seconds, tier.spent_seconds
    if saved is not None and spent is not None:
        parts.append(f"{saved:,.1f} s of prefill saved, {spent:,.1f} s spent: {saved - spent:+,.1f} s")
    elif spent is not None:
        parts.append(f"{spent:,.1f} s spent")
    return f"KV tier {', '.join(parts) or 'without figures'}"


def _head(now: Observation) -> list[str]:
    """Return the lines about server, plan and memory, which are printed before the first observation's line."""
    table = aligned(_rows(now))
    lines = [*headline(now), *(["", *table, ""] if table else [])]
    return lines + [f"Note: {note}" for note in now.notes]


def lines() -> Callable[[Observation], str]:
    """Return a function that turns observations into text.

    The text starts with lines about the server and its plan whenever these differ from the previous
    observation's.
    """
    last: object = None

    def text(now: Observation) -> str:
        nonlocal last
        head = (now.facts, now.planned, now.notes)
        new, last = head != last, head
        return "\n".join([*(_head(now) if new else ()), line(now)])

    return text


def drawn(now: Observation, shades: str, trouble: str | None = None) -> Any:
    """Return an observation of a watched server as a rich renderable.

    Args:
        now: the observation.
        shades: characters of the bar that shows the pool, from full to empty.
        trouble: error of a later attempt that failed, None without one.
    """
    from rich.console import Group  # imported here, because only output on a terminal needs rich
    from rich.markup import escape

    first, *rest = headline(now)
    parts: list[Any] = [f"[bold]{escape(first)}[/]", *map(escape, rest), "", *map(escape, _parts(now))]
    used, usable = now.reading.blocks("used"), now.reading.blocks("usable")
    if used is not None and usable:
        full = cells(used, usable, _BAR)
        colour = "red" if used >= usable else "yellow" if used > _NEARLY_FULL * usable else "green"
        parts.append(f"[{colour}]{shades[0] * full}[/]{shades[-1] * (_BAR - full)}")
    # the table comes last, because a low terminal window cuts off the end
    parts += ["", MemoryTable(_rows(now)), ""]
    parts += [f"[dim]Note: {escape(note)}[/]" for note in now.notes]
    clock = time.strftime("%H:%M:%S", time.localtime(now.at))
    parts.append(f"[red]since {clock}: {escape(trouble)}[/]" if trouble else f"[dim]{clock}[/]")
    return Group(*parts)


def to_dict(now: Observation) -> dict[str, Any]:
    """Return the JSON object of an observation: bytes are integers, unknown values are left out."""
    facts, planned, reading = now.facts, now.planned, now.reading
    pool = {name: reading.blocks(name) for name in ("num_blocks", "usable", "used", "cached")}
    sizes = {one.pool.block_size for one in reading.replicas if one.pool is not None}
    return _known(
        {
            "time": round(now.at, 3),
            "url": now.url,
            "server": facts.title,
            "version": facts.version,
            "model": facts.served,
            "plan": None
            if planned is None
            else {
                "plan_id": planned.plan_id,
                "model": planned.model,
                "architecture": planned.architecture,
                "engine": planned.engine,
                "bytes": dict(planned.components),
                "num_blocks": planned.num_blocks,
                "tokens": planned.tokens,
                "bytes_per_block": planned.bytes_per_block,
            },
            "measured_bytes": dict(now.measured),
            "requests": {"running": reading.sum_of("running"), "waiting": reading.sum_of("waiting")},
            "pool": pool | {"block_size": next(iter(sizes), None)},
            "headroom": None
            if now.headroom is None
            else asdict(now.headroom) | {"full_in_seconds": now.full_in},
            "tier": None if reading.tier is None else _tier(reading.tier),
            "admission": None if reading.auto is None else {"auto": reading.auto.to_dict()},
            "counters": asdict(reading.counters),
            "per_second": None
            if now.change is None or now.seconds <= 0
            else {name: count / now.seconds for name, count in asdict(now.change).items() if count is not None},
            "restarts": now.restarts,
            "notes": list(now.notes),
        }
    )


def _tier(tier: TierReading) -> dict[str, Any]:
    """Return the KV tiers as a JSON object, which includes the saved seconds minus the spent ones."""
    saved, spent = tier.saved_seconds, tier.spent_seconds
    gained = None if saved is None or spent is None else saved - spent
    return asdict(tier) | {"used_share": tier.used_share, "gained_seconds": gained}


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict `values` without entries that are None or empty, also inside nested dicts."""
    found = {}
    for name, value in values.items():
        kept = _known(value) if isinstance(value, dict) else value
        if kept is not None and kept != {} and kept != []:
            found[name] = kept
    return found
