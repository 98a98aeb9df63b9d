"""What an engine says of itself at any time: requests, blocks, measured bytes, counters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

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
class EngineStats:
    """A snapshot; reading it never waits for the engine."""

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


def merged(parts: Iterable[ReasonCounts]) -> ReasonCounts:
    """The counts of several engines by outcome and reason."""
    sums: dict[tuple[str, str], int] = {}
    for outcome, reason, count in itertools.chain.from_iterable(parts):
        key = (str(outcome), str(reason))
        sums[key] = sums.get(key, 0) + count
    return tuple((*key, count) for key, count in sums.items())
