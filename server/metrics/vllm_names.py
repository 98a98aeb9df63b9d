"""``--metrics-compat vllm``: the names that gateways, autoscalers and dashboards for vLLM read.

Names, types, labels and meanings of vLLM 0.32.0 (vllm/v1/metrics/loggers.py), for every backend. Off by
default: colons are for recording rules, and promtool refuses them in exported names.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tonnage.server.engines.base import EngineStats
from tonnage.server.state import ServerState

# our outcome -> vLLM's finished_reason; what never reached the engine is no success or failure there
_FINISHED = {"stop": "stop", "length": "length", "abort": "aborted", "error": "error"}
_LABELS = ("model_name", "engine")


def vllm_families(state: ServerState, stats: EngineStats) -> Iterator[Metric]:
    labels = (state.model_name, "0")
    pool, accounts = stats.pool, state.accounts

    def gauge(name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(labels, value)
        return family

    def counter(name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(labels, value)
        return family

    yield gauge("num_requests_running", "Number of requests in model execution batches.", stats.running)
    yield gauge("num_requests_waiting", "Number of requests waiting to be processed.", stats.waiting)
    reasons = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason", "Waiting requests by reason.", labels=(*_LABELS, "reason")
    )
    reasons.add_metric((*labels, "capacity"), stats.waiting)
    reasons.add_metric((*labels, "deferred"), 0)
    yield reasons
    yield gauge(
        "kv_cache_usage_perc",
        "KV-cache usage. 1 means 100 percent usage.",
        pool.used / pool.usable if pool.usable else 0.0,
    )
    yield _cache_config(state, labels)
    yield counter("prefix_cache_queries", "Prefix cache queries, in queried tokens.", stats.prompt_tokens)
    yield counter("prefix_cache_hits", "Prefix cache hits, in cached tokens.", stats.prefix_hit_tokens)
    yield counter("num_preemptions", "Cumulative number of preemptions.", stats.preemptions)
    yield counter("prompt_tokens", "Prefill tokens processed.", stats.prompt_tokens)
    yield counter("generation_tokens", "Generation tokens processed.", stats.generation_tokens)
    finished = CounterMetricFamily(
        "vllm:request_success", "Successfully processed requests.", labels=(*_LABELS, "finished_reason")
    )
    for reason, outcome in _FINISHED.items():
        finished.add_metric((*labels, reason), accounts.outcomes[outcome])  # type: ignore[index]
    yield finished
    for name, text, histogram in (
        ("time_to_first_token_seconds", "Time to first token.", accounts.time_to_first_token),
        ("inter_token_latency_seconds", "Inter-token latency.", accounts.inter_token_latency),
        ("e2e_request_latency_seconds", "End to end request latency.", accounts.request_duration),
        ("request_queue_time_seconds", "Time spent in WAITING phase.", accounts.queue_wait),
    ):
        family = HistogramMetricFamily(f"vllm:{name}", f"{text} In seconds.", labels=_LABELS)
        borders = [*map(str, map(float, histogram.borders)), "+Inf"]
        counts = list(accumulate(histogram.counts))
        family.add_metric(labels, list(zip(borders, counts, strict=True)), histogram.total)
        yield family


def _cache_config(state: ServerState, labels: tuple[str, str]) -> Metric:
    """The labels that readers use (of vLLM's 34): as strings, and booleans as Python writes them."""
    deployment, cache = state.plan.deployment, state.plan.kv_cache
    values = {
        "block_size": cache.layout.block_size,
        "num_gpu_blocks": cache.num_blocks,
        "cache_dtype": deployment.kv_cache_dtype,
        "enable_prefix_caching": deployment.enable_prefix_caching,
        "gpu_memory_utilization": deployment.gpu_memory_utilization,
        "kv_cache_memory_bytes": state.plan.rank.kv_pool_bytes,
    }
    family = GaugeMetricFamily(
        "vllm:cache_config_info", "Information of the LLMEngine CacheConfig.", labels=(*_LABELS, *values)
    )
    family.add_metric((*labels, *map(str, values.values())), 1)
    return family
