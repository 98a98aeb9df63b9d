"""A search for the smallest number of engines that meets a waiting-time target, by replays of a trace.

Requests are distributed round-robin over n equal engines. Only one engine is simulated, with every n-th
request, since all engines receive similar requests.
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
        waits: Number of engines tried -> waiting time in seconds.
        result: The replay with the last number of engines tried.
    """

    engines: int | None
    waits: dict[int, float]
    result: Replay | None


def share_of(trace: Trace, engines: int) -> Trace:
    """Return the part of a trace that one of ``engines`` engines receives by round-robin distribution."""
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
    """Return the smallest number of engines whose waiting time at ``quantile`` is at most ``target`` seconds.

    Args:
        trace: The requests of the whole deployment.
        setup: Configuration of one engine.
        target: Upper bound of the waiting time in seconds.
        quantile: Quantile of the waiting time to compare with the target, such as "p99".
        most: Upper bound of the number of engines to try.
        progress: Function called with each number of engines tried and its waiting time in seconds.
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
        low, high = (low, middle) if meets(middle) else (middle, high)
    return Found(high, waits, results[high])
