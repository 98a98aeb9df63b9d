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
    decisions: Reasons = field(default_factory=dict)
    missing_blocks: Reasons = field(default_factory=dict)
    evictions: Reasons = field(default_factory=dict)  # ("blocks", cause)


_NUMBERS = ("received", "unfinished", "failures", "reserved", "committed", "asked", "waste", "broken", "cached")
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
