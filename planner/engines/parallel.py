"""The share of a model on one rank: the layers of its pipeline stage, and its shard of every divided tensor.

The rules are from vLLM 0.32.0:

- Pipeline parallel: distributed/utils.py, get_pp_indices.
- Tensor parallel: model_executor/layers/linear.py. KV heads are replicated if there are fewer heads than ranks.
- Vocabulary: vocab_parallel_embedding.py pads it to a multiple of 64 rows.
- Recurrent states: mamba/mamba_utils.py. MLA latents are the same on every rank.
- Experts: fused_moe/config.py, FusedMoEParallelConfig.make. Tensor and data parallel ranks divide the experts
  together. With expert parallelism each rank holds whole experts, otherwise a slice of every expert's width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tonnage.planner.engines.tensors import VOCABULARY_PADDING
from tonnage.planner.errors import DeploymentError, EngineRefusal
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.tensor import TOWER_ROLES, TensorSpec
from tonnage.planner.units import ceil_div

_LAST = ("norm", "head")  # roles of the tensors after the last layer
_DIVIDED = ("full", "sliding", "chunked", "cross")  # kinds of layers whose KV heads the ranks divide
_TP = "--tensor-parallel-size"
_MOST_RANKS = 64  # Error messages suggest rank counts up to this one.


@dataclass(frozen=True, slots=True)
class Parallel:
    """The numbers of ranks by kind of parallelism, and the rules for dividing a model's tensors among them.

    Attributes:
        tensor: Number of tensor-parallel ranks.
        pipeline: Number of pipeline stages.
        data: Number of data-parallel replicas.
        expert: Whether a rank holds whole experts instead of slices of all experts.
        pad_vocabulary: Whether the vocabulary is padded before it is divided.
        whole_towers: Whether each tensor-parallel rank holds the vision and audio towers in full.
        towers_everywhere: Whether each pipeline stage holds the towers, as in vLLM's model classes.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    pad_vocabulary: bool = True
    whole_towers: bool = False
    towers_everywhere: bool = False

    @property
    def trivial(self) -> bool:
        """Return whether the model is on a single rank, so that nothing is divided."""
        return self.tensor == self.pipeline == self.data == 1


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage.

    If ``layers`` is not divisible by ``stages``, the remaining layers go one each to the second-last stage and
    the stages before it.

    Raises:
        DeploymentError: there are more stages than layers.
    """
    if stages > layers:
        raise DeploymentError(
            f"{stages} stages for {layers} layers would leave stages without a layer",
            field="--pipeline-parallel-size", hint=f"at most {layers}",
        )  # fmt: skip
    counts = [layers // stages] * stages
    for i in range(2, layers % stages + 2):
        counts[-i] += 1
    return tuple(counts)


def check(architecture: Architecture, ranks: int) -> None:
    """Raise DeploymentError if ``ranks`` tensor-parallel ranks cannot divide the model's heads."""
    if (refusal := _refusal(architecture, ranks)) is not None:
        refusal.hint = "for example " + ", ".join(map(str, accepted_ranks(architecture)))
        raise refusal


def _refusal(architecture: Architecture, ranks: int) -> DeploymentError | None:
    """Return why ``ranks`` tensor-parallel ranks cannot divide the model's heads, or None if they can."""
    if ranks == 1:
        return None
    layers = architecture.cache_layers
    headless = bool(layers) and all(layer.kind == "state" for layer in layers)
    if architecture.heads % ranks and not headless:
        return EngineRefusal(
            f"{ranks} does not divide {architecture.heads} attention heads", field=_TP, cause="heads",
            facts={"heads": architecture.heads, "ranks": ranks},
        )  # fmt: skip
    for kv_heads in sorted({layer.kv_heads for layer in layers if layer.kind in _DIVIDED}):
        if kv_heads % ranks and ranks % kv_heads:
            return EngineRefusal(
                f"{ranks} neither divides nor is divided by {kv_heads} KV heads", field=_TP, cause="kv_heads",
                facts={"heads": kv_heads, "ranks": ranks},
            )  # fmt: skip
    for layer in layers:
        for state in layer.states:
            if state.shard_dim is not None and state.name in ("ssm", "recurrent", "linear"):
                size = state.shape[state.shard_dim]
                if size % ranks:
                    return DeploymentError(f"{ranks} does not divide {size} heads of the state", field=_TP)
    return None


def accepted_ranks(architecture: Architecture, most: int = _MOST_RANKS) -> list[int]:
    """Return the numbers of tensor-parallel ranks, up to ``most``, that divide the heads and every tensor."""
    found = []
    for ranks in range(1, most + 1):
        if _refusal(architecture, ranks) is not None:
            continue
        parallel = Parallel(tensor=ranks)
        try:
            for tensor in architecture.tensors:
                _shard(tensor, architecture, parallel)
        except DeploymentError:
            continue
        found.append(ranks)
    return found


