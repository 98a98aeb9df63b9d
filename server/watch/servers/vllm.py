"""Reading of vLLM: metrics and labels of vllm/v1/metrics/loggers.py, 0.32.0, and names of older releases.

The metrics page lacks the batch size, the parallel sizes and the device. They are in ``/server_info``, which
exists only with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from tonnage.planner.units import GiB
from tonnage.server.watch.client import Client, Response
from tonnage.server.watch.records import Counters, PlanSummary, Pool, Reading, Replica, ServerFacts, TierReading
from tonnage.server.watch.samples import Samples
from tonnage.server.watch.servers.families import read_auto, read_headroom, read_measured, read_plan
from tonnage.server.watch.servers.json_values import cards, mapping, text

_INFO = "vllm:cache_config_info"
# names of the metric for KV cache usage; the second one is from vLLM releases before 0.10
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
# label of the metric cache_config_info -> field of the Deployment
_CACHE = {
    "block_size": "block_size",
    "cache_dtype": "kv_cache_dtype",
    "enable_prefix_caching": "enable_prefix_caching",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes",
    "num_gpu_blocks_override": "num_gpu_blocks_override",
}
# section of vllm_config in /server_info -> its fields, which the Deployment has under the same names
_CONFIG = {
    "model_config": ("enforce_eager", "quantization"),
    "parallel_config": (
        "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size",
        "enable_expert_parallel",
    ),
    "scheduler_config": ("max_num_seqs", "max_num_batched_tokens"),
    "device_config": ("device",),
    "lora_config": ("max_loras", "max_lora_rank"),
}  # fmt: skip
# Prefixes of the metrics of KV tiers. Sources: distributed/kv_transfer/kv_connector/v1/offloading/metrics.py
# and v1/simple_kv_offload/metrics.py (vLLM 0.32), and lmcache/observability.py (LMCache).
_TIERS = ("vllm:kv_offload_", "vllm:simple_kv_offload_", "lmcache:")
_TIER_SECONDS = ("vllm:kv_offload_load_time_total", "vllm:kv_offload_lookup_async_delay_seconds_sum")
# Seconds that LMCache spent loading: one series per rank. The ranks load concurrently, so the largest counts.
_LMCACHE_SECONDS = "lmcache:time_to_retrieve_sum"
# A value of --kv-offloading-size that is at least this large cannot be in GiB, so it is ignored.
_MOST_GIB = 1 << 30
_ASSUMED = ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "enforce_eager")


class VLLMServer:
    """A reader of a vLLM server's metrics and settings over HTTP."""

    title = "vLLM"

    def matches(self, client: Client, samples: Samples) -> bool:
        """Return whether the metrics page belongs to vLLM."""
        return samples.has_prefix("vllm:")

    def metrics_hint(self, client: Client) -> str | None:
        """Return how to turn on the metrics of a vLLM server, or None for a server of another kind."""
        models = client.get("/v1/models").json()
        owners = {card.get("owned_by") for card in cards(models)}
        return "start it without --disable-log-stats" if "vllm" in owners else None

    def planned(self, client: Client, samples: Samples) -> PlanSummary | None:
        """Return the plan that Tonnage's plug-in in vLLM reports, or None without the plug-in."""
        return read_plan(samples, _served(samples))

    def facts(self, client: Client, samples: Samples) -> ServerFacts:
        """Return the version, model and flags of a vLLM server."""
        version = mapping(client.get("/version").json()).get("version")
        own = next((card for card in cards(client.get("/v1/models").json()) if not card.get("parent")), {})
        flags = _from_labels(samples)
        info = mapping(client.get("/server_info?config_format=json").json())
        config = mapping(info.get("vllm_config"))
        flags |= _from_config(config)
        if (engines := len(samples.by("engine", _INFO))) > 1:
            flags["data_parallel_size"] = engines
        if isinstance(length := own.get("max_model_len"), int):
            flags["max_model_len"] = length
        notes = []
        # With Tonnage's plug-in the page has the plan with all settings, so none has to be assumed.
        has_plan = "tonnage_memory_planned_bytes" in samples
        if not has_plan and config.get("speculative_config"):
            notes.append("speculative decoding is on: the draft is planned only with --speculative-model")
        return ServerFacts(
            title=self.title,
            version=version if isinstance(version, str) else None,
            served=text(own.get("id")),
            model=text(own.get("root")) or text(own.get("id")),
            flags=flags,
            assumed=tuple(name for name in _ASSUMED if name not in flags),
            notes=tuple(notes),
        )

    def read(self, client: Client, samples: Samples, page: Response, facts: ServerFacts) -> Reading:
        """Return a vLLM server's running requests, KV pools and counters at this moment."""
        return Reading(
            replicas=tuple(map(_replica, samples.by("engine", "vllm:num_requests_running"))),
            counters=Counters(
                preemptions=samples.count("vllm:num_preemptions_total"),
                prompt_tokens=samples.count("vllm:prompt_tokens_total"),
                generation_tokens=samples.count("vllm:generation_tokens_total"),
                # metric names with "gpu_" are from vLLM releases before 0.10
                prefix_query_tokens=samples.count(
                    "vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"
                ),
                prefix_hit_tokens=samples.count(
                    "vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"
                ),
                finished=samples.count("vllm:request_generation_tokens_count"),
                finished_prompt=samples.count("vllm:request_prompt_tokens_sum"),
                finished_generation=samples.count("vllm:request_generation_tokens_sum"),
            ),
            measured=read_measured(samples),
            started=samples.total("process_start_time_seconds"),
            headroom=read_headroom(samples),
            auto=read_auto(samples),
            tier=_tier(samples),
        )


