"""The smallest number of engines that meets a target of waiting time, by bisection over whole replays.

Requests are dealt to the engines in turn (a router that knows nothing), and one engine's share is replayed:
every n-th request. The engines being alike, so are their shares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tonnage.cache.replay.result import Replay, quantiles
from tonnage.cache.replay.simulator import Setup, Simulator
from tonnage.cache.replay.trace import Trace


@dataclass(frozen=True, slots=True)
class Found:
    """``engines`` None: not even ``tried`` of them meet the target. ``wait`` of each number tried."""

    engines: int | None
    waits: dict[int, float]
    result: Replay | None


def share_of(trace: Trace, engines: int) -> Trace:
    """What one of ``engines`` gets when requests are dealt in turn."""
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
    """Fewest engines with ``quantile`` of the wait at most ``target`` seconds, and nobody refused for room."""
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
