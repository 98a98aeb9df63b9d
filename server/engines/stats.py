"""Statistics that an engine reports at any time: numbers of requests and blocks, measured bytes, counters."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tonnage.cache.admission.cost import StepCost

if TYPE_CHECKING:
    # Imported for types only, because `auto` imports compiled loops that `tonnage watch` never needs.
    from tonnage.cache.admission.auto import Auto
    from tonnage.cache.disk.counts import DiskCounts

# Counts as (outcome, reason, count). The outcome is an admission decision, such as "wait" for a request that
# stays in the waiting queue, or "never" for a request that is rejected.
ReasonCounts = tuple[tuple[str, str, int], ...]


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Numbers of KV blocks by state: used + cached + free = usable.

    Attributes:
        num_blocks: all blocks of the pool, in any state.
        usable: blocks that sequences can use.
        used: blocks that running sequences use.
        cached: unused blocks in the prefix cache; None if they are counted as free.
        free: unused blocks without cached content.
        reserved: blocks that admission has reserved; at least ``used``.
        evictions: cached blocks evicted so far.
        evictions_by_cause: evicted blocks in the order of `tonnage.cache.results.EVICTION_CAUSES`; empty if not
            reported.
        committed: blocks that admission counts as taken, in modes that do not use ``reserved``; else None.
        tail_waste_slots: token slots without a token in used blocks, with a shared block counted once per
            sequence. None if not reported.
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
        """Number of KV blocks that admission can still reserve.

        A request that needs no more blocks than this is admitted now.
        """
        return max(0, self.usable - (self.reserved if self.committed is None else self.committed))

    @property
    def reserved_share(self) -> float:
        """The ratio of reserved to usable KV blocks; 0 without usable blocks (an encoder has no KV cache)."""
        return self.reserved / self.usable if self.usable else 0.0


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Measured bytes that the server holds; None means that the engine does not measure the item.

    Attributes:
        weights: storages of modules, buffers and quantization state after the load.
        kv_pool: storages of the KV pool.
        framework: memory of the processes at the end of the load, without weights and pool.
        process: RssAnon + RssShmem of all processes now.
        process_peak: maximum of ``process`` so far.
        warm_weights: weights after a profile run, in which a kernel may have repacked them.
        lora: slots of LoRA adapters, if there are any.
        kv_tier: storage of the KV tier in host memory, if there is one.
        activation_peak: activations as measured by the engine itself.
        cuda_graphs: CUDA graphs as measured by the engine itself.
    """

    weights: int | None = None
    kv_pool: int | None = None
    framework: int | None = None
    process: int | None = None
    process_peak: int | None = None
    warm_weights: int | None = None
    lora: int | None = None
    kv_tier: int | None = None
    activation_peak: int | None = None
    cuda_graphs: int | None = None

    @property
    def activations(self) -> int | None:
        """Bytes of activations: as the engine measured them, else derived from the process peak.

        The derived value is the peak minus weights, KV pool, framework, LoRA slots and KV tier.
        """
        if self.activation_peak is not None:
            return self.activation_peak
        parts = (self.process_peak, self.weights, self.kv_pool, self.framework)
        if any(part is None for part in parts):
            return None
        peak, weights, kv_pool, framework = (part or 0 for part in parts)
        return max(0, peak - weights - kv_pool - framework - (self.lora or 0) - (self.kv_tier or 0))


