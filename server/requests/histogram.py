"""Histograms of latencies, with the buckets of vLLM's metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Bucket borders in seconds, as in vLLM 0.32.0 (vllm/v1/metrics/buckets.py), so that the latencies of both
# engines and of a plain vLLM can be compared in one chart.
TIME_TO_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_LATENCY_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_DURATION_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip


class Histogram:
    """Counts of durations by bucket; only the event loop's thread uses it, so it has no lock."""

    __slots__ = ("borders", "counts", "total")

    def __init__(self, borders: Sequence[float]) -> None:
        self.borders = tuple(borders)
        # There is one bucket more than there are borders: the last counts durations above every border.
        self.counts = [0] * (len(self.borders) + 1)
        self.total = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Add ``times`` durations of ``seconds`` each to the histogram."""
        self.counts[bisect_left(self.borders, seconds)] += times
        self.total += seconds * times
