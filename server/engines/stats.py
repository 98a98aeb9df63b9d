"""What an engine says of itself at any time: requests, blocks, measured bytes, counters."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from tonnage.cache.admission.cost import StepCost

if TYPE_CHECKING:
    from tonnage.cache.admission.auto import Auto  # compiled loops, which a watch never needs

ReasonCounts = tuple[tuple[str, str, int], ...]  # (outcome admit|wait|never, reason, count)


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Blocks by state: used + cached + free = usable. ``reserved`` >= used counts what admission reserved.

    ``committed``: blocks that admission counts as taken, where it looks at more than the sum of reservations
    (None: it does not). ``evictions_by_cause``: in the order of
    `tonnage.cache.results.EVICTION_CAUSES`; empty where the engine does not say. ``tail_waste_slots``:
    slots of used blocks that hold no token, a block that several sequences share counted for each (None: this
    engine does not say). ``cached`` None: they are among the free ones.
    """

    num_blocks: int
    usable: int
    used: int
    cached: int | None
    free: int
    reserved: int
    evictions: int = 0
    evictions_by_cause: tuple[int, ...] = ()
    committed: int | None = None
    tail_waste_slots: int | None = None

    @property
    def headroom(self) -> int:
        """Blocks that admission can still reserve: a request that needs no more is admitted at once."""
        return max(0, self.usable - (self.reserved if self.committed is None else self.committed))

    @property
    def reserved_share(self) -> float:
        """Reserved blocks over usable ones; 0 where there are none (an encoder keeps no cache)."""
        return self.reserved / self.usable if self.usable else 0.0


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Bytes the server really holds. None: not measured by this engine.

    ``weights`` sums the storages of modules, buffers and quantization state after load; ``kv_pool`` the
    storages of the pool; ``framework`` what the processes held at ready beside these two; ``process`` the
    RssAnon + RssShmem of all processes now, ``process_peak`` its maximum. ``warm_weights``: the weights
    once more after the first full step, in which a kernel may repack what it uses. ``lora`` the slots of the
    adapters, where there are any. ``activation_peak`` and ``cuda_graphs``: as the engine itself measured them.
    """

    weights: int | None = None
    kv_pool: int | None = None
    framework: int | None = None
    process: int | None = None
    process_peak: int | None = None
    warm_weights: int | None = None
    lora: int | None = None
    activation_peak: int | None = None
    cuda_graphs: int | None = None

    @property
    def activations(self) -> int | None:
        """The engine's own figure, else what the peak holds beyond weights, pool, LoRA slots and framework."""
        if self.activation_peak is not None:
            return self.activation_peak
        parts = (self.process_peak, self.weights, self.kv_pool, self.framework)
        if any(part is None for part in parts):
            return None
        peak, weights, kv_pool, framework = (part or 0 for part in parts)
        return max(0, peak - weights - kv_pool - framework - (self.lora or 0))


@dataclass(frozen=True, slots=True)
class AutoStats:
    """What the admission mode ``auto`` has learned, and the rule that holds.

    Attributes:
        cost: seconds of a step by its parts; None until enough steps have run.
        share: the rule's share (`tonnage.cache.admission.policy.Rule`); None while vLLM's own rule holds.
        fresh: whether new requests are held back too, not only preempted ones.
        gain: tokens/s of the rule over those of vLLM's, both rehearsed; None until a rehearsal.
        fallbacks: how often the guard went back to vLLM's rule.
    """

    cost: StepCost | None = None
    share: float | None = None
    fresh: bool = True
    gain: float | None = None
    fallbacks: int = 0

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by part; empty while unknown."""
        cost = self.cost
        if cost is None:
            return {}
        values = (cost.fixed, cost.prefill, cost.sequence, cost.context)
        return dict(zip(COST_PARTS, values, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of ``/memory`` and ``tonnage watch --json``."""
        return {
            "step_cost_seconds": self.parts or None,
            "holds_back": None if self.share is None else "new" if self.fresh else "preempted",
            "share": self.share,
            "rehearsed_gain": self.gain,
            "fallbacks": self.fallbacks,
        }


# Seconds once a step, for each prefill token, for each sequence, for each token of context.
COST_PARTS = ("fixed", "prefill_token", "sequence", "context_token")


