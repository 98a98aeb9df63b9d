"""Latency and throughput: what callers feel, and what the engine gets done."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard, timeseries

from panels.parts import ONE, frame, lines, number, quantile, query, rate

_SHARES = (0.5, 0.95, 0.99)


def _latency(title: str, text: str, metric: str) -> timeseries.Panel:
    return lines(
        title, text, "s", *(query(quantile(share, metric), f"p{100 * share:.0f}") for share in _SHARES)
    ).no_value("no traffic")


def latency() -> dashboard.Dashboard:
    return frame(
        "latency",
        "Latency and throughput",
        "What callers feel, and what the engine gets done.",
        number(
            "First token, p95",
            "tonnage_time_to_first_token_seconds: waiting plus prefill.",
            "s",
            quantile(0.95, "tonnage_time_to_first_token_seconds", "model"),
        ),
        number(
            "Between tokens, p95",
            "tonnage_inter_token_latency_seconds: the pace of a stream.",
            "s",
            quantile(0.95, "tonnage_inter_token_latency_seconds", "model"),
        ),
        number(
            "Generated a second",
            "tonnage_generation_tokens_total.",
            "short",
            f"sum({rate('tonnage_generation_tokens_total')})",
        ),
        number(
            "Prompt tokens a second",
            "tonnage_prompt_tokens_total, those from the prefix cache included.",
            "short",
            f"sum({rate('tonnage_prompt_tokens_total')})",
        ),
        number(
            "Completed a second",
            "tonnage_requests_total with the outcomes stop and length.",
            "reqps",
            f"""sum({rate("tonnage_requests_total", 'outcome=~"stop|length"')})""",
        ),
        number(
            "Engine ready",
            "tonnage_engine_ready of the worst server: 0 while it loads or is dead.",
            "short",
            f"min(tonnage_engine_ready{{{ONE}}})",
            steps=((None, "red"), (1, "green")),
        ),
        _latency(
            "Time to first token",
            "tonnage_time_to_first_token_seconds. Rises with the queue: see Admission and queue; without "
            "one, "
            "prompts are long: lower max_num_batched_tokens does not help, a faster device does.",
            "tonnage_time_to_first_token_seconds",
        ),
        _latency(
            "Time between tokens",
            "tonnage_inter_token_latency_seconds. Rises with the batch: lower max_num_seqs for faster streams.",
            "tonnage_inter_token_latency_seconds",
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
            "tonnage_generation_tokens_total over running tonnage_engine_requests: the pace of one stream "
            "as the engine sees it.",
            "short",
            query(
                f"sum by (instance) ({rate('tonnage_generation_tokens_total')}) / clamp_min(sum by "
                f"(instance) "
                f'(avg_over_time(tonnage_engine_requests{{{ONE}, state="running"}}[$__rate_interval])), 1)',
                "{{instance}}",
            ),
        ),
    )
