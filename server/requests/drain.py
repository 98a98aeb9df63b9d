"""How soon there is room again, from what has become free lately."""

from __future__ import annotations

from collections import deque


class DrainEstimate:
    """Seconds until so many blocks (or tokens) are given back, from the last ``window`` ends.

    For ``Retry-After``: the reservations of the requests that ended are what made room, so their rate is the
    rate at which a queue of reservations drains.
    """

    def __init__(self, window: int = 64) -> None:
        self._ended: deque[tuple[float, int]] = deque(maxlen=max(2, window))

    def ended(self, blocks: int, now: float) -> None:
        """A request ended at ``now`` (seconds) and gave back its reservation."""
        self._ended.append((now, blocks))

    def seconds(self, blocks: int, now: float) -> float | None:
        """Seconds until ``blocks`` more have been given back; None while too little has ended to tell."""
        if len(self._ended) < 2:
            return None
        first = self._ended[0][0]
        given = sum(given for _, given in list(self._ended)[1:])
        if now <= first or given == 0:
            return None
        return blocks * (now - first) / given
