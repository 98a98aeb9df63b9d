"""The flags' parallel sizes -> the part of a model one rank holds (planner/parallel.py has the rules)."""

from __future__ import annotations

from tonnage.planner import parallel
from tonnage.planner.architecture import Architecture
from tonnage.planner.parallel import Parallel
from tonnage.planner.plan import Deployment


def parallel_of(flags: Deployment) -> Parallel:
    return Parallel(
        flags.tensor_parallel_size,
        flags.pipeline_parallel_size,
        flags.data_parallel_size,
        flags.enable_expert_parallel,
        pad_vocabulary=flags.engine == "vllm",
    )


def rank_architecture(architecture: Architecture, flags: Deployment, stage: int) -> Architecture:
    """What a rank of pipeline ``stage`` holds. Raises DeploymentError when heads cannot be divided."""
    return parallel.rank_architecture(architecture, parallel_of(flags), stage)
