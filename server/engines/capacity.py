"""The capacity of an engine: the limits that its plan sets, and the capacity measured after the load."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tonnage.cache.admission import Limits
from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError
from tonnage.planner.planning.build import plan_source
from tonnage.planner.plans import Plan
from tonnage.planner.source.resolve import ModelSource


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of an engine as measured after the model was loaded, for comparison with the memory plan."""

    num_blocks: int
    block_size: int
    max_model_len: int
    plan: Plan  # revision 1 of the memory plan, with measured instead of forecast bytes


def limits_of(plan: Plan) -> Limits:
    """Return the admission limits of a memory plan: the size of its KV block pool and its length limits.

    Raises:
        DeploymentError: the plan has no value for one of these limits.
    """
    deployment = plan.deployment
    values = {
        "max_model_len": deployment.max_model_len,
        "max_num_seqs": deployment.max_num_seqs,
        "max_num_batched_tokens": deployment.max_num_batched_tokens,
    }
    for name, value in values.items():
        if value is None:
            raise DeploymentError(
                "the plan has no value for this limit", field=name, hint="make the plan with make_plan"
            )
    return Limits(
        layout=plan.kv_cache.layout,
        usable_blocks=plan.kv_cache.usable_blocks,
        max_model_len=deployment.max_model_len or 0,
        max_num_seqs=deployment.max_num_seqs or 0,
        max_num_batched_tokens=deployment.max_num_batched_tokens or 0,
        cached_states=bool(deployment.enable_prefix_caching),
        prefix_caching=bool(deployment.enable_prefix_caching),
    )


def held_to(plan: Plan, source: ModelSource, deployment: Deployment) -> Plan:
    """Return the memory plan of ``source`` with a KV pool size that still fits a GPU after the model's load.

    The plan forecasts an interval of pool sizes that may fit. The returned plan has the lower end of the
    interval as its pool size, so the engine need not measure free memory before it allocates the pool. A plan
    is returned unchanged if a pool of that size would not hold one sequence, if the device is a CPU, or if a
    flag sets the pool size.
    """
    if plan.deployment.device == "cpu" or "kv_pool_bytes" not in plan.intervals:
        return plan
    low = max(1, int(plan.intervals["kv_pool_bytes"][0]))
    smaller = plan_source(source, replace(deployment, kv_cache_memory_bytes=low))
    return smaller if smaller.fits else plan
