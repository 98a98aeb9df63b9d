"""`--metrics-compat vllm`: metrics under the names that gateways, autoscalers and dashboards for vLLM read.

Names, types, labels and meanings come from vLLM 0.32.0 (vllm/v1/metrics/loggers.py), and apply to every backend
of Tonnage. The option is off by default: colons are reserved for recording rules, and promtool rejects them in
metric names.
"""

from __future__ import annotations

from tonnage.server.engines.stats import EngineStats
from tonnage.server.observe.metrics.families import Page
from tonnage.server.state import ServerState


def vllm_families(page: Page, state: ServerState, stats: EngineStats) -> None:
    """Write the server's statistics under vLLM's metric names, with vLLM's labels model_name and engine."""
    pool, accounts, plan = stats.pool, state.accounts, state.plan
    # vllm:cache_config_info has 34 labels in vLLM. These are the few that known tools read. As in vLLM,
    # booleans are written as Python's True and False.
    config = {
        "block_size": plan.kv_cache.layout.block_size,
        "num_gpu_blocks": plan.kv_cache.num_blocks,
        "cache_dtype": plan.deployment.kv_cache_dtype,
        "enable_prefix_caching": plan.deployment.enable_prefix_caching,
        "gpu_memory_utilization": plan.deployment.gpu_memory_utilization,
        "kv_cache_memory_bytes": plan.rank.kv_pool_bytes,
    }
    page.gauge("vllm:num_requests_running", "Number of requests in model execution batches.", stats.running)
    page.gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", stats.waiting)
    page.gauges(
        "vllm:num_requests_waiting_by_reason",
        "Waiting requests by reason.",
        ("reason",),
        {("capacity",): stats.waiting, ("deferred",): 0},
    )
    page.gauge(
        "vllm:kv_cache_usage_perc",
        "KV-cache usage. 1 means 100 percent usage.",
        pool.used / pool.usable if pool.usable else 0.0,
    )
    page.info(
        "vllm:cache_config_info",
        "Information of the LLMEngine CacheConfig.",
        tuple(config),
        [tuple(map(str, config.values()))],
    )
    for name, text, value in (
        ("prefix_cache_queries", "Prefix cache queries, in queried tokens.", stats.prompt_tokens),
        ("prefix_cache_hits", "Prefix cache hits, in cached tokens.", stats.prefix_hit_tokens),
        ("num_preemptions", "Cumulative number of preemptions.", stats.preemptions),
        ("prompt_tokens", "Prefill tokens processed.", stats.prompt_tokens),
        ("generation_tokens", "Generation tokens processed.", stats.generation_tokens),
    ):
        page.counter(f"vllm:{name}", text, value)
    # vLLM does not count requests that never reached the engine, so they are left out here.
    outcomes = accounts.outcomes
    page.counters(
        "vllm:request_success",
        "Processed requests by finish reason.",
        ("finished_reason",),
        {
            ("stop",): outcomes["stop"],
            ("length",): outcomes["length"],
            ("abort",): outcomes["aborted"],
            ("error",): outcomes["error"],
        },
    )
    for name, text, histogram in (
        ("time_to_first_token_seconds", "Time to first token.", accounts.time_to_first_token),
        ("inter_token_latency_seconds", "Inter-token latency.", accounts.inter_token_latency),
        ("e2e_request_latency_seconds", "End to end request latency.", accounts.request_duration),
        ("request_queue_time_seconds", "Time spent in WAITING phase.", accounts.queue_wait),
    ):
        page.histogram(f"vllm:{name}", f"{text} In seconds.", histogram)
