"""Reading of SGLang 0.4 to 0.5: the metrics of its scheduler and tokenizer manager, and its arguments.

The metrics are described in SGLang's docs/references/production_metrics.md.

``/server_info`` (in older releases ``/get_server_info``) has all arguments of the server. The ranks of one
replica (tp_rank, pp_rank, moe_ep_rank) repeat its figures, so the largest value counts. The values of replicas
(dp_rank) are added up. With priority scheduling, the series without a priority is the sum of the series with
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.units import GiB, ceil_div
from tonnage.server.watch.client import Client, Response
from tonnage.server.watch.records import Counters, PlanSummary, Pool, Reading, Replica, ServerFacts, TierReading
from tonnage.server.watch.samples import Samples
from tonnage.server.watch.servers.json_values import mapping, number, objects, text

_INFO_PATHS = ("/server_info", "/get_server_info")
_RANKS = ("tp_rank", "pp_rank", "moe_ep_rank")
# argument of the SGLang server -> field of the Deployment
_ARGUMENTS = {
    "dtype": "dtype",
    "quantization": "quantization",
    "kv_cache_dtype": "kv_cache_dtype",
    "context_length": "max_model_len",
    "max_running_requests": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "page_size": "block_size",
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp_size": "data_parallel_size",
    "mem_fraction_static": "mem_fraction_static",
    "swa_full_tokens_ratio": "swa_full_tokens_ratio",
    "mamba_full_memory_ratio": "mamba_full_memory_ratio",
    "device": "device",
    "disable_cuda_graph": "enforce_eager",
}


class SGLangServer:
    """A reader of an SGLang server's metrics and settings over HTTP."""

    title = "SGLang"

    def matches(self, client: Client, samples: Samples) -> bool:
        """Return whether the metrics page belongs to SGLang."""
        return samples.has_prefix("sglang:")

    def metrics_hint(self, client: Client) -> str | None:
        """Return how to turn on the metrics of an SGLang server, or None for a server of another kind."""
        return "start it with --enable-metrics" if _info(client) else None

    def planned(self, client: Client, samples: Samples) -> PlanSummary | None:
        """Return None, because an SGLang server reports no plan of its own."""
        return None

    def facts(self, client: Client, samples: Samples) -> ServerFacts:
        """Return the version, model and arguments of an SGLang server."""
        info = _info(client)
        state = next(iter(objects(info.get("internal_states"))), {})
        arguments = {**info, **{key: value for key, value in state.items() if value is not None}}
        memory = mapping(state.get("memory_usage"))
        notes = []
        if arguments.get("speculative_algorithm"):
            notes.append("speculative decoding is on: the draft model's memory is not planned")
        return ServerFacts(
            title=self.title,
            version=text(info.get("version")),
            served=text(arguments.get("served_model_name")) or text(arguments.get("model_path")),
            model=text(arguments.get("model_path")),
            flags=_flags(arguments),
            pool_tokens=number(info.get("max_total_num_tokens")) or number(memory.get("token_capacity")),
            most_tokens=number(arguments.get("max_total_tokens")),
            measured=_measured(memory),
            notes=tuple(notes),
        )

    def read(self, client: Client, samples: Samples, page: Response, facts: ServerFacts) -> Reading:
        """Return the running requests, pools and counters of an SGLang server now."""
        replicas = samples.by("dp_rank", "sglang:num_running_reqs")
        return Reading(
            replicas=tuple(_replica(part, facts) for part in replicas),
            counters=_counters(samples),
            measured=facts.measured,
            started=samples.total("process_start_time_seconds"),
            tier=_tier(samples),
        )


def _info(client: Client) -> Mapping[str, Any]:
    """Return the start arguments that an SGLang server reports; empty for another kind of server.

    vLLM also has /server_info, but without the field model_path.
    """
    for path in _INFO_PATHS:
        found = mapping(client.get(path).json())
        if "model_path" in found and "mem_fraction_static" in found:
            return found
    return {}


