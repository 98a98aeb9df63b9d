"""The part of each tensor that one rank holds.

Tensor and pipeline parallelism divide the model. ZeRO and FSDP then shard tensors that several ranks would
otherwise replicate.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from tonnage.planner.errors import DeploymentError
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.training.methods import TensorGroup
from tonnage.planner.training.setup import TrainingSetup, hybrid_group
from tonnage.planner.units import ceil_div

# DeepSpeed 0.19, runtime/zero/config.py stage3_param_persistence_threshold: smaller parameters are not sharded.
PERSISTENT_ELEMENTS = 100_000

_FIRST_STAGE = ("vision", "audio", "projector", "encoder")


class Shards(NamedTuple):
    """The numbers of ranks among which weights, gradients and optimizer states are sharded.

    1 means that every rank holds them in full.
    """

    weights: int
    gradients: int
    optimizer: int


def shards(setup: TrainingSetup) -> Shards:
    """Return the numbers of ranks among which the setup shards weights, gradients and optimizer states."""
    ranks = setup.shard_ranks
    if setup.strategy == "fsdp-hybrid":
        group = hybrid_group(setup)
        return Shards(group, group, group)
    stage = setup.zero_stage
    return Shards(ranks if stage == 3 else 1, ranks if stage >= 2 else 1, ranks if stage >= 1 else 1)


def check_parallel(architecture: Architecture, setup: TrainingSetup) -> None:
    """Check that tensor, pipeline and expert parallel sizes divide the model's dimensions.

    Raises:
        DeploymentError: a size does not divide a dimension; the error names both.
    """
    tp, pp = setup.tensor_parallel, setup.pipeline_parallel
    if architecture.heads % tp:
        raise DeploymentError(
            f"{tp} does not divide the {architecture.heads} attention heads", field="--tensor-parallel",
            hint="divisors: " + ", ".join(str(d) for d in range(1, 17) if architecture.heads % d == 0),
        )  # fmt: skip
    if architecture.kv_heads % tp and tp % architecture.kv_heads:
        raise DeploymentError(
            f"{tp} neither divides nor is a multiple of the {architecture.kv_heads} KV heads",
            field="--tensor-parallel",
            hint="choose a divisor or a multiple",
        )
    if architecture.experts == 0 and architecture.intermediate_size % tp:
        raise DeploymentError(
            f"{tp} does not divide the MLP width {architecture.intermediate_size}", field="--tensor-parallel",
            hint="choose a divisor",
        )  # fmt: skip
    if pp > architecture.layers:
        raise DeploymentError(
            f"{pp} stages for {architecture.layers} layers leave some stages empty", field="--pipeline-parallel"
        )
    if setup.expert_parallel > 1 and not any(t.role == "expert" for t in architecture.tensors):
        raise DeploymentError(f"{architecture.class_name} has no experts", field="--expert-parallel")


def check_segments(architecture: Architecture, setup: TrainingSetup) -> None:
    """Raise DeploymentError for more activation checkpointing segments than the model has layers."""
    if (setup.checkpoint_segments or 0) > architecture.layers:
        raise DeploymentError(
            f"{setup.checkpoint_segments} is more than the model's {architecture.layers} layers",
            field="--checkpoint-segments",
            hint="leave the flag out for one segment per layer",
        )


def stage_of(architecture: Architecture, setup: TrainingSetup, stage: int) -> range:
    """Return the layer indices of one pipeline stage; layers left over go to the first stages."""
    layers, stages = architecture.layers, setup.pipeline_parallel
    base, more = divmod(layers, stages)
    start = stage * base + min(stage, more)
    return range(start, start + base + (1 if stage < more else 0))


def in_stage(held: TensorGroup, layers: range, stage: int, stages: int, tied: bool) -> int:
    """Return the number of tensors of the group `held` (tensors of equal shape) on a pipeline stage.

    The embedding is on the first stage, the final norm and the head are on the last. A tied embedding is on
    both.
    """
    if stages == 1:
        return held.count
    if held.role in _FIRST_STAGE:
        return held.count if stage == 0 else 0
    if held.layers[0] is not None:
        return sum(1 for layer in held.layers if layer in layers)
    if held.role == "embedding":
        return held.count if stage == 0 or (tied and stage == stages - 1) else 0
    return held.count if stage == stages - 1 else 0


def split(held: TensorGroup, setup: TrainingSetup) -> tuple[int, ...]:
    """Return the shape of a tensor's part on one tensor-parallel rank.

    The dimension `shard_dim` is divided and rounded up. If there are fewer KV heads than ranks, several ranks
    hold the same rows of K and V (Megatron-LM, arXiv 1909.08053 section 3).
    """
    tp, dim = setup.tensor_parallel, held.shard_dim
    if tp == 1 or dim is None:
        return held.shape
    rows = held.shape[dim]
    if held.kv_rows and held.kv_units:
        kept = held.kv_rows // held.kv_units * ceil_div(held.kv_units, tp)
        rows = ceil_div(rows - held.kv_rows, tp) + kept
    else:
        rows = ceil_div(rows, tp)
    return (*held.shape[:dim], rows, *held.shape[dim + 1 :])


def shard_elements(shape: tuple[int, ...], ranks: int, by_row: bool) -> int:
    """Return the number of elements in the largest shard of a tensor that is sharded among `ranks` ranks.

    FSDP2 shards whole rows (torch.chunk along dim 0). The flat buffers of DeepSpeed and FSDP1 are cut into
    equal padded parts.
    """
    if ranks == 1:
        return prod(shape)
    if by_row and shape:
        return ceil_div(shape[0], ranks) * prod(shape[1:])
    return ceil_div(prod(shape), ranks)
