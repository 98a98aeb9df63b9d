"""Fleet: all servers side by side, and the plan of each."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from panels.figures import waiting
from panels.parts import (
    DRIFT,
    IN_USE,
    LEGEND,
    ONE,
    ROOM,
    frame,
    instances,
    lines,
    number,
    query,
    rate,
    reads,
)


def fleet() -> dashboard.Dashboard:
    """Return the dashboard "Fleet"."""
    return frame(
        "fleet",
        "Fleet",
        "All servers side by side: availability, headroom and load.",
        number(
            "Servers ready",
            "Sum of tonnage_engine_ready.",
            "short",
            f"sum(tonnage_engine_ready{{{ONE}}})",
            steps=((None, "red"), (1, "green")),
            mappings=(reads(_0=("none", "red")),),
        ),
        number(
            "Servers not answering",
            "up is 0: the process has ended, or /metrics does not answer.",
            "short",
            'count(up{job=~"$job", instance=~"$instance"} == 0) or vector(0)',
            steps=((None, "green"), (1, "red")),
            mappings=(reads(_0=("none", "green")),),
        ),
        number(
            "Room for more requests",
            "Sum of tonnage_headroom_requests over the servers: further requests of the current mix that fit.",
            "short",
            f"sum(tonnage_headroom_requests{{{ONE}}})",
            steps=ROOM,
            mappings=(reads(_0=("none", "red")),),
        ),
        waiting(),
        number(
            "Different plans",
            "Number of different plans (tonnage_plan_info, revision 0). More than one among equal servers "
            "means that settings or versions differ.",
            "short",
            f'count(count by (plan_id) (tonnage_plan_info{{{ONE}, revision="0"}}))',
            steps=((None, "green"), (2, "orange")),
        ),
        number(
            "Engine restarts, one hour",
            "tonnage_engine_restarts_total. After repeated restarts, read that server's log.",
            "short",
            f"sum(increase(tonnage_engine_restarts_total{{{ONE}}}[1h]))",
            steps=((None, "green"), (1, "orange"), (3, "red")),
            mappings=(reads(_0=("none", "green")),),
        ),
        instances(
            "KV pool in use by server",
            "tonnage_pool_usage_ratio. If servers differ widely, the router does not balance the load.",
            "percentunit",
            f"tonnage_pool_usage_ratio{{{ONE}}}",
            LEGEND,
            steps=IN_USE,
        ),
        instances(
            "Headroom by server",
            "tonnage_headroom_bytes: memory that admission can still reserve on each server.",
            "bytes",
            f"tonnage_headroom_bytes{{{ONE}}}",
            LEGEND,
            steps=((None, "red"), (1, "green")),
        ),
        lines(
            "Generated tokens by server",
            "tonnage_generation_tokens_total per second.",
            "short",
            query(f"sum by (instance, model) ({rate('tonnage_generation_tokens_total')})"),
        ),
        lines(
            "Waiting by server",
            'tonnage_engine_requests{state="waiting"}. If one server queues while others have headroom, '
            "route by headroom.",
            "short",
            query(f'tonnage_engine_requests{{{ONE}, state="waiting"}}'),
        ),
        lines(
            "Plan drift by server",
            "Largest deviation of measured memory from the plan (tonnage_memory_measured_to_planned_ratio): "
            "weights and pool in both directions, the process only above. From 3 % on an alert fires.",
            "percentunit",
            query(f"max by (model, instance) ({DRIFT})"),
        ),
        lines(
            "Configured pool",
            "tonnage_config_kv_cache_memory_bytes and tonnage_config_device_memory_bytes of each server.",
            "bytes",
            query(f"tonnage_config_kv_cache_memory_bytes{{{ONE}}}", "pool {{instance}}"),
            query(f"tonnage_config_device_memory_bytes{{{ONE}}}", "device {{instance}}"),
        ),
        lines(
            "Ready and answering",
            "tonnage_engine_ready and up: 0 is a server that is not ready, or does not answer.",
            "short",
            query(f"tonnage_engine_ready{{{ONE}}}", "ready {{instance}}"),
            query('up{job=~"$job", instance=~"$instance"}', "answering {{instance}}"),
        ),
        lines(
            "Accounting errors",
            "tonnage_invariant_violations_total: blocks lost or counted twice. Any value but 0 is a bug: keep "
            "the log and restart that server.",
            "short",
            query(f"tonnage_invariant_violations_total{{{ONE}}}"),
        ),
    )