def _replica(samples: Samples) -> Replica:
    return Replica(
        running=samples.count("vllm:num_requests_running"),
        waiting=samples.count("vllm:num_requests_waiting"),
        pool=_pool(samples),
    )


def _pool(samples: Samples) -> Pool | None:
    """Return the KV pool of one engine; vLLM does not report its cached blocks.

    vLLM's usage is a fraction of all blocks except the null block (v1/core/block_pool.py, get_usage) and counts
    cached blocks as free.
    """
    labels = next((labels for labels, _ in samples.of(_INFO)), {})
    blocks, size = _number(labels.get("num_gpu_blocks")), _number(labels.get("block_size"))
    if not blocks or not size:  # an encoder model has no KV blocks
        return None
    usable = blocks - 1
    usage = samples.total(*_USAGE)
    used = None if usage is None else min(usable, round(usage * usable))
    return Pool(num_blocks=blocks, usable=usable, block_size=size, used=used)


def _tier(samples: Samples) -> TierReading | None:
    """Return a vLLM server's KV tiers (host memory, disk), or None without one.

    vLLM counts the hits of all connectors as external prefix hits (v1/metrics/loggers.py). The seconds per
    prompt token are the time of the prefill phase divided by the tokens computed in it. vLLM's metric for the
    usage of host memory is left out: it has the fraction that transfers pin, not the fraction that is full
    (v1/kv_offload/cpu/spec.py).
    """
    if not any(map(samples.has_prefix, _TIERS)):
        return None
    prefill = samples.total("vllm:request_prefill_time_seconds_sum")
    computed = samples.total("vllm:request_prefill_kv_computed_tokens_sum")
    spent = [seconds for name in _TIER_SECONDS if (seconds := samples.total(name)) is not None]
    spent += [max(seconds for _, seconds in ranks)] if (ranks := samples.of(_LMCACHE_SECONDS)) else []
    return TierReading(
        host_size=_tier_size(samples),
        host_used=samples.count("lmcache:local_cache_usage"),
        disk_size=samples.count("tonnage_tier_size"),
        disk_used=samples.count("tonnage_tier_used", "lmcache:local_storage_usage"),
        hit_tokens=samples.count("vllm:external_prefix_cache_hits_total"),
        loaded_bytes=samples.count("vllm:kv_offload_load_bytes_total"),
        stored_bytes=samples.count("vllm:kv_offload_store_bytes_total"),
        spent_seconds=sum(spent) if spent else None,
        token_seconds=prefill / computed if prefill is not None and computed else None,
    )


def _tier_size(samples: Samples) -> int | None:
    """Return the bytes of host memory for KV tiers (`--kv-offloading-size`, in GiB) over all vLLM engines."""
    sizes = [_literal(labels.get("kv_offloading_size")) for labels, _ in samples.of(_INFO)]
    known = [size for size in sizes if isinstance(size, int | float) and 0 < size < _MOST_GIB]
    return int(sum(known) * GiB) or None


def _served(samples: Samples) -> str | None:
    return next((labels.get("model_name") for labels, _ in samples.of("vllm:num_requests_running")), None)


def _from_labels(samples: Samples) -> dict[str, Any]:
    labels = next((labels for labels, _ in samples.of(_INFO)), {})
    found = {}
    for label, name in _CACHE.items():
        value = _literal(labels.get(label))
        if value is not None and value != "auto":
            found[name] = value
    return found


def _from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part, names in _CONFIG.items():
        section = mapping(config.get(part))
        found |= {name: section[name] for name in names if section.get(name) is not None}
    if "max_loras" in found:
        found["enable_lora"] = True
    if isinstance(device := found.get("device"), str):
        found["device"] = device.partition(":")[0]
    dtype = mapping(config.get("model_config")).get("dtype")
    if isinstance(dtype, str):
        found["dtype"] = dtype.removeprefix("torch.")
    return found


def _literal(label: str | None) -> Any:
    """Return the Python value of a metric's label that vLLM wrote with str(); the label if it is no literal."""
    try:
        return None if label is None else ast.literal_eval(label)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return label


def _number(label: str | None) -> int | None:
    return int(label) if label is not None and label.isdecimal() and len(label) < 19 else None
