"""Admission and queue: admitted and waiting requests, reasons, and the outcomes of all requests."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from panels.figures import waiting
from panels.parts import (
    ACTIVE,
    NO_TRAFFIC,
    ONE,
    frame,
    heat,
    lines,
    number,
    quantile,
    query,
    rate,
    reads,
    stacked,
)


def admission() -> dashboard.Dashboard:
    """Return the dashboard "Admission and queue"."""
    return frame(
        "admission",
        "Admission and queue",
        "Admitted and waiting requests, the reasons for waiting, and the outcome of every request.",
        number(
            "Running",
            'tonnage_engine_requests{state="running"}.',
            "short",
            f'sum(tonnage_engine_requests{{{ONE}, state="running"}})',
            steps=ACTIVE,
            mappings=(reads(_0=("none", "text")),),
        ),
        waiting(),
        number(
            "In flight",
            "tonnage_requests_in_flight: received, and not finished yet.",
            "short",
            f"sum(tonnage_requests_in_flight{{{ONE}}})",
            steps=ACTIVE,
            mappings=(reads(_0=("none", "text")),),
        ),
        number(
            "Received per second",
            "tonnage_requests_received_total.",
            "reqps",
            f"sum({rate('tonnage_requests_received_total')})",
            steps=ACTIVE,
            mappings=NO_TRAFFIC,
        ),
        number(
            "Rejected per second",
            'tonnage_requests_total{outcome="rejected"}: see Admission decisions for the reasons.',
            "reqps",
            f"""sum({rate("tonnage_requests_total", 'outcome="rejected"')})""",
            steps=((None, "green"), (0.1, "orange")),
            mappings=(reads(_0=("none", "green")),),
        ),
        number(
            "Preemptions since the start",
            "tonnage_preemptions_total. In guaranteed mode, any value but 0 is a bug and fires an alert.",
            "short",
            f"sum(tonnage_preemptions_total{{{ONE}}})",
            steps=((None, "green"), (1, "red")),
            mappings=(reads(_0=("none", "green")),),
        ),
        lines(
            "Admission decisions",
            "tonnage_admission_decisions_total per second, by outcome and reason: admit, wait (no space "
            "now) and never (it exceeds a limit or the whole pool, so a retry is useless). Many never: clients "
            "request more than max_model_len or the pool. Many wait for blocks: add memory or replicas.",
            "reqps",
            query(
                f"sum by (outcome, reason) ({rate('tonnage_admission_decisions_total')})",
                "{{outcome}} {{reason}}",
            ),
        ),
        stacked(
            lines(
                "Requests in the engine",
                "tonnage_engine_requests by state, stacked. If the queue grows while headroom is left, "
                "max_num_seqs is too small.",
                "short",
                query(f"sum by (state) (tonnage_engine_requests{{{ONE}}})", "{{state}}"),
            )
        ),
        lines(
            "Outcomes",
            "tonnage_requests_total per second by outcome; received = all outcomes + in flight. error: the "
            "server failed. aborted: the client disconnected.",
            "reqps",
            query(f"sum by (outcome) ({rate('tonnage_requests_total')})", "{{outcome}}"),
        ),
        lines(
            "Time in the queue",
            "Median and 95th percentile of tonnage_queue_wait_seconds, until admission. If it is too long, add "
            "replicas, or reject earlier with a smaller max_num_queued_reqs.",
            "s",
            query(quantile(0.5, "tonnage_queue_wait_seconds"), "median"),
            query(quantile(0.95, "tonnage_queue_wait_seconds"), "95 %"),
        ).no_value("no traffic"),
        heat(
            "Time in the queue, all requests",
            "tonnage_queue_wait_seconds: number of admitted requests by waiting time. Requests in the lowest "
            "band did not wait; requests in a band far above waited for memory.",
            "tonnage_queue_wait_seconds",
        ),
        lines(
            "Missing KV blocks",
            "tonnage_admission_refused_blocks_total per second: blocks that waiting or rejected requests "
            "lacked.",
            "short",
            query(
                f"sum by (outcome, reason) ({rate('tonnage_admission_refused_blocks_total')})",
                "{{outcome}} {{reason}}",
            ),
        ),
        lines(
            "Preemptions and lost tokens",
            "tonnage_preemptions_total and tonnage_preempted_tokens_total per second: lost computation. "
            "Only auto, greedy and predictive mode preempt; auto weighs the cost.",
            "short",
            query(f"sum by (instance) ({rate('tonnage_preemptions_total')})", "preemptions {{instance}}"),
            query(f"sum by (instance) ({rate('tonnage_preempted_tokens_total')})", "lost tokens {{instance}}"),
        ),
        stacked(
            lines(
                "KV memory requested by tenant",
                "tonnage_tenant_asked_bytes: upper bound of the KV memory of each tenant's unfinished "
                "requests. If one tenant fills the pool, give its key a quota.",
                "bytes",
                query(f"sum by (tenant) (tonnage_tenant_asked_bytes{{{ONE}}})", "{{tenant}}"),
            )
        ),
        lines(
            "Requests by tenant",
            "tonnage_tenant_requests_total per second, all outcomes.",
            "reqps",
            query(f"sum by (tenant) ({rate('tonnage_tenant_requests_total')})", "{{tenant}}"),
        ),
    )
