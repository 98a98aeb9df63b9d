"""Verdict on a plan: the reasons why it does not fit, each with its numbers and the nearest value that fits."""

from __future__ import annotations

from tonnage.planner.engines.pool import PoolCapacity, PoolSpec
from tonnage.planner.plans import RankPlan, Resolved
from tonnage.planner.units import gib


def judge(
    chosen: Resolved, rank: RankPlan, pool: PoolSpec, capacity: PoolCapacity, *, asked: bool
) -> tuple[str, ...]:
    """Return the reasons why the plan does not fit, empty when it fits.

    A plan fits when all memory terms are within the memory limit and the pool holds one sequence of
    max_model_len tokens. `asked` is whether a flag set max_model_len; otherwise the value is the model's own
    maximum.
    """
    limit = chosen.limit
    name = gib(rank.total_bytes)
    if limit != rank.total_bytes:
        name += f" x {chosen.flags.gpu_memory_utilization:g} = {gib(limit)}"
    without_pool = rank.used_bytes - rank.kv_pool_bytes
    if rank.weights_bytes > limit:
        return (f"the weights alone take {gib(rank.weights_bytes)} ({rank.weights_bytes:,} bytes) of {name}",)
    if without_pool > limit:
        graphs = f", CUDA graphs {gib(rank.cuda_graph_bytes)}" if rank.cuda_graph_bytes else ""
        return (
            f"weights {gib(rank.weights_bytes)}, activations {gib(rank.activation_bytes)}{graphs} and "
            f"framework {gib(rank.framework_bytes)} take {gib(without_pool)} of {name}: "
            "nothing is left for the KV cache",
        )
    reasons = []
    if rank.used_bytes > limit:
        reasons.append(
            f"{gib(rank.used_bytes)} are needed, {gib(rank.used_bytes - limit)} more than {name}; "
            f"the largest --kv-cache-memory-bytes that fits is {limit - without_pool}"
        )
    if capacity.blocks_per_sequence > capacity.usable_blocks:
        largest = pool.longest(capacity.usable_blocks, chosen.max_model_len)
        whose = "" if asked else ", the model's own length,"
        advice = f"the largest --max-model-len that fits is {largest}" if largest else "no length fits"
        reasons.append(
            f"one sequence of {chosen.max_model_len:,} tokens{whose} needs "
            f"{capacity.blocks_per_sequence:,} blocks of {pool.layout.bytes_per_block:,} bytes, the pool has "
            f"{capacity.usable_blocks:,} usable: {advice}"
        )
    return tuple(reasons)
