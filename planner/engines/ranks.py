"""Ranks of a deployment: its flags in the terms of planner/parallel.py."""

from __future__ import annotations

from tonnage.planner.architecture import Architecture
from tonnage.planner.plan import Deployment


def rank_architecture(architecture: Architecture, flags: Deployment, stage: int) -> Architecture:
    """What a rank of pipeline ``stage`` holds. Raises DeploymentError when a size cannot be divided."""
    if flags.tensor_parallel_size == flags.pipeline_parallel_size == flags.data_parallel_size == 1:
        return architecture
    # imported here: most plans are for one GPU, and a cold start counts in milliseconds
    from tonnage.planner import parallel

    sizes = parallel.Parallel(
        tensor=flags.tensor_parallel_size,
        pipeline=flags.pipeline_parallel_size,
        data=flags.data_parallel_size,
        expert=flags.enable_expert_parallel,
        pad_vocabulary=flags.engine == "vllm",
    )
    return parallel.rank_architecture(architecture, sizes, stage)
