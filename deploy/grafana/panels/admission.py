"""Admission and queue: who is let in, who waits and why, what becomes of all requests."""

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
    return frame(
        "admission",
        "Admission and queue",
        "Who is let in, who waits and why, and what becomes of every request.",
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
            "tonnage_requests_in_flight: received and without an outcome.",
            "short",
            f"sum(tonnage_requests_in_flight{{{ONE}}})",
            steps=ACTIVE,
            mappings=(reads(_0=("none", "text")),),
        ),
        number(
            "Received a second",
            "tonnage_requests_received_total.",
            "reqps",
            f"sum({rate('tonnage_requests_received_total')})",
            steps=ACTIVE,
            mappings=NO_TRAFFIC,
        ),
        number(
            "Refused a second",
            'tonnage_requests_total{outcome="rejected"}: the reasons are in the panel of admission decisions.',
            "reqps",
            f"""sum({rate("tonnage_requests_total", 'outcome="rejected"')})""",
            steps=((None, "green"), (0.1, "orange")),
            mappings=(reads(_0=("none", "green")),),
        ),
        number(
            "Preemptions since the start",
            "tonnage_preemptions_total. In guaranteed mode anything but 0 is a bug: an alert fires.",
            "short",
            f"sum(tonnage_preemptions_total{{{ONE}}})",
            steps=((None, "green"), (1, "red")),
            mappings=(reads(_0=("none", "green")),),
        ),
        lines(
            "Admission decisions",
            "tonnage_admission_decisions_total per second, by outcome and reason: admit, wait (it fits, but "
            "not now) and never (it cannot fit at all; retrying is useless). Many never: callers ask for "
            "more than max_model_len or the pool; many wait for blocks: add memory or replicas.",
            "reqps",
            query(
                f"sum by (outcome, reason) ({rate('tonnage_admission_decisions_total')})",
                "{{outcome}} {{reason}}",
            ),
        ),
        stacked(
            lines(
                "Requests in the engine",
                "tonnage_engine_requests by state, stacked. A queue that grows while headroom is left means "
                "max_num_seqs is too small.",
                "short",
                query(f"sum by (state) (tonnage_engine_requests{{{ONE}}})", "{{state}}"),
            )
        ),
        lines(
            "Outcomes",
            "tonnage_requests_total per second by outcome; received = all outcomes + in flight. error is the "
            "engine's fault, aborted the client hung up.",
            "reqps",
            query(f"sum by (outcome) ({rate('tonnage_requests_total')})", "{{outcome}}"),
        ),
        lines(
            "Time in the queue",
            "Median and 95th percentile of tonnage_queue_wait_seconds, until admission. Above what callers "
            "accept: add replicas, or shed earlier with a smaller max_num_queued_reqs.",
            "s",
            query(quantile(0.5, "tonnage_queue_wait_seconds"), "median"),
            query(quantile(0.95, "tonnage_queue_wait_seconds"), "95 %"),
        ).no_value("no traffic"),
        heat(
            "Time in the queue, all requests",
            "tonnage_queue_wait_seconds: how many requests were admitted within which time. A band at the "
            "bottom is the good case; one far above it are those that waited for room.",
            "tonnage_queue_wait_seconds",
        ),
        lines(
            "KV blocks that were missing",
            "tonnage_admission_refused_blocks_total per second: how much larger the pool would have had to "
            "be for the requests that waited or never fit.",
            "short",
            query(
                f"sum by (outcome, reason) ({rate('tonnage_admission_refused_blocks_total')})",
                "{{outcome}} {{reason}}",
            ),
        ),
        lines(
            "Preemptions and lost tokens",
            "tonnage_preemptions_total and tonnage_preempted_tokens_total per second: work thrown away. "
            "Only in auto, greedy and predictive mode; auto weighs its cost, guaranteed never preempts.",
            "short",
            query(f"sum by (instance) ({rate('tonnage_preemptions_total')})", "preemptions {{instance}}"),
            query(f"sum by (instance) ({rate('tonnage_preempted_tokens_total')})", "lost tokens {{instance}}"),
        ),
        stacked(
            lines(
                "KV memory asked for by tenant",
                "tonnage_tenant_asked_bytes: what the unfinished requests of each tenant may come to hold. "
                "One tenant that fills the pool: give its key a quota.",
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
