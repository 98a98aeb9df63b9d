"""Latency and throughput: response times for clients, and the engine's throughput."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard, timeseries

from panels.figures import ready
from panels.parts import (
    ACTIVE,
    FIRST_TOKEN_LIMIT,
    NO_TRAFFIC,
    ONE,
    TOKEN_LIMIT,
    alert_line,
    frame,
    heat,
    lines,
    number,
    quantile,
    query,
    rate,
)

_SHARES = ((0.5, "median"), (0.95, "95 %"), (0.99, "99 %"))
# Limits of the 99th percentile in MLPerf Inference 5.0, Llama 2 70B: interactive scenario (orange) and server
# scenario (red).
_FIRST_TOKEN = ((None, "green"), (0.45, "orange"), (2, "red"))
_TOKEN = ((None, "green"), (0.04, "orange"), (0.2, "red"))


def _latency(title: str, text: str, metric: str, limit: str | None = None) -> timeseries.Panel:
    built = lines(
        title,
        text,
        "s",
        *(query(quantile(share, metric), name) for share, name in _SHARES),
        *(() if limit is None else (query(limit, "alert limit"),)),
    ).no_value("no traffic")
    return built if limit is None else alert_line(built)


def latency() -> dashboard.Dashboard:
    """Return the dashboard "Latency and throughput"."""
    return frame(
        "latency",
        "Latency and throughput",
        "Response times for clients, and the engine's throughput.",
        number(
            "Time to first token, 95 %",
            "95th percentile of tonnage_time_to_first_token_seconds: waiting plus prefill.",
            "s",
            quantile(0.95, "tonnage_time_to_first_token_seconds", "model"),
            steps=_FIRST_TOKEN,
            mappings=NO_TRAFFIC,
        ),
        number(
            "Time between tokens, 95 %",
            "95th percentile of tonnage_inter_token_latency_seconds: the pace of a stream.",
            "s",
            quantile(0.95, "tonnage_inter_token_latency_seconds", "model"),
            steps=_TOKEN,
            mappings=NO_TRAFFIC,
        ),
        number(
            "Generated tokens per second",
            "tonnage_generation_tokens_total.",
            "short",
            f"sum({rate('tonnage_generation_tokens_total')})",
            steps=ACTIVE,
            mappings=NO_TRAFFIC,
        ),
        number(
            "Prompt tokens per second",
            "tonnage_prompt_tokens_total, including tokens from the prefix cache.",
            "short",
            f"sum({rate('tonnage_prompt_tokens_total')})",
            steps=ACTIVE,
            mappings=NO_TRAFFIC,
        ),
        number(
            "Completed per second",
            "tonnage_requests_total with the outcomes stop and length.",
            "reqps",
            f"""sum({rate("tonnage_requests_total", 'outcome=~"stop|length"')})""",
            steps=ACTIVE,
            mappings=NO_TRAFFIC,
        ),
        ready(),
        _latency(
            "Time to first token",
            "tonnage_time_to_first_token_seconds, and the limit of its alert "
            "(tonnage:first_token_limit_seconds). It rises with the queue: see Admission and queue. Without a "
            "queue, prompts are long: only a faster device helps, not a lower max_num_batched_tokens.",
            "tonnage_time_to_first_token_seconds",
            FIRST_TOKEN_LIMIT,
        ),
        _latency(
            "Time between tokens",
            "tonnage_inter_token_latency_seconds, and the limit of its alert (tonnage:token_limit_seconds). "
            "It rises with the batch: lower max_num_seqs for faster streams.",
            "tonnage_inter_token_latency_seconds",
            TOKEN_LIMIT,
        ),
        _latency(
            "Request duration",
            "tonnage_request_duration_seconds of completed requests, arrival to end.",
            "tonnage_request_duration_seconds",
        ),
        _latency(
            "Time in the queue",
            "tonnage_queue_wait_seconds: the part of the time to first token spent waiting for memory or a "
            "sequence.",
            "tonnage_queue_wait_seconds",
        ),
        heat(
            "Time to first token, all requests",
            "tonnage_time_to_first_token_seconds: number of requests by their time to first token.",
            "tonnage_time_to_first_token_seconds",
        ),
        heat(
            "Time between tokens, all tokens",
            "tonnage_inter_token_latency_seconds: number of tokens by the time since the previous token.",
            "tonnage_inter_token_latency_seconds",
        ),
        heat(
            "Request duration, all requests",
            "tonnage_request_duration_seconds: number of completed requests by duration.",
            "tonnage_request_duration_seconds",
            width=24,
        ),
        lines(
            "Tokens per second",
            "tonnage_generation_tokens_total and tonnage_prompt_tokens_total by server. A flat line while the "
            "queue grows is the throughput limit of the hardware.",
            "short",
            query(f"sum by (instance) ({rate('tonnage_generation_tokens_total')})", "generated {{instance}}"),
            query(f"sum by (instance) ({rate('tonnage_prompt_tokens_total')})", "prompt {{instance}}"),
        ),
        lines(
            "Tokens per second and sequence",
            "tonnage_generation_tokens_total over running tonnage_engine_requests: the pace of one stream in "
            "the engine.",
            "short",
            query(
                f"sum by (instance) ({rate('tonnage_generation_tokens_total')}) / clamp_min(sum by "
                f"(instance) "
                f'(avg_over_time(tonnage_engine_requests{{{ONE}, state="running"}}[$__rate_interval])), 1)',
                "{{instance}}",
            ),
        ),
    )
