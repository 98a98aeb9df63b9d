"""Overview: is it well, what is full, who waits, does the plan hold; each figure leads to its dashboard."""

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
# Share of the requests that ended in an error.
_ERRORS = (
    f"""sum by (model, instance) ({rate("tonnage_requests_total", 'outcome="error"')})"""
    f" / (sum by (model, instance) ({rate('tonnage_requests_total')}) > 0)"
)
_RESERVED = f"1 - tonnage_headroom_blocks{{{ONE}}} / tonnage_pool_usable_blocks{{{ONE}}}"


def _of_limit(title: str, text: str, expression: str, more: dashboard.DashboardLink) -> stat.Panel:
    """A share of the limit that an alert compares with."""
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
    return frame(
        "overview",
        "Overview",
        "Is it well, what is full, who waits, does the plan hold.",
        ready(width=3, more=_FLEET),
        number(
            "Alerts",
            "ALERTS of ours that fire now; each has a runbook, in Alertmanager and in prometheus/rules.",
            "short",
            'count(ALERTS{alertname=~"Tonnage.+", alertstate="firing", job=~"$job", instance=~"$instance"}) '
            "or vector(0)",
            steps=((None, "green"), (1, "red")),
            mappings=(reads(_0=("none", "green")),),
            width=3,
        ),
        number(
            "KV pool taken",
            "1 - tonnage_headroom_blocks / tonnage_pool_usable_blocks of the fullest server: reserved to "
            "requests that run, whether they hold it yet or not. At 100 % new requests wait.",
            "percentunit",
            f"max({_RESERVED})",
            steps=((None, "green"), (0.9, "orange"), (1, "red")),
            width=3,
            more=_MEMORY,
        ),
        room(width=3, more=_MEMORY),
        waiting(width=3, more=_ADMISSION),
        _of_limit(
            "First token, of its limit",
            "99th percentile of tonnage_time_to_first_token_seconds over tonnage:first_token_limit_seconds "
            "(prometheus/rules/thresholds.yml): above 100 % an alert fires.",
            # without traffic a quantile is NaN: left out, so that NaN is what no limit gives
            f"max({quantile(0.99, 'tonnage_time_to_first_token_seconds')} >= 0) / scalar({FIRST_TOKEN_LIMIT})",
            _LATENCY,
        ),
        _of_limit(
            "Errors, of their limit",
            'tonnage_requests_total{outcome="error"} over all of tonnage_requests_total, as a share of '
            "tonnage:error_limit_ratio (prometheus/rules/thresholds.yml): above 100 % an alert fires.",
            f"max({_ERRORS}) / scalar({ERROR_LIMIT})",
            _ADMISSION,
        ),
        drift(width=3, more=_MEMORY),
        lines(
            "What is full: KV pool by server",
            "1 - tonnage_headroom_blocks / tonnage_pool_usable_blocks (taken: reserved to requests that run) "
            "and tonnage_pool_usage_ratio (held). Taken near 100 %: new requests wait; add a replica. Held "
            "far below taken: callers ask for more max_tokens than they use.",
            "percentunit",
            query(_RESERVED, f"taken {LEGEND}"),
            query(f"tonnage_pool_usage_ratio{{{ONE}}}", f"held {LEGEND}"),
        )
        .max(1)
        .links([_MEMORY])
        .override_by_regexp("/^held /", [DASHED]),
        lines(
            "Who waits: requests in flight by tenant",
            'tonnage_tenant_requests_in_flight, and tonnage_engine_requests{state="waiting"} of all. One '
            "tenant that fills the queue: give its key a quota.",
            "short",
            query(f"sum by (tenant) (tonnage_tenant_requests_in_flight{{{ONE}}})", "{{tenant}}"),
            query(f'sum(tonnage_engine_requests{{{ONE}, state="waiting"}})', "waiting, all"),
        ).links([_ADMISSION]),
        instances(
            "Plan against reality, by component",
            "tonnage_memory_measured_to_planned_ratio of the worst server: 100 % is a plan that came true. "
            "The process may stay below: not every server sees its largest batch.",
            "percentunit",
            f'max by (component) (tonnage_memory_measured_to_planned_ratio{{{ONE}, component=~"{_EXACT}"}})',
            "{{component}}",
            steps=((None, "green"), (1.03, "red")),
            height=9,
        ).links([_MEMORY]),
        heat(
            "Time to first token",
            "tonnage_time_to_first_token_seconds: how many requests got their first token within which time. "
            "A second band far above the first: some wait for room; see Admission and queue.",
            "tonnage_time_to_first_token_seconds",
        ).links([_LATENCY]),
        alert_line(
            lines(
                "First token, 99 % within",
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
                "the limit of the alert (tonnage:error_limit_ratio). The log of that server names each "
                "failed request.",
                "percentunit",
                query(_ERRORS),
                query(ERROR_LIMIT, "alert limit"),
            )
            .no_value("no traffic")
            .links([_ADMISSION])
        ),
    )
