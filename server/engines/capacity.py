"""What an engine may use, by its plan, and what it really has after the load."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.cache.admission import Limits
from tonnage.planner.errors import DeploymentError
from tonnage.planner.plans import Plan


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
        **{name: value or 0 for name, value in values.items()},
    )
