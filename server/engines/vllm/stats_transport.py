"""Transport of our scheduler's statistics from vLLM's engine core to our stat logger in the API process.

The values travel in the SchedulerStats of each step. vLLM decodes SchedulerStats as its own dataclass (msgspec,
v1/serial_utils.py, 0.32), so a new field would be dropped. vLLM asserts that the dictionary
`kv_connector_stats` belongs to a connector (distributed/kv_transfer/kv_connector/v1/metrics.py). The dictionary
`waiting_lora_adapters` (names to counts) passes unchanged, because only LoRA metrics read it. Our keys begin
with `PREFIX`. vLLM calls our logger before its own, and our logger removes these keys. vLLM 0.30 and 0.31
behave alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tonnage.cache.admission.cost import StepCost
from tonnage.server.engines.stats import AutoStats

PREFIX = "tonnage "
# Beginning of the stop_reason of a request that our scheduler rejects because it can never fit.
NEVER_FITS = "the request needs "

Reasons = dict[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class AdmissionStats:
    """Counts of Tonnage's scheduler in vLLM since its start, and its current numbers of KV blocks.

    The fields from fixed_cost to fallbacks are the `AutoStats` of the mode `auto` as integers; None in other
    modes.

    Attributes:
        mode: the admission mode.
        received: number of requests received.
        unfinished: number of received requests that have not ended.
        failures: exceptions in our code; after the first one, vLLM schedules on its own.
        reserved: blocks reserved by running requests.
        committed: blocks that admission counts as taken when it decides on a new request.
        asked: upper bound of the blocks of all unfinished requests.
        waste: token slots in used blocks that hold no token.
        broken: invariants of the block accounting found violated so far.
        cached: unreferenced blocks that a prefix can hit.
        fixed_cost: learned duration of an empty step, in nanoseconds.
        prefill_cost: learned duration of a step per prefill token, in nanoseconds.
        sequence_cost: learned duration of a step per sequence, in nanoseconds.
        context_cost: learned duration of a step per context token, in picoseconds.
        share: `AutoStats.share`, the parameter of the learned admission rule, in thousandths.
        gain: `AutoStats.gain`, simulated throughput divided by that of vLLM's rule, in thousandths.
        fallbacks: how often mode `auto` went back to vLLM's rule.
        decisions: number of requests by (outcome, reason), as in `tonnage.server.engines.stats.EngineStats`.
        missing_blocks: number of missing blocks by (outcome, reason).
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
    fixed_cost: int | None = None
    prefill_cost: int | None = None
    sequence_cost: int | None = None
    context_cost: int | None = None
    share: int | None = None
    gain: int | None = None
    fallbacks: int | None = None
    decisions: Reasons = field(default_factory=dict)
    missing_blocks: Reasons = field(default_factory=dict)
    evictions: Reasons = field(default_factory=dict)

    @property
    def auto(self) -> AutoStats | None:
        """Return the statistics of admission mode `auto`, restored from integer fields; None in other modes."""
        if self.fallbacks is None:
            return None
        cost = None
        if self.fixed_cost is not None:
            prefill, sequence, context = self.prefill_cost or 0, self.sequence_cost or 0, self.context_cost or 0
            cost = StepCost(self.fixed_cost / 1e9, prefill / 1e9, sequence / 1e9, context / 1e12)
        return AutoStats(cost, _ratio(self.share), _ratio(self.gain), self.fallbacks)


def auto_numbers(auto: AutoStats | None) -> dict[str, Any]:
    """Return the statistics of admission mode `auto` as integer fields of `AdmissionStats`."""
    if auto is None:
        return {}
    numbers = {"fallbacks": auto.fallbacks}
    if auto.cost is not None:
        numbers["fixed_cost"] = round(auto.cost.fixed * 1e9)
        numbers["prefill_cost"] = round(auto.cost.prefill * 1e9)
        numbers["sequence_cost"] = round(auto.cost.sequence * 1e9)
        numbers["context_cost"] = round(auto.cost.context * 1e12)
    if auto.share is not None:
        numbers["share"] = round(auto.share * 1000)
    if auto.gain is not None:
        numbers["gain"] = round(auto.gain * 1000)
    return numbers


def _ratio(thousandths: int | None) -> float | None:
    return None if thousandths is None else thousandths / 1000


_NUMBERS = (
    "received", "unfinished", "failures", "reserved", "committed", "asked", "waste", "broken", "cached",
    "fixed_cost", "prefill_cost", "sequence_cost", "context_cost", "share", "gain", "fallbacks",
)  # fmt: skip
_TABLES = ("decisions", "missing_blocks", "evictions")


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
    return AdmissionStats(mode, **{name: ours[name] for name in _NUMBERS if name in ours}, **tables)  # type: ignore[arg-type]