def _flags(arguments: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: arguments[key] for key, name in _ARGUMENTS.items() if arguments.get(key) is not None}
    if isinstance(cached := arguments.get("disable_radix_cache"), bool):
        found["enable_prefix_caching"] = not cached
    if isinstance(offloaded := arguments.get("cpu_offload_gb"), int) and offloaded > 0:
        found["cpu_offload_bytes"] = offloaded * GiB
    if arguments.get("enable_lora"):
        found["enable_lora"] = True
        loras = {"max_loras_per_batch": "max_loras", "max_lora_rank": "max_lora_rank"}
        found |= {name: arguments[key] for key, name in loras.items() if arguments.get(key) is not None}
    return found


def _measured(memory: Mapping[str, Any]) -> dict[str, int]:
    """Return measured bytes by memory component; SGLang reports GiB with two decimals, which it calls GB."""
    found = {}
    for key, name in {"weight": "weights", "graph": "cuda_graphs"}.items():
        if isinstance(value := memory.get(key), (int, float)) and value > 0:
            found[name] = int(value * GiB)
    return found


def _value(samples: Samples, *names: str) -> float | None:
    """Return the first metric of `names` that the page has, summed over replicas, or None if it has none.

    The ranks of one replica repeat its value, so the largest of them counts.
    """
    found = samples.first(names)
    if found is None:
        return None
    largest: dict[tuple[tuple[str, str], ...], float] = {}
    for labels, value in samples.of(found):
        if labels.get("priority"):
            continue
        key = tuple(sorted((name, own) for name, own in labels.items() if name not in _RANKS))
        largest[key] = max(value, largest.get(key, 0.0))
    return sum(largest.values()) if largest else None


def _count(samples: Samples, *names: str) -> int | None:
    value = _value(samples, *names)
    return None if value is None else round(value)


def _replica(samples: Samples, facts: ServerFacts) -> Replica:
    return Replica(
        running=_count(samples, "sglang:num_running_reqs"),
        waiting=_count(samples, "sglang:num_queue_reqs"),
        pool=_pool(samples, facts),
    )


def _pool(samples: Samples, facts: ServerFacts) -> Pool | None:
    """Return the KV pool of one replica; tokens of the radix cache that can be evicted do not count as used."""
    tokens = _count(samples, "sglang:max_total_num_tokens") or facts.pool_tokens
    if not tokens:
        return None
    size = _count(samples, "sglang:page_size") or facts.flags.get("block_size") or 1
    pages = tokens // size
    used = _count(samples, "sglang:kv_used_tokens", "sglang:num_used_tokens")
    if used is None and (usage := _value(samples, "sglang:token_usage")) is not None:
        used = round(usage * tokens)
    cached = _count(samples, "sglang:kv_evictable_tokens")
    held = None if used is None else min(pages, ceil_div(used, size))
    kept = None if cached is None or held is None else min(pages - held, cached // size)
    return Pool(num_blocks=pages, usable=pages, block_size=size, used=held, cached=kept)


def _tier(samples: Samples) -> TierReading | None:
    """Return the state of HiCache, SGLang's KV tier in host memory, or None without it.

    SGLang counts tokens instead of bytes. A hybrid model reports several pools; only the one labelled `kv`
    counts tokens of prompts.
    """
    samples = samples.where(pool="kv")
    total = _value(samples, "sglang:hicache_host_total_tokens")
    if not total:
        return None
    used = _value(samples, "sglang:hicache_host_used_tokens")
    return TierReading(
        host_share=None if used is None else used / total,
        hit_tokens=_count(samples, "sglang:load_back_tokens_total"),
        spent_seconds=_value(samples, "sglang:load_back_duration_seconds_sum"),
    )


def _counters(samples: Samples) -> Counters:
    prompt = _count(samples, "sglang:prompt_tokens_total")
    generated = _count(samples, "sglang:generation_tokens_total")
    return Counters(
        preemptions=_count(samples, "sglang:num_retracted_requests_total"),
        prompt_tokens=prompt,
        generation_tokens=generated,
        prefix_query_tokens=prompt,
        prefix_hit_tokens=_count(samples, "sglang:cached_tokens_total"),
        # The token counts are of finished requests, because SGLang counts tokens when a request ends
        # (tokenizer_manager.py).
        finished=_count(samples, "sglang:num_requests_total"),
        finished_prompt=prompt,
        finished_generation=generated,
    )
