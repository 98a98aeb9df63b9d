"""The result of a trace replay: its figures, its samples over time, and their JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tonnage.cache.blocks.pool import BlockPool
from tonnage.cache.replay.tiers import TierCounts

_KEPT = 512  # the plot of a long replay has at least this many points, and fewer than twice as many


@dataclass(slots=True)
class Samples:
    """Means of pool use and request counts for plots: some hundred means, each over equally many steps."""

    seconds: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)  # share of the pool's usable blocks in use
    cached: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    _weight: float = 0.0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 4)
    _every: int = 1
    _count: int = 0

    def add(self, at: float, lasted: float, running: int, pool: BlockPool, waiting: int) -> None:
        """Add the pool's use and the request counts of a step, or of several decode steps simulated at once.

        The step began at second ``at`` and took ``lasted`` seconds.
        """
        values = (pool.used / pool.usable, pool.cached / pool.usable, running, waiting)
        self._weight += lasted
        for place, value in enumerate(values):
            self._sums[place] += value * lasted
        self._count += 1
        if self._count % self._every or not self._weight:
            return
        self.seconds.append(at)
        lists = (self.used, self.cached, self.running, self.waiting)
        for place, values_of in enumerate(lists):
            values_of.append(self._sums[place] / self._weight)
        self._weight, self._sums = 0.0, [0.0] * 4
        if len(self.seconds) == 2 * _KEPT:
            self._every *= 2
            for values_of in (self.seconds, *lists):
                del values_of[1::2]


@dataclass(slots=True)
class Replay:
    """The figures of a trace replay (counts, times, hit rates), filled by the simulator.

    Times are in seconds. ``stalls`` is the sum, over all steps, of the sequences that needed a block and got
    none.
    """

    trace: str
    policy: str
    requests: int
    finished: int = 0
    rejected: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    preemptions: int = 0
    recomputed_tokens: int = 0
    stalls: int = 0
    stall_steps: int = 0
    longest_stall: int = 0
    prompt_tokens: int = 0  # computed prompt tokens: cached prefixes do not count, recomputed tokens do
    output_tokens: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    most_running: int = 0
    waits: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    samples: Samples = field(default_factory=Samples)
    tiers: TierCounts | None = None

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens of admitted requests that the prefix cache had."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0

    @property
    def recomputed_share(self) -> float:
        """Share of the computed tokens that were computed a second time, because of preemptions."""
        computed = self.prompt_tokens + self.output_tokens
        return self.recomputed_tokens / computed if computed else 0.0

    @property
    def stall_share(self) -> float:
        """Share of (running sequence, step) pairs in which the sequence stalled for lack of KV blocks."""
        turns = self.stalls + self.output_tokens
        return self.stalls / turns if turns else 0.0

    @property
    def mean_running(self) -> float:
        """Mean number of sequences that decode in a step of the replay."""
        return self.output_tokens / self.steps if self.steps else 0.0

    @property
    def mean_used(self) -> float:
        """Mean share of the KV block pool in use over time."""
        used = self.samples.used
        return sum(used) / len(used) if used else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the replay's figures for ``--json``, with quantiles of times in seconds."""
        return {
            "trace": self.trace,
            "policy": self.policy,
            "requests": self.requests,
            "finished": self.finished,
            "rejected": self.rejected,
            "rejected_by_reason": self.reasons,
            "steps": self.steps,
            "seconds": round(self.seconds, 3),
            "preemptions": self.preemptions,
            "recomputed_share": round(self.recomputed_share, 5),
            "stalls": self.stalls,
            "stall_share": round(self.stall_share, 6),
            "stall_steps": self.stall_steps,
            "longest_stall_steps": self.longest_stall,
            "hit_rate": round(self.hit_rate, 5),
            "evictions": self.evictions,
            "most_running": self.most_running,
            "mean_running": round(self.mean_running, 2),
            "mean_pool_used": round(self.mean_used, 4),
            "wait_seconds": quantiles(self.waits),
            "first_token_seconds": quantiles(self.first_tokens),
            "total_seconds": quantiles(self.totals),
        }


def quantiles(values: list[float]) -> dict[str, float]:
    """Return mean, p50, p90, p99 and max of ``values`` by name, or an empty dict if there are no values."""
    if not values:
        return {}
    ordered = sorted(values)
    at = {name: ordered[min(len(ordered) - 1, int(q * len(ordered)))] for name, q in _QUANTILES}
    return {"mean": round(sum(ordered) / len(ordered), 4)} | {k: round(v, 4) for k, v in at.items()}


_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
