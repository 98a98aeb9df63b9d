"""The JSON of /memory: planned and measured bytes with their differences, KV pool states, and headroom."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from tonnage.planner.output.json import plan_to_dict
from tonnage.planner.plans import Plan, RankPlan
from tonnage.server.engines.stats import EngineStats, MeasuredMemory, PoolStats
from tonnage.server.state import ServerState


@dataclass(frozen=True, slots=True)
class CapacityForecast:
    """A forecast of the requests that still fit, and of the times until the KV pool is full or drained.

    Attributes:
        requests: number of further requests of the average size that fit.
        prompt_tokens: tokens of the largest prompt that fits.
        full_in_seconds: seconds until the KV pool is full, None when it takes more than a day.
        drain_seconds: seconds until all requests in flight complete, None when unknown.
    """

    requests: int
    prompt_tokens: int
    full_in_seconds: float | None
    drain_seconds: float | None


def measured_components(plan: Plan, memory: MeasuredMemory) -> dict[str, int]:
    """Return the measured bytes by component of the plan (weights, kv_pool ...); unmeasured ones are absent.

    When all components are measured, they add up to the device's memory: ``free`` is the device's total minus
    the peak of the processes.
    """
    values = {
        "weights": memory.weights,
        "kv_pool": memory.kv_pool,
        "activations": memory.activations,
        "cuda_graphs": memory.cuda_graphs,
        "framework": memory.framework,
        "lora": memory.lora,
        "kv_tier": memory.kv_tier,
        "free": None if memory.process_peak is None else plan.rank.total_bytes - memory.process_peak,
    }
    return {name: value for name, value in values.items() if value is not None}


def planned_components(plan: Plan) -> dict[str, int]:
    """Return the planned bytes by component of the rank that needs the most memory.

    The bytes, with those of the component ``free``, add up to the memory of the rank's device.
    """
    return rank_components(plan.rank)


def rank_components(rank: RankPlan) -> dict[str, int]:
    """Return the planned bytes of one rank by component.

    The bytes, with those of the component ``free``, add up to the memory of the rank's device.
    """
    return {**rank.components, "free": rank.free_bytes}


def memory_report(state: ServerState, room: CapacityForecast, counts: bool = True) -> dict[str, Any]:
    """Return the JSON object of /memory.

    Bytes are integers; null means not measured or unknown. The member `time` is the current time. `since` is
    the time at which the server's phase in the member `state` (loading, ready ...) began. Both are in seconds
    since the epoch.

    Args:
        state: the app's plan, engine and accounts.
        room: forecast of the requests and tokens that still fit into the KV pool.
        counts: whether the client may see the request counts of all tenants, which are null otherwise.
    """
    plan, stats = state.plan, state.engine.stats()
    memory = stats.memory
    planned, measured = planned_components(plan), measured_components(plan, memory)
    process = memory.process_peak
    name, since = state.phase(stats)
    report: dict[str, Any] = {
        "model": state.model_name,
        "version": version("tonnage"),
        "time": round(time.time(), 3),
        "ready": state.started and stats.ready,
        "state": name,
        "since": round(since, 3),
        "restarts": stats.restarts,
        "plan": plan_to_dict(plan),
        "measured": {
            **{f"{name}_bytes": measured.get(name) for name in planned if name != "cuda_graphs"},
            "warm_weights_bytes": memory.warm_weights,
            "process_bytes": memory.process,
            "process_peak_bytes": process,
        },
        "difference": {
            **{
                f"{name}_bytes": measured[name] - planned[name] if name in measured else None
                for name in planned
                if name not in ("cuda_graphs", "free")
            },
            "process_peak_bytes": None if process is None else process - plan.rank.used_bytes,
        },
        "pool": _pool(plan, stats.pool),
        "admission": {
            "mode": stats.admission_mode or state.settings.admission_mode,
            "auto": None if stats.auto is None else stats.auto.to_dict(),
        },
        "headroom": _headroom(state, stats.pool, room),
        "requests": _requests(state, stats),
        "drain_seconds": _rounded(room.drain_seconds),
    }
    if not counts:
        report |= {"requests": None, "drain_seconds": None}
        report["headroom"]["requests"] = None
    return report


def _pool(plan: Plan, pool: PoolStats) -> dict[str, Any]:
    layout = plan.kv_cache.layout
    blocks = {
        "num": pool.num_blocks,
        "usable": pool.usable,
        "used": pool.used,
        "cached": pool.cached,
        "free": pool.free,
        "promised": pool.reserved,
        "promised_unused": reserved_unused(pool),
    }
    return {
        "block_size_tokens": layout.block_size,
        "bytes_per_block": layout.bytes_per_block,
        "blocks": blocks,
        "bytes": {name: count and count * layout.bytes_per_block for name, count in blocks.items()},
        "evictions": pool.evictions,
    }


def _headroom(state: ServerState, pool: PoolStats, room: CapacityForecast) -> dict[str, Any]:
    cache = state.plan.kv_cache
    size = pool.headroom * cache.layout.bytes_per_block
    return {
        "blocks": pool.headroom,
        "bytes": size,
        "max_length_sequences": size // cache.bytes_per_sequence if cache.bytes_per_sequence else None,
        "requests": room.requests,
        "prompt_tokens": room.prompt_tokens,
        "full_in_seconds": _rounded(room.full_in_seconds),
    }


def _requests(state: ServerState, stats: EngineStats) -> dict[str, Any]:
    """Return the number of requests by state (running, waiting), and the age of each state's oldest in seconds.

    When no request waits in the engine, all unfinished requests count as running, including requests that the
    engine has not reported yet.
    """
    running, waiting = state.accounts.oldest()
    if not stats.waiting:
        running, waiting = max((age for age in (running, waiting) if age is not None), default=None), None
    return {
        "received": state.accounts.received,
        "in_flight": state.accounts.in_flight,
        "running": stats.running,
        "waiting": stats.waiting,
        "longest_running_seconds": _rounded(running if stats.running else None),
        "longest_waiting_seconds": _rounded(waiting),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def reserved_unused(pool: PoolStats) -> int:
    """Return the number of KV blocks that are reserved for admitted requests but not yet allocated to them."""
    return max(0, pool.reserved - pool.used)
