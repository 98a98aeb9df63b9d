"""Latency and throughput: what callers feel, and what the engine gets done."""

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
# MLPerf Inference 5.0, Llama 2 70B: 99 % within, of the interactive scenario (orange) and of the server's
# (red).
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
    return frame(
        "latency",
        "Latency and throughput",
        "What callers feel, and what the engine gets done.",
        number(
            "First token, 95 % within",
            "tonnage_time_to_first_token_seconds: waiting plus prefill.",
            "s",
            quantile(0.95, "tonnage_time_to_first_token_seconds", "model"),
            steps=_FIRST_TOKEN,
            mappings=NO_TRAFFIC,
        ),
        number(
            "Between tokens, 95 % within",
            "tonnage_inter_token_latency_seconds: the pace of a stream.",
            "s",
            quantile(0.95, "tonnage_inter_token_latency_seconds", "model"),
            steps=_TOKEN,
            mappings=NO_TRAFFIC,
        ),
        number(
            "Generated a second",
            "tonnage_generation_tokens_total.",
            "short",
            f"sum({rate('tonnage_generation_tokens_total')})",
            steps=ACTIVE,
            mappings=NO_TRAFFIC,
        ),
        number(
            "Prompt tokens a second",
            "tonnage_prompt_tokens_total, those from the prefix cache included.",
            "short",
            f"sum({rate('tonnage_prompt_tokens_total')})",
            steps=ACTIVE,
            mappings=NO_TRAFFIC,
        ),
        number(
            "Completed a second",
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
            "(tonnage:first_token_limit_seconds). Rises with the queue: see Admission and queue; without "
            "one, prompts are long: lower max_num_batched_tokens does not help, a faster device does.",
            "tonnage_time_to_first_token_seconds",
            FIRST_TOKEN_LIMIT,
        ),
        _latency(
            "Time between tokens",
            "tonnage_inter_token_latency_seconds, and the limit of its alert (tonnage:token_limit_seconds). "
            "Rises with the batch: lower max_num_seqs for faster streams.",
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
            "tonnage_queue_wait_seconds: the part of the first token that memory and batch are to blame for.",
            "tonnage_queue_wait_seconds",
        ),
        heat(
            "Time to first token, all requests",
            "tonnage_time_to_first_token_seconds: how many requests got their first token within which time.",
            "tonnage_time_to_first_token_seconds",
        ),
        heat(
            "Time between tokens, all tokens",
            "tonnage_inter_token_latency_seconds: how many tokens came within which time of the one before.",
            "tonnage_inter_token_latency_seconds",
        ),
        heat(
            "Request duration, all requests",
            "tonnage_request_duration_seconds: how many completed requests took how long.",
            "tonnage_request_duration_seconds",
            width=24,
        ),
        lines(
            "Tokens a second",
            "tonnage_generation_tokens_total and tonnage_prompt_tokens_total by server. Flat while the queue "
            "grows: this is the throughput of the hardware.",
            "short",
            query(f"sum by (instance) ({rate('tonnage_generation_tokens_total')})", "generated {{instance}}"),
            query(f"sum by (instance) ({rate('tonnage_prompt_tokens_total')})", "prompt {{instance}}"),
        ),
        lines(
            "Tokens a second and sequence",
            "tonnage_generation_tokens_total over running tonnage_engine_requests: the pace of one stream as "
            "the engine sees it.",
            "short",
            query(
                f"sum by (instance) ({rate('tonnage_generation_tokens_total')}) / clamp_min(sum by "
                f"(instance) "
                f'(avg_over_time(tonnage_engine_requests{{{ONE}, state="running"}}[$__rate_interval])), 1)',
                "{{instance}}",
            ),
        ),
    )
