"""Every request of the API counted once: received = stop + length + aborted + rejected + error + in flight."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal

Outcome = Literal["stop", "length", "aborted", "rejected", "error"]
OUTCOMES: tuple[Outcome, ...] = ("stop", "length", "aborted", "rejected", "error")

# Bucket borders in seconds: those of vLLM 0.32.0 (vllm/v1/metrics/buckets.py), so that latencies of both
# engines and of a bare vLLM can be laid over each other.
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
    """Counts of seconds by bucket. Single-threaded: written and read on the event loop."""

    __slots__ = ("borders", "counts", "total")

    def __init__(self, borders: Sequence[float]) -> None:
        self.borders = tuple(borders)
        self.counts = [0] * (len(self.borders) + 1)  # the last one: above every border
        self.total = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.borders, seconds)] += times
        self.total += seconds * times


class Accounts:
    """Counts and latencies of the API; one per app."""

    def __init__(self) -> None:
        self.received = 0
        self.in_flight = 0
        self.idle = asyncio.Event()  # set while nothing is in flight
        self.idle.set()
        self.outcomes: Counter[Outcome] = Counter(dict.fromkeys(OUTCOMES, 0))
        # Refused before the engine saw it: (outcome, reason), as in EngineStats.admissions.
        self.refused: Counter[tuple[str, str]] = Counter()
        self.time_to_first_token = Histogram(TIME_TO_FIRST_TOKEN_BUCKETS)
        self.inter_token_latency = Histogram(INTER_TOKEN_LATENCY_BUCKETS)
        self.request_duration = Histogram(REQUEST_DURATION_BUCKETS)
        self._finished: deque[float] = deque(maxlen=32)  # times of the last completions, for the drain estimate

    def receive(self) -> Ticket:
        """Count a request in; it must be finished exactly once."""
        self.received += 1
        self.in_flight += 1
        self.idle.clear()
        return Ticket(self)

    def drain_seconds(self, waiting: int) -> float:
        """Seconds until ``waiting`` requests are through at the rate of the last completions; 1 to 60.

        Without two completions there is no rate: 1, the smallest value Retry-After can say.
        """
        if len(self._finished) < 2:
            return 1.0
        span = time.monotonic() - self._finished[0]
        return min(60.0, max(1.0, waiting * span / len(self._finished)))

    def check(self) -> None:
        """The law: nothing received is lost or counted twice. Raises AssertionError."""
        counted = sum(self.outcomes.values()) + self.in_flight
        if self.received != counted:
            raise AssertionError(f"received {self.received} requests, counted {counted}: {self.outcomes}")

    def _close(self, outcome: Outcome, seconds: float) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()
        self.outcomes[outcome] += 1
        if outcome in ("stop", "length"):
            self.request_duration.observe(seconds)
            self._finished.append(time.monotonic())


class Ticket:
    """One request, from its arrival to its single outcome."""

    __slots__ = ("_accounts", "_first", "_start", "outcome")

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._start = time.monotonic()
        self._first = False
        self.outcome: Outcome | None = None

    def finish(self, outcome: Outcome) -> None:
        """Settle the outcome; the first one stands."""
        if self.outcome is None:
            self.outcome = outcome
            self._accounts._close(outcome, time.monotonic() - self._start)

    def tokens(self, count: int, now: float, last: float | None) -> None:
        """``count`` new tokens of a sequence arrived at ``now``; the previous ones at ``last`` or never."""
        if not self._first:
            self._first = True
            self._accounts.time_to_first_token.observe(now - self._start)
        if last is not None and count:
            self._accounts.inter_token_latency.observe((now - last) / count, count)
