"""Conversion of a plan to JSON, the stable output format of `tonnage plan --json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tonnage.planner.model.capacity import RequestCapacity
from tonnage.planner.model.host import HostMemory
from tonnage.planner.model.requests import RequestLaw
from tonnage.planner.plans import Plan, RankPlan


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return the JSON object of a plan; future versions only add keys.

    All sizes are integers in bytes. `bytes_per_token` is None if it is not constant (sliding windows); `groups`
    then has the figures of each group of layers.
    """
    cache, layout, model = plan.kv_cache, plan.kv_cache.layout, asdict(plan.model)
    del model["path"], model["active_parameters"]
    return {
        "schema_version": plan.schema_version,
        "plan_id": plan.plan_id,
        "revision": plan.revision,
        "model": model,
        "deployment": asdict(plan.deployment),
        "ranks": [_rank(rank) for rank in plan.ranks],
        "worst_rank": plan.worst_rank,
        "kv_cache": {
            "bytes_per_token": None if layout.slides else layout.bytes_per_token,
            "bytes_per_sequence": cache.bytes_per_sequence,
            "usable_blocks": cache.usable_blocks,
            "num_blocks": cache.num_blocks,
            "tokens": cache.tokens,
            "max_concurrency": round(cache.max_concurrency, 4),
            "max_running": round(plan.running, 4),
            "dtype": layout.dtype,
            "groups": [
                {
                    "kind": group.kind,
                    "layers": list(group.layers),
                    "window": group.window,
                    "block_size": group.block_size or layout.block_size,
                    "bytes_per_block": layout.bytes_per_block,
                }
                for group in layout.groups
            ],
            "per_request": _law(cache.law),
        },
        "requests": [_request(request) for request in plan.requests],
        "trace": None if plan.mix is None else asdict(plan.mix),
        "fits": plan.fits,
        "reasons": list(plan.reasons),
        "unsupported": list(plan.unsupported),
        "unknown": list(plan.unknown),
        "stops_with": plan.stops_with,
        "intervals": {name: list(bounds) for name, bounds in plan.intervals.items()},
        "host": None if plan.host is None else _host(plan.host),
        "tiers": [asdict(tier) for tier in plan.tiers],
        "notes": list(plan.notes),
        "advice": list(plan.advice),
    }


def _host(host: HostMemory) -> dict[str, Any]:
    """Return the JSON object of one replica's host memory; its numbers are None if they are not known."""
    known = not host.unknown
    return {
        "memory_bytes": host.value if known else None,
        "interval": [host.low, host.high] if known else None,
        "shared_memory_bytes": host.shared_bytes if known else None,
        "page_cache_bytes": host.page_cache_bytes if known else None,
        "parts": {part.name: {"bytes": part.value, "interval": [part.low, part.high], "when": part.when,
                              "shared": part.shared} for part in host.parts},
        "unknown": host.unknown or None,
    }  # fmt: skip


def _law(law: RequestLaw | None) -> dict[str, Any] | None:
    """Return the JSON object of the rules for a request's KV cache bytes, or None if they are not known."""
    if law is None:
        return None
    return {
        "fixed_bytes": law.fixed_blocks * law.bytes_per_block,
        "bytes_per_token": law.token_bytes,
        "windows": [{"tokens": window, "bytes_per_token": size} for window, size in law.windows],
        "floor_bytes": law.floor_blocks * law.bytes_per_block,
        "floor_blocks": law.floor_blocks,
        "block_sizes": [group.block_size for group in law.groups],
        "prefix_hit_tokens": law.hit_tokens,
        "source": law.source,
    }


def _request(request: RequestCapacity) -> dict[str, Any]:
    return {
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "blocks": asdict(request.blocks),
        "bytes": request.bytes,
        "at_once": request.at_once,
        "bounds": list(request.bounds),
        "at_last": request.at_last,
        "started": request.started,
        "together": request.together,
        "running": request.running,
        "share": request.share or None,
    }


def _rank(rank: RankPlan) -> dict[str, int]:
    return {
        "weights_bytes": rank.weights_bytes,
        "kv_pool_bytes": rank.kv_pool_bytes,
        "activation_bytes": rank.activation_bytes,
        "cuda_graph_bytes": rank.cuda_graph_bytes,
        "framework_bytes": rank.framework_bytes,
        "free_bytes": rank.free_bytes,
        "total_bytes": rank.total_bytes,
        "lora_bytes": rank.lora_bytes,
        "draft_bytes": rank.draft_bytes,
        "kv_tier_bytes": rank.kv_tier_bytes,
        "offloaded_bytes": rank.offloaded_bytes,
    }
