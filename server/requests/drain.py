"""Estimate of the time until reserved memory is free again, from recently freed reservations.

Admission reserves memory for a request; the reservation is freed when the request ends.
"""

from __future__ import annotations

from collections import deque


class DrainEstimate:
    """Estimator of the seconds until reservations are freed, from the last ``window`` requests that ended.

    The estimate is for ``Retry-After``. A request that ends frees its reservation, so the rate of freed
    reservations is also the rate at which waiting requests can be admitted. Amounts are in blocks or in tokens,
    but in the same unit in all calls.
    """

    def __init__(self, window: int = 64) -> None:
        self._ended: deque[tuple[float, int]] = deque(maxlen=max(2, window))

    def ended(self, blocks: int, now: float) -> None:
        """Record that a request ended at ``now`` (monotonic seconds) and freed ``blocks`` reserved blocks."""
        self._ended.append((now, blocks))

    def seconds(self, blocks: int, now: float) -> float | None:
        """Return the estimated seconds until ``blocks`` more blocks are freed; None if the rate is unknown."""
        if len(self._ended) < 2:
            return None
        first = self._ended[0][0]
        given = sum(given for _, given in list(self._ended)[1:])
        if now <= first or given == 0:
            return None
        return blocks * (now - first) / given