def rank_architecture(architecture: Architecture, parallel: Parallel, stage: int) -> Architecture:
    """Return the part of the model that one rank of pipeline ``stage`` holds.

    Tensors have the shapes of the rank's shards. Cache layers keep all their KV heads, because the KV layout
    divides them.

    Raises:
        DeploymentError: a dimension is not divisible by the number of ranks.
    """
    if parallel.trivial:
        return architecture
    check(architecture, parallel.tensor)
    counts = stage_layers(architecture.layers, parallel.pipeline)
    first = sum(counts[:stage])
    mine = range(first, first + counts[stage])
    tensors = tuple(
        _shard(_untied(tensor, stage), architecture, parallel)
        for tensor in architecture.tensors
        if _on_stage(tensor, mine, stage, parallel)
    )
    cache = tuple(layer for layer in architecture.cache_layers if layer.layer in mine)
    return replace(architecture, tensors=tensors, cache_layers=cache)


def _on_stage(tensor: TensorSpec, mine: range, stage: int, parallel: Parallel) -> bool:
    if tensor.layer is not None:
        return tensor.layer in mine
    if tensor.role in _LAST:
        return stage == parallel.pipeline - 1
    everywhere = parallel.towers_everywhere and tensor.role in TOWER_ROLES
    return stage == 0 or tensor.role == "buffer" or everywhere


def _untied(tensor: TensorSpec, stage: int) -> TensorSpec:
    """Return ``tensor``; a tied output head becomes a separate one if the embedding is on another stage."""
    return replace(tensor, tied_to=None) if tensor.role == "head" and stage > 0 else tensor


def _shard(tensor: TensorSpec, architecture: Architecture, parallel: Parallel) -> TensorSpec:
    if tensor.role == "expert":
        return _shard_experts(tensor, parallel)
    dim, ranks = tensor.shard_dim, parallel.tensor
    if dim is None or ranks == 1 or (parallel.whole_towers and tensor.role in TOWER_ROLES):
        return tensor
    size = tensor.shape[dim]
    if tensor.role in ("embedding", "head") and size == architecture.vocab_size and parallel.pad_vocabulary:
        size = ceil_div(size, VOCABULARY_PADDING) * VOCABULARY_PADDING
        if size % ranks:
            raise _undivided(
                f"{ranks} does not divide the vocabulary, which is padded to {size} tokens", size, ranks
            )
    # Ranks divide the weight's rows for K and V only between heads, and replicate heads if there are more ranks
    # than heads. Vision and audio towers have as many KV heads as query heads, so their rows for K and V are
    # divided like those for Q.
    if tensor.kv_rows and tensor.kv_units and tensor.role not in TOWER_ROLES:
        per_head = tensor.kv_rows // tensor.kv_units
        size = ceil_div(size - tensor.kv_rows, ranks) + per_head * ceil_div(tensor.kv_units, ranks)
    elif tensor.role in ("mlp", "attention") and size % ranks:
        what = f"{ranks} does not divide {tensor.name} of shape {list(tensor.shape)}"
        merged = tensor.role == "mlp" and architecture.gated_mlp
        raise _undivided(what, size // tensor.matrices, ranks, "merged" if merged else "divided")
    else:
        # If the number of ranks does not divide the dimension's size, the size on each rank is rounded up.
        # Tensors of vision and audio towers are not divided at all in this case.
        size = ceil_div(size, ranks)
        if tensor.role in TOWER_ROLES and tensor.shape[dim] % ranks:
            return tensor
    return replace(tensor, shape=(*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]))


def _undivided(message: str, size: int, ranks: int, cause: str = "divided") -> EngineRefusal:
    return EngineRefusal(message, field=_TP, cause=cause, facts={"size": size, "ranks": ranks})


def _shard_experts(tensor: TensorSpec, parallel: Parallel) -> TensorSpec:
    ranks = parallel.tensor * parallel.data
    dim = 0 if parallel.expert else tensor.shard_dim
    if dim is None or ranks == 1 or (parallel.expert and len(tensor.shape) < 2):
        return tensor
    size = tensor.shape[dim]
    if not parallel.expert and size % (ranks * tensor.matrices if tensor.matrices > 1 and dim else ranks):
        raise EngineRefusal(
            f"{ranks} does not divide {tensor.name} of shape {list(tensor.shape)}", field=_TP,
            hint="--enable-expert-parallel divides whole experts", cause="divided",
            facts={"size": size // tensor.matrices if dim else size, "ranks": ranks},
        )  # fmt: skip
    return replace(tensor, shape=(*tensor.shape[:dim], ceil_div(size, ranks), *tensor.shape[dim + 1 :]))
