"""The part of a model one rank holds: layers of its pipeline stage, its share of every sharded tensor.

vLLM's rules (distributed/utils.py get_pp_indices; model_executor/layers/linear.py, vocab_parallel_embedding.py,
fused_moe): layers are divided evenly, what remains goes to the stages before the last; KV heads are replicated
when there are fewer than ranks; experts are divided whole under expert parallelism, else along their width.
"""

from __future__ import annotations

from dataclasses import replace

from tonnage.planner.architecture import Architecture, TensorSpec
from tonnage.planner.engines.pool import ceil_div
from tonnage.planner.errors import DeploymentError
from tonnage.planner.plan import Deployment

_LAST = ("norm", "head")  # what follows the last layer


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each pipeline stage: the remainder goes one each to the stages from the second-last back."""
    if stages > layers:
        raise DeploymentError(f"{stages} stages for {layers} layers", field="--pipeline-parallel-size")
    counts = [layers // stages] * stages
    for i in range(2, layers % stages + 2):
        counts[-i] += 1
    return tuple(counts)


def rank_architecture(architecture: Architecture, flags: Deployment, stage: int) -> Architecture:
    """What a rank of pipeline ``stage`` holds. Raises DeploymentError when heads cannot be divided."""
    tp, pp = flags.tensor_parallel_size, flags.pipeline_parallel_size
    if tp == pp == 1 and not (flags.enable_expert_parallel and flags.data_parallel_size > 1):
        return architecture
    if architecture.heads % tp:
        raise DeploymentError(
            f"{tp} does not divide {architecture.heads} attention heads",
            field="--tensor-parallel-size",
            hint=f"a divisor of {architecture.heads}",
        )
    counts = stage_layers(architecture.layers, pp)
    first = sum(counts[:stage])
    mine = range(first, first + counts[stage])
    tensors = tuple(
        _shard(tensor, flags) for tensor in architecture.tensors if _on_stage(tensor, mine, stage, pp)
    )
    cache = tuple(layer for layer in architecture.cache_layers if layer.layer in mine)
    return replace(architecture, tensors=tensors, cache_layers=cache)


def _on_stage(tensor: TensorSpec, mine: range, stage: int, stages: int) -> bool:
    if tensor.layer is not None and tensor.role not in ("vision", "audio", "projector", "encoder"):
        return tensor.layer in mine
    if tensor.role in _LAST:
        return stage == stages - 1
    return stage == 0 or tensor.role == "buffer"


def _shard(tensor: TensorSpec, flags: Deployment) -> TensorSpec:
    tp = flags.tensor_parallel_size
    if tensor.role == "expert" and flags.enable_expert_parallel and tensor.shape:
        ranks = tp * flags.data_parallel_size
        return replace(tensor, shape=(ceil_div(tensor.shape[0], ranks), *tensor.shape[1:]))
    dim = tensor.shard_dim
    if dim is None or tp == 1:
        return tensor
    rows = tensor.shape[dim]
    if tensor.kv_rows and tensor.kv_units:
        kept = tensor.kv_rows // tensor.kv_units * max(1, ceil_div(tensor.kv_units, tp))
        rows = ceil_div(rows - tensor.kv_rows, tp) + kept
    else:
        rows = ceil_div(rows, tp)
    return replace(tensor, shape=(*tensor.shape[:dim], rows, *tensor.shape[dim + 1 :]))
