"""Transport of our scheduler's statistics from vLLM's engine core to our stat logger in the API process.

The values travel in the SchedulerStats of each step. vLLM decodes SchedulerStats as its own dataclass (msgspec,
v1/serial_utils.py, 0.32), so a new field would be dropped. The dictionary `kv_connector_stats` cannot carry the
values, because vLLM asserts that it belongs to a connector
(distributed/kv_transfer/kv_connector/v1/metrics.py). The dictionary `waiting_lora_adapters` (names to counts)
carries them: it passes unchanged, because only LoRA metrics read it. Our keys in it begin with `PREFIX`. vLLM
calls our logger before its own, and our logger removes these keys. vLLM 0.30 and 0.31 behave alike.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field

from tonnage.cache.admission.cost import StepCost
from tonnage.server.engines.stats import AutoStats

PREFIX = "tonnage "
# Beginning of the stop_reason of a request that our scheduler rejects because it can never fit.
NEVER_FITS = "the request needs "

Reasons = dict[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class AdmissionStats:
    """Counts of Tonnage's scheduler in vLLM since its start, and its current numbers of KV blocks.

    Attributes:
        mode: the admission mode.
        received: number of requests received.
        unfinished: number of received requests that have not ended.
        failures: exceptions in our code; after the first one, vLLM schedules on its own.
        reserved: blocks reserved by running requests.
        committed: blocks that admission counts as taken when it decides on a new request.
        asked: upper bound of the blocks of all unfinished requests.
        waste: token slots in used blocks that hold no token.
        broken: number of violated invariants that checks of the block accounting have found so far.
        cached: unreferenced blocks that a prefix can hit.
        auto: statistics of the admission mode `auto`; None in other modes.
        decisions: number of requests by (outcome, reason), as in `tonnage.server.engines.stats.EngineStats`.
        missing_blocks: number of blocks that the refused requests lacked, by (outcome, reason).
        evictions: number of evicted cached blocks by ("blocks", cause).
    """

    mode: str
    received: int = 0
    unfinished: int = 0
    failures: int = 0
    reserved: int | None = None
    committed: int | None = None
    asked: int | None = None
    waste: int | None = None
    broken: int | None = None
    cached: int | None = None
    auto: AutoStats | None = None
    decisions: Reasons = field(default_factory=dict)
    missing_blocks: Reasons = field(default_factory=dict)
    evictions: Reasons = field(default_factory=dict)


_NUMBERS = (
    "received", "unfinished", "failures", "reserved", "committed", "asked", "waste", "broken", "cached",
)  # fmt: skip
_TABLES = ("decisions", "missing_blocks", "evictions")
# The fields of `StepCost` in order: name of the transported integer, and how many of its units make a second.
_COSTS = {"fixed_cost": 1e9, "prefill_cost": 1e9, "sequence_cost": 1e9, "context_cost": 1e12}
_RATIO = 1000  # `AutoStats.share` and `AutoStats.gain` are transported in thousandths


def write_stats(stats: AdmissionStats, into: dict[str, int]) -> None:
    """Add our scheduler's statistics to a dictionary of vLLM's SchedulerStats, under keys with our prefix."""
    into[f"{PREFIX}mode {stats.mode}"] = 1
    for name in _NUMBERS:
        value = getattr(stats, name)
        if value is not None:
            into[PREFIX + name] = value
    for name in _TABLES:
        for (outcome, reason), count in getattr(stats, name).items():
            into[f"{PREFIX}{name} {outcome} {reason}"] = count
    if (auto := stats.auto) is not None:
        into[f"{PREFIX}fallbacks"] = auto.fallbacks
        for name, value in (("share", auto.share), ("gain", auto.gain)):
            if value is not None:
                into[PREFIX + name] = round(value * _RATIO)
        if auto.cost is not None:
            for (name, unit), seconds in zip(_COSTS.items(), astuple(auto.cost), strict=True):
                into[PREFIX + name] = round(seconds * unit)


def take_stats(found: dict[str, int]) -> AdmissionStats | None:
    """Remove our scheduler's statistics from a dictionary of vLLM's SchedulerStats.

    Returns:
        The statistics, or None if the dictionary has none.
    """
    ours = {name.removeprefix(PREFIX): found.pop(name) for name in [*found] if name.startswith(PREFIX)}
    mode = next((name.partition(" ")[2] for name in ours if name.startswith("mode ")), None)
    if mode is None:
        return None
    tables: dict[str, Reasons] = {name: {} for name in _TABLES}
    for name, count in ours.items():
        table, *key = name.split(" ")
        if table in tables:
            outcome, reason = key
            tables[table][outcome, reason] = count
    numbers = {name: ours[name] for name in _NUMBERS if name in ours}
    return AdmissionStats(mode, **numbers, auto=_auto_of(ours), **tables)  # type: ignore[arg-type]


def _auto_of(ours: dict[str, int]) -> AutoStats | None:
    """Return the statistics of admission mode `auto` from the transported numbers; None in other modes."""
    if "fallbacks" not in ours:
        return None
    cost = StepCost(*(ours[name] / unit for name, unit in _COSTS.items())) if "fixed_cost" in ours else None
    share, gain = (ours[name] / _RATIO if name in ours else None for name in ("share", "gain"))
    return AutoStats(cost, share, gain, ours["fallbacks"])
