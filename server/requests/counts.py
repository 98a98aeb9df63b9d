"""Counts of requests by outcome and histograms of latencies, as /metrics exports them for every engine."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Literal

from tonnage.server.requests.histogram import (
    INTER_TOKEN_LATENCY_BUCKETS,
    REQUEST_DURATION_BUCKETS,
    TIME_TO_FIRST_TOKEN_BUCKETS,
    Histogram,
)

Outcome = Literal["stop", "length", "aborted", "rejected", "error"]
OUTCOMES: tuple[Outcome, ...] = ("stop", "length", "aborted", "rejected", "error")


class RequestCounts:
    """Request counts and latency histograms of one app or one engine.

    The number of received requests is the sum of the outcomes plus the requests in flight.
    """

    def __init__(self) -> None:
        self.received = 0
        self.in_flight = 0
        self.outcomes: Counter[Outcome] = Counter(dict.fromkeys(OUTCOMES, 0))
        # number of requests rejected before they reached the engine, by (outcome, reason) as in
        # EngineStats.admissions
        self.refused: Counter[tuple[str, str]] = Counter()
        self.time_to_first_token = Histogram(TIME_TO_FIRST_TOKEN_BUCKETS)
        self.inter_token_latency = Histogram(INTER_TOKEN_LATENCY_BUCKETS)
        self.request_duration = Histogram(REQUEST_DURATION_BUCKETS)
        # The wait in the queue is a part of the time to first token, so both histograms have the same buckets.
        self.queue_wait = Histogram(TIME_TO_FIRST_TOKEN_BUCKETS)
        self._finished: deque[float] = deque(maxlen=32)  # monotonic times of the last 32 completions

    def completed(self, seconds: float) -> None:
        """Record a request that ended normally (stop, length) ``seconds`` after its arrival."""
        self.request_duration.observe(seconds)
        self._finished.append(time.monotonic())

    def completion_rate(self) -> float | None:
        """Return the rate of normal completions per second, measured over the last 32 of them.

        Returns None if fewer than two requests have completed.
        """
        if len(self._finished) < 2:
            return None
        return len(self._finished) / max(1e-3, time.monotonic() - self._finished[0])
