"""The verdict on KV tiers: whether they pay for a trace, by how much, and what limits them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tonnage.cache.replay.result import Replay, quantiles
from tonnage.cache.replay.step_time import StepTime
from tonnage.cache.replay.tier_curve import KNEE, TierCurve
from tonnage.cache.replay.tiers import TierCounts, TierSetup
from tonnage.planner.units import gib

# Relative changes of the mean time to first token below this value count as no gain. The value is an
# assumption: repeated benchmarks of one server differ by about as much.
_NOTHING = 0.01
_LEFT = 0.005  # a larger cache that adds less than this share of prompt tokens as hits counts as no gain


@dataclass(frozen=True, slots=True)
class TierVerdict:
    """The comparison of two replays of a trace: with KV tiers and without.

    Attributes:
        without: The replay without tiers.
        tiered: The replay with tiers.
        setup: Sizes and bandwidths of the tiers.
        step_time: Duration of a step, from which the prefill time that hits save is computed.
        curve: LRU hit rate of a prefix cache by its size.
        chunk_bytes: Bytes of a chunk.
        optimum: Share of prompt tokens that a cache as large as pool and tiers hits if it knows the future.
    """

    without: Replay
    tiered: Replay
    setup: TierSetup
    step_time: StepTime
    curve: TierCurve
    chunk_bytes: int
    optimum: float

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found in the GPU's pool or a KV tier."""
        return self.tiered.hit_rate + self.counts.hit_tokens / max(1, self.tiered.query_tokens)

    @property
    def counts(self) -> TierCounts:
        """Counters of the host and disk tiers in the replay with tiers."""
        assert self.tiered.tiers is not None
        return self.tiered.tiers

    @property
    def saved_seconds(self) -> float:
        """Seconds of prefill that the loaded tokens would have taken, by the arithmetic of `step_time`."""
        step = self.step_time
        return 2.0 * step.parameters * self.counts.hit_tokens / step.flops / step.devices

    @property
    def change(self) -> float:
        """Relative change of the mean time to first token by KV tiers; below 0 is faster."""
        before, after = _mean(self.without), _mean(self.tiered)
        return after / before - 1 if before else 0.0

    @property
    def pays(self) -> bool:
        """Whether the mean time to first token is lower with KV tiers, by more than one percent."""
        return self.change < -_NOTHING

    def sentence(self) -> str:
        """Return the verdict: whether the tiers pay, by how much at which percentile, and what limits them."""
        before, after = quantiles(self.without.first_tokens), quantiles(self.tiered.first_tokens)
        if not before or not after:
            return "No verdict: no request has finished."
        times = "; ".join(
            f"{name} {before[name]:,.3f} s becomes {after[name]:,.3f} s" for name in ("p50", "p90", "p99")
        )
        word = "Pays" if self.pays else "Costs" if self.change > _NOTHING else "Does not pay"
        return f"{word}: mean time to first token {100 * self.change:+.1f} % ({times}). {self.limit()}"

    def limit(self) -> str:
        """Return a sentence on what limits the gain from KV tiers."""
        counts, tokens = self.counts, self.tiered.query_tokens
        enough = f"{gib(self.curve.knee() * self.chunk_bytes)} reach {100 * KNEE:.0f} % of the hits of any size"
        if not self.curve.distances:
            return "No prompt of the trace begins like an earlier one."
        share = 100 * counts.hit_tokens / tokens if tokens else 0.0
        if counts.load_seconds > self.saved_seconds > 0:
            return (
                f"The link limits it: loads take {counts.load_seconds:,.1f} s, and the prefill that they save "
                f"{self.saved_seconds:,.1f} s."
            )
        if self.curve.highest - self.without.hit_rate < _LEFT:
            return f"The GPU's pool already hits what any size could hit: {enough}."
        if counts.chunks_evicted:
            return (
                f"The size limits it: {share:.2f} % of prompt tokens come from the tiers, "
                f"{counts.chunks_evicted:,} of {counts.chunks_stored:,} chunks were evicted; {enough}."
            )
        return f"The trace limits it: {share:.2f} % of prompt tokens come from the tiers; {enough}."

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison's figures for ``--json``; sizes in bytes, times in seconds."""
        return {
            **asdict(self.counts),
            "hit_tokens": self.counts.hit_tokens,
            "saved_prefill_seconds": round(self.saved_seconds, 3),
            "without": {
                "hit_rate": round(self.without.hit_rate, 5),
                "first_token_seconds": quantiles(self.without.first_tokens),
            },
            "setup": asdict(self.setup),
            "change_of_mean_first_token": round(self.change, 5),
            "pays": self.pays,
            "policy": self.setup.policy,
            "hit_rate_with_tiers": round(self.hit_rate, 5),
            "hit_rate_optimum": round(self.optimum, 5),
            "knee_bytes": self.curve.knee() * self.chunk_bytes,
            "verdict": self.sentence(),
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return the comparison's figures for a table, as (name, value) text."""
        counts = self.counts
        tokens = max(1, self.tiered.query_tokens)
        hits = f"{100 * counts.host_hit_tokens / tokens:.2f} % of prompt tokens from host memory"
        declined = (
            f", {gib(counts.chunks_declined * self.chunk_bytes)} not worth it" if counts.chunks_declined else ""
        )
        moved = f"{gib(counts.host_stored_bytes)} stored{declined}, {gib(counts.host_loaded_bytes)} loaded"
        policy = f"{self.setup.policy}: pool and tiers hit {100 * self.hit_rate:.2f} % of prompt tokens"
        policy += f"; the optimum of their size hits {100 * self.optimum:.2f} %"
        if self.setup.disk_bytes:
            hits += f", {100 * counts.disk_hit_tokens / tokens:.2f} % from disk"
            moved += f"; disk {gib(counts.disk_stored_bytes)} written, {gib(counts.disk_loaded_bytes)} read"
        return [
            ("tier hits", hits),
            ("tier policy", policy),
            ("tier traffic", moved),
            ("tier loads", f"{counts.loads:,} in {counts.load_seconds:,.1f} s, for {self.saved_seconds:,.1f} s "
             "of prefill saved"),
            ("verdict", self.sentence()),
        ]  # fmt: skip


def _mean(result: Replay) -> float:
    return sum(result.first_tokens) / len(result.first_tokens) if result.first_tokens else 0.0
