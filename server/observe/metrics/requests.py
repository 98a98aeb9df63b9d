"""Metrics of requests: admission decisions, outcomes, latencies and tenants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tonnage.cache.admission import NeverReason, WaitReason
from tonnage.server.engines.stats import EngineStats
from tonnage.server.observe.metrics.families import Page
from tonnage.server.observe.metrics.usage import TenantUsage
from tonnage.server.requests.counts import OUTCOMES, Outcome, RequestCounts

# All pairs (outcome, reason) of an admission decision. The reason max_num_queued_reqs is not the engine's: the
# API applies this limit before a request reaches the engine.
ADMISSIONS: tuple[tuple[str, str], ...] = (
    ("admit", "fits"),
    ("admit", "resumed"),
    *(("wait", str(reason)) for reason in WaitReason),
    ("wait", "max_num_queued_reqs"),
    *(("never", str(reason)) for reason in NeverReason),
    ("never", "max_num_queued_reqs"),
)


def engine_request_families(page: Page, stats: EngineStats) -> None:
    """Write the number of running and waiting requests in the engine, and its token counts."""
    page.gauges(
        "tonnage_engine_requests",
        "Requests in the engine by state.",
        ("state",),
        {("running",): stats.running, ("waiting",): stats.waiting},
    )
    page.counter("tonnage_prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens)
    page.counter("tonnage_generation_tokens", "Tokens generated.", stats.generation_tokens)


def admission_families(page: Page, stats: EngineStats, refused: Mapping[tuple[str, str], int]) -> None:
    """Write the admission decisions by outcome and reason, and the KV blocks that refused requests lacked.

    Args:
        page: the metrics page to write to.
        stats: statistics of the engine, including its admission decisions.
        refused: number of requests that the API rejected before they reached the engine, by (outcome, reason).
    """
    decisions = dict.fromkeys(ADMISSIONS, 0)
    for outcome, reason, count in stats.admissions:
        key = (outcome, str(reason))
        decisions[key] = decisions.get(key, 0) + count
    for key, count in refused.items():
        decisions[key] = decisions.get(key, 0) + count
    page.counters(
        "tonnage_admission_decisions",
        "Admission decisions; a request that waits is counted as wait once and as admit when it runs, a "
        "preempted request as resumed when it runs again.",
        ("outcome", "reason"),
        decisions,
    )
    missing = {key: 0 for key in ADMISSIONS if key[0] != "admit" and key[1] == "blocks"}
    for outcome, reason, blocks in stats.refused_blocks:
        if (outcome, str(reason)) in missing:
            missing[outcome, str(reason)] += blocks
    page.counters(
        "tonnage_admission_refused_blocks",
        "KV blocks that were missing when a request had to wait or could never fit.",
        ("outcome", "reason"),
        missing,
    )


def request_families(page: Page, counts: RequestCounts, outcomes: Sequence[Outcome] = OUTCOMES) -> None:
    """Write the number of finished requests by outcome, and the number in flight.

    Args:
        page: the metrics page to write to.
        counts: the request counts of the app.
        outcomes: the outcomes that the server can count. The number of received requests is written only when
            the server counts every outcome (`OUTCOMES`).
    """
    if len(outcomes) == len(OUTCOMES):
        page.counter(
            "tonnage_requests_received",
            "Requests to generating endpoints; equals the sum of tonnage_requests_total and "
            "tonnage_requests_in_flight.",
            counts.received,
        )
    page.gauge("tonnage_requests_in_flight", "Requests received that have no outcome yet.", counts.in_flight)
    page.counters(
        "tonnage_requests",
        "Requests by their one outcome.",
        ("outcome",),
        {(outcome,): counts.outcomes[outcome] for outcome in outcomes},
    )


def latency_families(page: Page, counts: RequestCounts) -> None:
    """Write the latency histograms: queue wait, time to first token, inter-token latency and request time."""
    for name, text, histogram in (
        ("queue_wait", "Seconds from the arrival in the engine's queue to admission.", counts.queue_wait),
        (
            "time_to_first_token",
            "Seconds from the arrival of a request to its first token.",
            counts.time_to_first_token,
        ),
        ("inter_token_latency", "Seconds between two tokens of a sequence.", counts.inter_token_latency),
        (
            "request_duration",
            "Seconds from the arrival of a request to its end (outcomes stop and length).",
            counts.request_duration,
        ),
    ):
        page.histogram(f"tonnage_{name}_seconds", text, histogram)


def tenant_families(
    page: Page,
    tenants: Mapping[str, TenantUsage],
    bytes_per_block: int | None,
    outcomes: Sequence[Outcome] = OUTCOMES,
) -> None:
    """Write the request and token counts of each tenant.

    Args:
        page: the metrics page to write to.
        tenants: the usage of each tenant, by tenant name.
        bytes_per_block: bytes of one KV block, None when unknown; then the requested bytes are not written.
        outcomes: the outcomes that the server can count.
    """
    page.counters(
        "tonnage_tenant_requests",
        "Requests by tenant and outcome; tenants beyond the first 64 are one, other.",
        ("tenant", "outcome"),
        {(name, outcome): one.outcomes[outcome] for name, one in tenants.items() for outcome in outcomes},
    )
    page.gauges(
        "tonnage_tenant_requests_in_flight",
        "Requests of the tenant in the engine, waiting or running.",
        ("tenant",),
        {(name,): one.in_flight for name, one in tenants.items()},
    )
    if bytes_per_block is not None:
        page.gauges(
            "tonnage_tenant_asked_bytes",
            "Bytes of the KV blocks that the tenant's unfinished requests may come to hold.",
            ("tenant",),
            {(name,): one.asked_blocks * bytes_per_block for name, one in tenants.items()},
        )
    page.counters(
        "tonnage_tenant_prompt_tokens",
        "Prompt tokens of the tenant's finished requests.",
        ("tenant",),
        {(name,): one.prompt_tokens for name, one in tenants.items()},
    )
    page.counters(
        "tonnage_tenant_generation_tokens",
        "Tokens generated for the tenant's finished requests.",
        ("tenant",),
        {(name,): one.generation_tokens for name, one in tenants.items()},
    )
