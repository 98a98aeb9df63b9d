"""Ranks of a deployment: its flags in the terms of parallel.py."""

from __future__ import annotations

from tonnage.planner.engines.registry import engine_of
from tonnage.planner.errors import DeploymentError
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.plans import Deployment


def rank_architecture(architecture: Architecture, flags: Deployment, stage: int) -> Architecture:
    """What a rank of pipeline ``stage`` holds. Raises DeploymentError when a size cannot be divided."""
    engine = engine_of(flags.engine)
    if (
        architecture.via == "meta"
        and not engine.as_transformers
        and any(layer.value_head_size is not None for layer in architecture.cache_layers)
    ):
        raise DeploymentError(
            f"{architecture.model_type} has no adapter, and keys and values of unlike sizes may be a latent: "
            f"how {flags.engine} stores them is not known",
            field="--engine", hint="--engine hf is planned",
        )  # fmt: skip
    if flags.tensor_parallel_size == flags.pipeline_parallel_size == flags.data_parallel_size == 1:
        return architecture
    if architecture.via == "meta":
        raise DeploymentError(
            f"{architecture.model_type} has no adapter: how its layers are divided is not known",
            field="--tensor-parallel-size", hint="plan it for one GPU",
        )  # fmt: skip
    # imported here: most plans are for one GPU, and a cold start counts in milliseconds
    from tonnage.planner.engines import parallel

    sizes = parallel.Parallel(
        tensor=flags.tensor_parallel_size,
        pipeline=flags.pipeline_parallel_size,
        data=flags.data_parallel_size,
        expert=flags.enable_expert_parallel,
        pad_vocabulary=engine.pads_vocabulary,
    )
    return parallel.rank_architecture(architecture, sizes, stage)
