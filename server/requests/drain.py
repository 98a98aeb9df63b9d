"""Estimate of the time until reserved memory is free again, from recently freed reservations."""

from __future__ import annotations

from collections import deque


class DrainEstimate:
    """Estimate of the seconds until reservations are freed, from the last ``window`` requests that ended.

    The estimate is for ``Retry-After``. Ended requests free their reservations, so their rate is the rate at
    which a queue of reservations drains. The unit is blocks or tokens, the same in all calls.
    """

    def __init__(self, window: int = 64) -> None:
        self._ended: deque[tuple[float, int]] = deque(maxlen=max(2, window))

    def ended(self, blocks: int, now: float) -> None:
        """Record that a request ended at ``now`` (seconds) and freed its reservation of ``blocks``."""
        self._ended.append((now, blocks))

    def seconds(self, blocks: int, now: float) -> float | None:
        """Return the seconds until ``blocks`` more are freed, or None before the rate is known."""
        if len(self._ended) < 2:
            return None
        first = self._ended[0][0]
        given = sum(given for _, given in list(self._ended)[1:])
        if now <= first or given == 0:
            return None
        return blocks * (now - first) / given
