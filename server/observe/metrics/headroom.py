"""Metrics of headroom: requests and tokens that still fit, and the times until the pool is full or drained."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from statistics import linear_regression

from tonnage.cache.admission import AdmissionRequest, Limits, largest_prompt, reserved_blocks
from tonnage.server.engines.stats import PoolStats
from tonnage.server.observe.metrics.families import Page
from tonnage.server.observe.metrics.usage import RequestMix
from tonnage.server.requests.counts import RequestCounts

# Upper bound of all reported times in seconds. It also stands for "never", because PromQL cannot plot infinity.
FOREVER_SECONDS = 86_400.0

# `Trend` covers two minutes, which are eight scrapes at Prometheus' usual interval of 15 s.
_WINDOW_SECONDS = 120.0
_SPACING_SECONDS = 1.0  # `Trend` keeps at most one point per second, however many clients scrape the metrics.


@dataclass(frozen=True, slots=True)
class Headroom:
    """The number of further requests and tokens that the engine can take now.

    Attributes:
        blocks: KV blocks that can still be reserved.
        requests: number of requests of the average size that fit into these blocks and into the batch.
        prompt_tokens: tokens of the largest prompt that admission would accept now with the default max_tokens.
    """

    blocks: int
    requests: int
    prompt_tokens: int


def headroom(
    pool: PoolStats, sequences: int, mix: RequestMix, limits: Limits, default_max_tokens: int
) -> Headroom:
    """Return the headroom: the further KV blocks, requests and tokens that the engine can take now.

    Args:
        pool: the KV pool's blocks by state.
        sequences: number of running sequences.
        mix: average size of the requests so far. Before the first, one sequence of max_model_len is used.
        limits: the engine's limits of sequences and tokens, and its usable blocks.
        default_max_tokens: max_tokens of a request that sets none.
    """
    blocks = pool.headroom
    seats = max(0, limits.max_num_seqs - sequences)
    if not limits.layout.groups:  # an encoder model has no KV cache, so only the batch limits its requests
        return Headroom(0, seats, limits.max_model_len if seats else 0)
    if mix.requests:
        typical, width = mix.blocks, mix.sequences
    else:
        whole = AdmissionRequest(max(1, limits.max_model_len - 1), 1)
        typical, width = float(reserved_blocks(whole, limits)), 1.0
    largest = 0
    if blocks and seats and default_max_tokens < limits.max_model_len:
        largest = largest_prompt(AdmissionRequest(1, default_max_tokens), replace(limits, usable_blocks=blocks))
    return Headroom(blocks, min(int(blocks / max(1.0, typical)), int(seats / max(1.0, width))), largest)


class Trend:
    """The number of reserved KV blocks over the last two minutes, to estimate when the pool will be full."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def observe(self, now: float, taken: int) -> None:
        """Record that `taken` KV blocks are reserved at the time `now` (seconds of a monotonic clock)."""
        if not self._points or now - self._points[-1][0] >= _SPACING_SECONDS:
            self._points.append((now, taken))
        while now - self._points[0][0] > _WINDOW_SECONDS:
            self._points.popleft()

    def seconds_to(self, blocks_left: int) -> float:
        """Return the estimated seconds until `blocks_left` more KV blocks are reserved.

        A least-squares line through the recorded points extrapolates the reserved blocks. The result is at most
        FOREVER_SECONDS, which is also returned when the line does not rise or has fewer than two points.
        """
        if blocks_left <= 0:
            return 0.0
        if len(self._points) < 2:
            return FOREVER_SECONDS
        times, taken = zip(*self._points, strict=True)
        slope = linear_regression(times, taken).slope
        if slope * FOREVER_SECONDS <= blocks_left:
            return FOREVER_SECONDS
        return blocks_left / slope


def headroom_families(
    page: Page, room: Headroom, usable_blocks: int, bytes_per_block: int, trend: Trend, counts: RequestCounts
) -> None:
    """Write the headroom metrics: KV blocks, requests and tokens left, and the times to full and to drained.

    The KV pool is full when no more blocks can be reserved, and drained when all requests in flight have ended.
    """
    trend.observe(time.monotonic(), usable_blocks - room.blocks)
    drain = drain_seconds(counts)
    page.gauge("tonnage_headroom_blocks", "KV blocks that admission can still reserve.", room.blocks)
    page.gauge(
        "tonnage_headroom_bytes",
        "Bytes of the KV blocks that admission can still reserve.",
        room.blocks * bytes_per_block,
    )
    page.gauge(
        "tonnage_headroom_requests",
        "More requests of the present mix (running mean of the requested blocks) that fit now.",
        room.requests,
    )
    page.gauge(
        "tonnage_headroom_prompt_tokens",
        "Largest prompt that would be admitted now with the default max_tokens; 0: none.",
        room.prompt_tokens,
    )
    page.gauge(
        "tonnage_time_to_full_seconds",
        "Seconds until nothing more can be reserved, at the growth of the last two minutes; "
        f"{FOREVER_SECONDS:.0f}: not within a day.",
        trend.seconds_to(room.blocks),
    )
    page.gauge(
        "tonnage_drain_seconds",
        "Seconds until the requests in flight complete at the rate of the last completions; "
        f"{FOREVER_SECONDS:.0f}: not within a day, or no rate known.",
        FOREVER_SECONDS if drain is None else min(FOREVER_SECONDS, drain),
    )


def drain_seconds(counts: RequestCounts) -> float | None:
    """Return the seconds until all requests in flight complete, at the rate at which the last ones completed.

    Returns None when that rate is not known yet.
    """
    if not counts.in_flight:
        return 0.0
    rate = counts.completion_rate()
    return counts.in_flight / rate if rate else None
