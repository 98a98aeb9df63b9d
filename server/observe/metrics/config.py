"""Metrics of the configuration: the plan, and settings as numbers for PromQL."""

from __future__ import annotations

from collections.abc import Sequence

from tonnage.planner.plans import Plan
from tonnage.server.engines.stats import EngineStats
from tonnage.server.observe.metrics.families import Page

# Labels of the metric tonnage_plan_info; `PlanSummary` has fields of the same names
PLAN_LABELS = ("plan_id", "revision", "engine", "architecture", "quantization")


def plan_families(page: Page, plans: Sequence[Plan], max_num_queued_reqs: int | None) -> None:
    """Write the metrics of the memory plan and of the server's settings.

    Args:
        page: the metrics page to write to.
        plans: revision 0 of the plan, made before the load, and revision 1 once the engine has started.
        max_num_queued_reqs: the limit of unfinished sequences, None without a limit.
    """
    page.info(
        "tonnage_plan_info",
        "The plan the pool is sized by; always 1. Revision 0 was forecast before the load, revision 1 is what "
        "the engine has after it.",
        PLAN_LABELS,
        [_identity(item) for item in plans],
    )
    for name, (text, value) in _numbers(plans[0], max_num_queued_reqs).items():
        page.gauge(f"tonnage_config_{name}", text, value)


def engine_families(page: Page, stats: EngineStats, mode: str, *, ready: bool) -> None:
    """Write the metrics of the admission mode and of the engine's state (loading, ready ...)."""
    page.info(
        "tonnage_admission_info",
        "How requests are admitted; always 1. guaranteed: what was admitted is never preempted.",
        ("mode",),
        [(mode,)],
    )
    page.gauge(
        "tonnage_engine_ready",
        "1 when the engine can serve, 0 while it loads or when it is dead.",
        int(ready),
    )
    page.counter("tonnage_engine_restarts", "Times the engine was started again.", stats.restarts)
    page.counter(
        "tonnage_invariant_violations",
        "Violated invariants of the block accounts (blocks lost or counted twice); more than 0 is a bug.",
        stats.invariant_violations,
    )


def _identity(plan: Plan) -> tuple[str, ...]:
    return (
        plan.plan_id,
        str(plan.revision),
        plan.deployment.engine,
        plan.model.architecture,
        plan.deployment.quantization or "none",
    )


def _numbers(plan: Plan, max_num_queued_reqs: int | None) -> dict[str, tuple[str, float | None]]:
    deployment, cache = plan.deployment, plan.kv_cache
    return {
        "device_memory_bytes": ("Memory of the device.", deployment.device_memory),
        "gpu_memory_utilization_ratio": (
            "Share of the device's memory that the plan may use.",
            deployment.gpu_memory_utilization,
        ),
        "kv_cache_memory_bytes": ("Bytes of the KV pool.", plan.rank.kv_pool_bytes),
        "num_blocks": ("KV blocks in the pool, the null block included.", cache.num_blocks),
        "block_size_tokens": ("Tokens in a KV block.", cache.layout.block_size),
        "block_bytes": ("Bytes of a KV block.", cache.layout.bytes_per_block),
        "max_model_len_tokens": ("Longest prompt plus completion.", deployment.max_model_len),
        "max_num_seqs": ("Sequences in one batch.", deployment.max_num_seqs),
        "max_num_batched_tokens": ("Token budget of one step.", deployment.max_num_batched_tokens),
        "max_num_queued_reqs": (
            "Upper bound of unfinished sequences, waiting and running; further requests are rejected.",
            max_num_queued_reqs,
        ),
    }
