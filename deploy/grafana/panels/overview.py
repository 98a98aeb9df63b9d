"""Overview: readiness, alerts, memory, queue and plan drift; each panel links to its dashboard."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard, stat

from panels.figures import drift, ready, room, waiting
from panels.parts import (
    DASHED,
    ERROR_LIMIT,
    FIRST_TOKEN_LIMIT,
    LEGEND,
    ONE,
    alert_line,
    frame,
    heat,
    instances,
    lines,
    nothing,
    number,
    quantile,
    query,
    rate,
    reads,
    to,
)

_MEMORY, _ADMISSION = to("memory", "Memory"), to("admission", "Admission and queue")
_LATENCY, _FLEET = to("latency", "Latency and throughput"), to("fleet", "Fleet")
_EXACT = "weights|kv_pool|process"
# Share of the requests that ended with an error.
_ERRORS = (
    f"""sum by (model, instance) ({rate("tonnage_requests_total", 'outcome="error"')})"""
    f" / (sum by (model, instance) ({rate('tonnage_requests_total')}) > 0)"
)
_RESERVED = f"1 - tonnage_headroom_blocks{{{ONE}}} / tonnage_pool_usable_blocks{{{ONE}}}"


def _of_limit(title: str, text: str, expression: str, more: dashboard.DashboardLink) -> stat.Panel:
    """Return a panel with a share of the limit that an alert compares with."""
    built = number(
        title,
        text,
        "percentunit",
        expression,
        steps=((None, "green"), (0.8, "orange"), (1, "red")),
        mappings=(reads(_0=("none", "green")), nothing("no limit loaded")),
        width=3,
        more=more,
    )
    return built.no_value("no traffic").decimals(0)


def overview() -> dashboard.Dashboard:
    """Return the dashboard "Overview"."""
    return frame(
        "overview",
        "Overview",
        "Readiness, alerts, memory, queue, latency and plan drift.",
        ready(width=3, more=_FLEET),
        number(
            "Alerts",
            "ALERTS of Tonnage that are firing; each has a runbook, in Alertmanager and in prometheus/rules.",
            "short",
            'count(ALERTS{alertname=~"Tonnage.+", alertstate="firing", job=~"$job", instance=~"$instance"}) '
            "or vector(0)",
            steps=((None, "green"), (1, "red")),
            mappings=(reads(_0=("none", "green")),),
            width=3,
        ),
        number(
            "KV pool reserved",
            "1 - tonnage_headroom_blocks / tonnage_pool_usable_blocks of the fullest server: blocks "
            "reserved for running requests, allocated or not. At 100 %, new requests wait.",
            "percentunit",
            f"max({_RESERVED})",
            steps=((None, "green"), (0.9, "orange"), (1, "red")),
            width=3,
            more=_MEMORY,
        ),
        room(width=3, more=_MEMORY),
        waiting(width=3, more=_ADMISSION),
        _of_limit(
            "First token, share of limit",
            "99th percentile of tonnage_time_to_first_token_seconds over tonnage:first_token_limit_seconds "
            "(prometheus/rules/thresholds.yml). Above 100 % an alert fires.",
            # Without traffic a quantile is NaN and is left out, so that NaN means that no limit is loaded.
            f"max({quantile(0.99, 'tonnage_time_to_first_token_seconds')} >= 0) / scalar({FIRST_TOKEN_LIMIT})",
            _LATENCY,
        ),
        _of_limit(
            "Errors, share of limit",
            'tonnage_requests_total{outcome="error"} over all of tonnage_requests_total, as a share of '
            "tonnage:error_limit_ratio (prometheus/rules/thresholds.yml). Above 100 % an alert fires.",
            f"max({_ERRORS}) / scalar({ERROR_LIMIT})",
            _ADMISSION,
        ),
        drift(width=3, more=_MEMORY),
        lines(
            "KV pool by server",
            "1 - tonnage_headroom_blocks / tonnage_pool_usable_blocks (taken: reserved for running "
            "requests) and tonnage_pool_usage_ratio (in use). If taken is near 100 %, new requests wait: "
            "add a replica. If in use is far below taken, clients set max_tokens higher than they need.",
            "percentunit",
            query(_RESERVED, f"taken {LEGEND}"),
            query(f"tonnage_pool_usage_ratio{{{ONE}}}", f"in use {LEGEND}"),
        )
        .max(1)
        .links([_MEMORY])
        .override_by_regexp("/^in use /", [DASHED]),
        lines(
            "Requests in flight by tenant",
            'tonnage_tenant_requests_in_flight, and tonnage_engine_requests{state="waiting"} of all '
            "tenants. If one tenant fills the queue, give its key a quota.",
            "short",
            query(f"sum by (tenant) (tonnage_tenant_requests_in_flight{{{ONE}}})", "{{tenant}}"),
            query(f'sum(tonnage_engine_requests{{{ONE}, state="waiting"}})', "waiting, all"),
        ).links([_ADMISSION]),
        instances(
            "Measured over planned memory, by component",
            "tonnage_memory_measured_to_planned_ratio of the worst server: 100 % equals the plan. "
            "The process may stay below, because not every server runs its largest batch.",
            "percentunit",
            f'max by (component) (tonnage_memory_measured_to_planned_ratio{{{ONE}, component=~"{_EXACT}"}})',
            "{{component}}",
            steps=((None, "green"), (1.03, "red")),
            height=9,
        ).links([_MEMORY]),
        heat(
            "Time to first token",
            "tonnage_time_to_first_token_seconds: number of requests by their time to first token. "
            "A second band far above the first is requests that wait for memory: see Admission and queue.",
            "tonnage_time_to_first_token_seconds",
        ).links([_LATENCY]),
        alert_line(
            lines(
                "Time to first token, 99 %",
                "99th percentile of tonnage_time_to_first_token_seconds by server, and the limit of its "
                "alert (tonnage:first_token_limit_seconds).",
                "s",
                query(quantile(0.99, "tonnage_time_to_first_token_seconds")),
                query(FIRST_TOKEN_LIMIT, "alert limit"),
            )
            .no_value("no traffic")
            .links([_LATENCY])
        ),
        alert_line(
            lines(
                "Errors",
                'tonnage_requests_total{outcome="error"} over all of tonnage_requests_total by server, and '
                "the limit of the alert (tonnage:error_limit_ratio). That server's log names each failed "
                "request.",
                "percentunit",
                query(_ERRORS),
                query(ERROR_LIMIT, "alert limit"),
            )
            .no_value("no traffic")
            .links([_ADMISSION])
        ),
    )
