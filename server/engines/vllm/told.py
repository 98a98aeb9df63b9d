"""What our scheduler, inside vLLM's engine core, tells our stat logger in the API process.

It travels in the SchedulerStats of each step. vLLM decodes those as its own dataclass (msgspec,
v1/serial_utils.py, 0.32), so a field of ours would be dropped there, and ``kv_connector_stats``, the one free
dictionary, is asserted to belong to a connector (distributed/kv_transfer/kv_connector/v1/metrics.py). What
passes unread is ``waiting_lora_adapters``, a dict of names to counts that only metrics of LoRA look at. Our
keys begin with ``PREFIX``; the logger, which is asked before vLLM's own, takes them out again. The same in
0.30 and 0.31.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tonnage.cache.admission.cost import StepCost
from tonnage.server.engines.stats import AutoStats

PREFIX = "tonnage "
# How the stop_reason of a request begins that our scheduler has ended because it can never fit.
NEVER = "the request needs "

Reasons = dict[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class Told:
    """Counts since the start, and blocks of all groups now.

    ``received``: requests that came, ``unfinished`` of them still there. ``decisions`` and ``missing_blocks``
    by (outcome, reason), as `tonnage.server.engines.stats.EngineStats`. ``reserved``: by the running
    requests; ``committed``: what counts as taken for a newcomer; ``asked``: by all unfinished ones;
    ``waste``: token slots. ``cached``: blocks that a prefix can hit and nobody references; ``evictions`` of
    such by cause. ``broken``: laws of the account that did not hold when somebody looked. ``failures``:
    exceptions of ours, after the first of which vLLM schedules on its own.

    The rest is `AutoStats` as integers, in the mode ``auto`` alone: costs in nanoseconds (``context_cost`` in
    picoseconds), ``share`` and ``gain`` in thousandths, ``fresh`` 0 or 1.
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
    fresh: int | None = None
    gain: int | None = None
    fallbacks: int | None = None
    decisions: Reasons = field(default_factory=dict)
    missing_blocks: Reasons = field(default_factory=dict)
    evictions: Reasons = field(default_factory=dict)  # ("blocks", cause)

    @property
    def auto(self) -> AutoStats | None:
        """What `auto_numbers` wrote; None in other modes."""
        if self.fallbacks is None:
            return None
        cost = None
        if self.fixed_cost is not None:
            prefill, sequence, context = self.prefill_cost or 0, self.sequence_cost or 0, self.context_cost or 0
            cost = StepCost(self.fixed_cost / 1e9, prefill / 1e9, sequence / 1e9, context / 1e12)
        return AutoStats(cost, _ratio(self.share), self.fresh != 0, _ratio(self.gain), self.fallbacks)


def auto_numbers(auto: AutoStats | None) -> dict[str, Any]:
    """Return the fields of `Told` that say ``auto``, all of them integers."""
    if auto is None:
        return {}
    numbers = {"fresh": int(auto.fresh), "fallbacks": auto.fallbacks}
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
    "fixed_cost", "prefill_cost", "sequence_cost", "context_cost", "share", "fresh", "gain", "fallbacks",
)  # fmt: skip
_TABLES = ("decisions", "missing_blocks", "evictions")


def put(told: Told, into: dict[str, int]) -> None:
    """Write ``told`` into a dict of vLLM's."""
    into[f"{PREFIX}mode {told.mode}"] = 1
    for name in _NUMBERS:
        value = getattr(told, name)
        if value is not None:
            into[PREFIX + name] = value
    for name in _TABLES:
        for (outcome, reason), count in getattr(told, name).items():
            into[f"{PREFIX}{name} {outcome} {reason}"] = count


def take(found: dict[str, int]) -> Told | None:
    """Take it out again; None: nothing of ours is in it."""
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
    return Told(mode, **{name: ours[name] for name in _NUMBERS if name in ours}, **tables)  # type: ignore[arg-type]