@dataclass(frozen=True, slots=True)
class AutoStats:
    """The step costs and the admission rule that the admission mode ``auto`` has learned.

    Attributes:
        cost: learned cost model, which gives the seconds of an engine step; None until enough steps have run.
        share: parameter of the learned rule, described at `tonnage.cache.admission.policy.Rule`; None while
            vLLM's own rule is used.
        gain: tokens/s with the learned rule divided by tokens/s with vLLM's rule, both simulated; None before a
            simulation.
        fallbacks: how often low measured throughput, or an exception, made the mode return to vLLM's rule.
    """

    cost: StepCost | None = None
    share: float | None = None
    gain: float | None = None
    fallbacks: int = 0

    @property
    def parts(self) -> dict[str, float]:
        """The coefficients of the learned cost model in seconds, by name; empty before they are known."""
        return {} if self.cost is None else dict(zip(COST_PARTS, astuple(self.cost), strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics of mode ``auto`` as JSON for ``/memory`` and ``tonnage watch --json``."""
        return {
            "step_cost_seconds": self.parts or None,
            "holds_back": self.share is not None,
            "share": self.share,
            "rehearsed_gain": self.gain,
            "fallbacks": self.fallbacks,
        }


# JSON names of the coefficients of `StepCost`, in the order of its fields: seconds per step, per prefill token,
# per sequence, and per token of context.
COST_PARTS = ("fixed", "prefill_token", "sequence", "context_token")


def stats_of_auto(auto: Auto | None) -> AutoStats | None:
    """Return a snapshot of the statistics of admission mode ``auto``, or None in other modes."""
    if auto is None:
        return None
    choice = auto.choice
    if choice is None:
        return AutoStats(auto.cost, fallbacks=auto.fallbacks)
    gain = choice.outcome.tokens_per_second / choice.own.tokens_per_second
    return AutoStats(auto.cost, choice.rule.share, gain, auto.fallbacks)


@dataclass(frozen=True, slots=True)
class TierStats:
    """The contents of the hf engine's KV tier, and counters of its operations.

    The tier has blocks in host memory, and optionally a disk tier (a folder) behind the host memory.

    Attributes:
        host_size: bytes of host memory for the tier.
        host_used: bytes of the blocks in host memory.
        host_blocks: number of blocks in host memory.
        host_stored: blocks copied from the pool to host memory.
        host_evicted: blocks removed from host memory to make room.
        host_left_out: blocks not copied to host memory, because their forecast reuse was too low.
        host_hit_blocks: blocks copied from host memory to the pool instead of being computed.
        host_load_seconds: seconds of the copies from host memory to the pool.
        saved_seconds: estimated seconds to compute the loaded blocks, at the measured prefill speed.
        spent_seconds: seconds of copies between pool and host memory in both directions, plus seconds that
            requests waited for blocks from the disk tier.
        disk: counts of the disk tier, or None without one.
    """

    host_size: int
    host_used: int
    host_blocks: int
    host_stored: int
    host_evicted: int
    host_left_out: int
    host_hit_blocks: int
    host_load_seconds: float
    saved_seconds: float
    spent_seconds: float
    disk: DiskCounts | None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of an engine's state; reading it never waits for the engine.

    ``admission_mode`` is the mode that is now active. It is only set by engines that can fall back from the
    configured mode.
    """

    ready: bool
    running: int
    waiting: int
    pool: PoolStats
    memory: MeasuredMemory = field(default_factory=MeasuredMemory)
    admissions: ReasonCounts = ()
    # blocks that refused requests lacked: (outcome, reason, number of blocks), with the outcome wait or never
    refused_blocks: ReasonCounts = ()
    preemptions: int = 0
    preempted_tokens: int | None = 0  # computed tokens discarded by preemptions; None if not counted
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_hit_tokens: int = 0
    # Tokens of ``prefix_hit_tokens`` from blocks that all cache salts share; None if the engine does not
    # distinguish them.
    shared_hit_tokens: int | None = 0
    restarts: int = 0
    invariant_violations: int | None = 0  # violations found so far; None if the engine does not check
    admission_mode: str | None = None
    auto: AutoStats | None = None  # what mode ``auto`` has learned; None in other admission modes
    tier: TierStats | None = None  # statistics of the hf engine's KV tier; None without a KV tier
    since: float | None = None  # time of the last change of ``ready`` (epoch seconds); None if not reported


# Fields of EngineStats that only increase.
COUNTERS = (
    "preemptions", "preempted_tokens", "prompt_tokens", "generation_tokens", "prefix_hit_tokens",
    "shared_hit_tokens", "restarts", "invariant_violations",
)  # fmt: skip
_BLOCKS = (
    "num_blocks", "usable", "used", "cached", "free", "reserved", "evictions", "committed", "tail_waste_slots",
)  # fmt: skip


def merged(parts: Iterable[ReasonCounts]) -> ReasonCounts:
    """Return the sum over several engines of the counts of admission decisions, by (outcome, reason)."""
    sums: dict[tuple[str, str], int] = {}
    for outcome, reason, count in itertools.chain.from_iterable(parts):
        key = (str(outcome), str(reason))
        sums[key] = sums.get(key, 0) + count
    return tuple((*key, count) for key, count in sums.items())


def added(values: Iterable[int | None]) -> int | None:
    """Return the sum of a statistic over several engines, or None if one of the values is None (unknown)."""
    known = [*values]
    return None if None in known else sum(value or 0 for value in known)


def total_auto(parts: Sequence[AutoStats]) -> AutoStats | None:
    """Combine the ``auto`` statistics of several engines into one; return None if there are none.

    ``cost`` and ``gain`` are means of the known values, ``share`` is the smallest known value, and
    ``fallbacks`` is the sum.
    """
    if not parts:
        return None
    costs = [astuple(part.cost) for part in parts if part.cost is not None]
    gains = [part.gain for part in parts if part.gain is not None]
    shares = [part.share for part in parts if part.share is not None]
    return AutoStats(
        StepCost(*map(statistics.fmean, zip(*costs, strict=True))) if costs else None,
        min(shares, default=None),
        statistics.fmean(gains) if gains else None,
        sum(part.fallbacks for part in parts),
    )


def total(parts: Sequence[EngineStats]) -> EngineStats:
    """Return the statistics of one or more engines added up to one `EngineStats`.

    Measured memory is left out, because it is compared with the plan of a single engine.
    """
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
