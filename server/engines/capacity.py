"""What an engine may use, by its plan, and what it really has after the load."""

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
    """What the engine really has after load, to hold against the Plan."""

    num_blocks: int
    block_size: int
    max_model_len: int
    plan: Plan  # revision 1


def limits_of(plan: Plan) -> Limits:
    """What admission may reserve from: the Plan's pool and lengths. Raises DeploymentError on an open value."""
    deployment = plan.deployment
    values = {
        "max_model_len": deployment.max_model_len,
        "max_num_seqs": deployment.max_num_seqs,
        "max_num_batched_tokens": deployment.max_num_batched_tokens,
    }
    for name, value in values.items():
        if value is None:
            raise DeploymentError("the plan leaves it open", field=name, hint="build it with make_plan")
    return Limits(
        layout=plan.kv_cache.layout,
        usable_blocks=plan.kv_cache.usable_blocks,
        cached_states=bool(deployment.enable_prefix_caching),
        **{name: value or 0 for name, value in values.items()},
    )


def held_to(plan: Plan, source: ModelSource, deployment: Deployment) -> Plan:
    """``plan`` of ``source`` under ``deployment`` with a pool that an engine on a GPU can be held to: requests
    reserve blocks of it, and the engine is told its size instead of measuring what is left. That is the lower
    end of its interval, where it holds one sequence; a pool that a flag decides stays."""
    if plan.deployment.device == "cpu" or "kv_pool_bytes" not in plan.intervals:
        return plan
    low = max(1, int(plan.intervals["kv_pool_bytes"][0]))
    smaller = plan_source(source, replace(deployment, kv_cache_memory_bytes=low))
    return smaller if smaller.fits else plan
