"""Does the plan fit, and if not, why and what would."""

from __future__ import annotations

from tonnage.planner import kv
from tonnage.planner.layout import KVLayout
from tonnage.planner.plan import Deployment, RankPlan
from tonnage.planner.units import gib


def judge(
    chosen: Deployment,
    rank: RankPlan,
    layout: KVLayout,
    capacity: kv.Capacity,
    in_flight: int,
    *,
    explicit: bool,
) -> tuple[str, ...]:
    """Reasons why it does not fit; empty when it does.

    With --kv-cache-memory-bytes the whole device counts (as in vLLM), else device memory x
    gpu_memory_utilization. The pool must hold one sequence of max_model_len tokens.
    """
    given = chosen.kv_cache_memory_bytes is not None
    limit = rank.total_bytes if given else int(rank.total_bytes * chosen.gpu_memory_utilization)
    name = gib(rank.total_bytes) + ("" if given else f" x {chosen.gpu_memory_utilization:g} = {gib(limit)}")
    without_pool = rank.used_bytes - rank.kv_pool_bytes
    if rank.weights_bytes > limit:
        return (f"the weights alone take {gib(rank.weights_bytes)} ({rank.weights_bytes:,} bytes) of {name}",)
    if without_pool > limit:
        return (
            f"weights {gib(rank.weights_bytes)}, activations {gib(rank.activation_bytes)}, framework "
            f"{gib(rank.framework_bytes)} and graphs {gib(rank.cuda_graph_bytes)} take "
            f"{gib(without_pool)} of {name}: nothing is left for the KV cache",
        )
    reasons = []
    if rank.used_bytes > limit:
        reasons.append(
            f"{gib(rank.used_bytes)} are needed, {gib(rank.used_bytes - limit)} more than {name}; "
            f"the pool could be {gib(max(0, limit - without_pool))} (--kv-cache-memory-bytes)"
        )
    assert chosen.max_model_len
    if capacity.blocks_per_sequence > capacity.usable_blocks:
        largest = kv.largest_fitting(layout, capacity.usable_blocks, chosen.max_model_len, in_flight)
        flag = "--max-model-len" if explicit else "the model's max_model_len"
        advice = f"the largest --max-model-len that fits is {largest}" if largest else "no length fits"
        reasons.append(
            f"one sequence of {chosen.max_model_len:,} tokens ({flag}) needs {capacity.blocks_per_sequence:,} "
            f"blocks of {layout.bytes_per_block:,} bytes, the pool has {capacity.usable_blocks:,} usable: {advice}"
        )
    return tuple(reasons)