def stats_of_auto(auto: Auto | None) -> AutoStats | None:
    """Return a snapshot of ``auto``; None in modes without one."""
    if auto is None:
        return None
    choice = auto.choice
    if choice is None:
        return AutoStats(auto.cost, fallbacks=auto.fallbacks)
    gain = choice.outcome.tokens_per_second / choice.own.tokens_per_second
    return AutoStats(auto.cost, choice.rule.share, choice.rule.fresh, gain, auto.fallbacks)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot; reading it never waits for the engine. ``admission_mode``: the one that holds, of an engine
    that may have fallen back from the one it was asked for."""

    ready: bool
    running: int
    waiting: int
    pool: PoolStats
    memory: MeasuredMemory = field(default_factory=MeasuredMemory)
    admissions: ReasonCounts = ()
    refused_blocks: ReasonCounts = ()  # wait and never; the count is of blocks that were missing
    preemptions: int = 0
    preempted_tokens: int | None = 0  # computed tokens that preemptions threw away; None: not counted
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_hit_tokens: int = 0
    # The part of them from blocks that requests with any salt, or none, may read; None: not told apart.
    shared_hit_tokens: int | None = 0
    restarts: int = 0
    invariant_violations: int | None = 0  # None: nobody looks
    admission_mode: str | None = None
    auto: AutoStats | None = None  # in the admission mode auto alone
    since: float | None = None  # when ``ready`` changed last, in seconds since the epoch; None: not told


# What only grows.
COUNTERS = (
    "preemptions", "preempted_tokens", "prompt_tokens", "generation_tokens", "prefix_hit_tokens",
    "shared_hit_tokens", "restarts", "invariant_violations",
)  # fmt: skip
_COST_FIELDS = ("fixed", "prefill", "sequence", "context")
_BLOCKS = (
    "num_blocks", "usable", "used", "cached", "free", "reserved", "evictions", "committed", "tail_waste_slots",
)  # fmt: skip


def merged(parts: Iterable[ReasonCounts]) -> ReasonCounts:
    """The counts of several engines by outcome and reason."""
    sums: dict[tuple[str, str], int] = {}
    for outcome, reason, count in itertools.chain.from_iterable(parts):
        key = (str(outcome), str(reason))
        sums[key] = sums.get(key, 0) + count
    return tuple((*key, count) for key, count in sums.items())


def added(values: Iterable[int | None]) -> int | None:
    """Their sum; None where one of them is not known."""
    known = [*values]
    return None if None in known else sum(value or 0 for value in known)


def total_auto(parts: Sequence[AutoStats]) -> AutoStats | None:
    """Return the stats of several engines as one; None without any.

    Costs and gain are means of the known ones, the rule is the one that holds back most, fallbacks are summed.
    """
    if not parts:
        return None
    costs = [part.cost for part in parts if part.cost is not None]
    gains = [part.gain for part in parts if part.gain is not None]
    holding = [part for part in parts if part.share is not None]
    strictest = min(holding, key=lambda part: (not part.fresh, part.share), default=AutoStats())
    return AutoStats(
        StepCost(*(statistics.fmean(map(attrgetter(name), costs)) for name in _COST_FIELDS)) if costs else None,
        strictest.share,
        strictest.fresh,
        statistics.fmean(gains) if gains else None,
        sum(part.fallbacks for part in parts),
    )


def total(parts: Sequence[EngineStats]) -> EngineStats:
    """The sum over engines, of which there is one at least. Memory stays unmeasured: it is compared with the
    plan of one of them."""
    pools = [part.pool for part in parts]
    pool = replace(
        pools[0],
        **{name: added(getattr(pool, name) for pool in pools) for name in _BLOCKS},  # type: ignore[arg-type]
        evictions_by_cause=tuple(map(sum, zip(*(pool.evictions_by_cause for pool in pools), strict=False))),
    )
    modes = {part.admission_mode for part in parts}
    return EngineStats(
        ready=any(part.ready for part in parts),
        running=sum(part.running for part in parts),
        waiting=sum(part.waiting for part in parts),
        pool=pool,
        admissions=merged(part.admissions for part in parts),
        refused_blocks=merged(part.refused_blocks for part in parts),
        admission_mode=modes.pop() if len(modes) == 1 else None,
        auto=total_auto([part.auto for part in parts if part.auto is not None]),
        **{name: added(getattr(part, name) for part in parts) for name in COUNTERS},  # type: ignore[arg-type]
    )
