"""The smallest number of engines that meets a target of waiting time, by bisection over whole replays.

Requests are distributed round-robin, and one engine's share is replayed: every n-th request. The engines are
equal, so their shares are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tonnage.cache.replay.result import Replay, quantiles
from tonnage.cache.replay.simulator import Setup, Simulator
from tonnage.cache.replay.trace import Trace


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search for the smallest number of engines.

    Attributes:
        engines: The smallest number that meets the target; None if even the largest number tried does not.
        waits: The waiting time for each number tried, in seconds.
        result: The replay with the last number.
    """

    engines: int | None
    waits: dict[int, float]
    result: Replay | None


def share_of(trace: Trace, engines: int) -> Trace:
    """Return the requests that one of ``engines`` engines receives with round-robin distribution."""
    return replace(trace, requests=trace.requests[::engines])


def search_engines(
    trace: Trace,
    setup: Setup,
    target: float,
    *,
    quantile: str = "p99",
    most: int = 1024,
    progress: Callable[[int, float], None] | None = None,
) -> Found:
    """Return the fewest engines with ``quantile`` of the waiting time at most ``target`` seconds.

    Args:
        trace: The requests.
        setup: One engine.
        target: Upper bound of the waiting time in seconds.
        quantile: The quantile to compare, such as "p99".
        most: Upper bound of the engines to try.
        progress: Called with each number tried and its waiting time.
    """
    waits: dict[int, float] = {}
    results: dict[int, Replay] = {}

    def meets(engines: int) -> bool:
        result = Simulator(share_of(trace, engines), setup).run()
        waits[engines] = quantiles(result.waits).get(quantile, float("inf"))
        results[engines] = result
        if progress is not None:
            progress(engines, waits[engines])
        return waits[engines] <= target

    high, most = 1, min(most, len(trace.requests))
    while not meets(high):
        if high == most:
            return Found(None, waits, results[high])
        high = min(2 * high, most)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if meets(middle):
            high = middle
        else:
            low = middle
    return Found(high, waits, results[high])
