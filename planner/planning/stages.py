"""Pipeline stages of a plan: a rank's memory without the KV pool, and the bytes of a KV block, per stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines import parallel
from tonnage.planner.engines.base import Engine
from tonnage.planner.engines.pool import PoolSpec
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.engines.runtime.estimate import Estimate, Runtime
from tonnage.planner.errors import DeploymentError, UnsupportedArchitecture
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.tier import INDEX_GROWTH
from tonnage.planner.planning.calibration import calibrated
from tonnage.planner.planning.weights import HeldWeights
from tonnage.planner.plans import RankPlan, Resolved, Term

Part = tuple[Architecture, HeldWeights]
"""(the part of the model that one rank holds, the weights of that part)"""


@dataclass(frozen=True, slots=True)
class Added:
    """Bytes of device memory that LoRA slots, a draft model and a KV tier add to a rank.

    Attributes:
        lora: bytes of LoRA slots, on every rank.
        draft: bytes of the draft's weights, on ranks of the last pipeline stage.
        draft_high: upper bound of the draft's weights in bytes.
        tier: bytes of a KV tier in the device's own memory. Only a CPU has one: its device memory is the host
            memory.
    """

    lora: int
    draft: int
    draft_high: int
    tier: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """The memory of one rank of a pipeline stage; its KV pool is empty until `with_blocks` is called."""

    rank: RankPlan
    weights: HeldWeights
    runtime: Runtime
    block_bytes: int
    draft_high: int

    def with_blocks(self, num_blocks: int, apart: int) -> Stage:
        """Return the stage with a KV pool of `num_blocks` blocks and `apart` bytes of recurrent states.

        All stages get the block count of the stage that has memory for the fewest blocks (vLLM's
        get_kv_cache_configs).
        """
        return replace(self, rank=replace(self.rank, kv_pool_bytes=num_blocks * self.block_bytes + apart))

    def runtime_terms(self) -> list[Term]:
        """Return the estimates of framework, activation and CUDA graph bytes as memory terms of the plan."""
        found = self._estimates()
        # CUDA graphs that the engine does not count in its memory budget are reported, but not as used bytes.
        if self.runtime.beside is not None:
            found["cuda_graphs_beside_bytes"] = self.runtime.beside
        return [Term(name, e.value, e.formula, e.source) for name, e in found.items()]

    def intervals(self) -> dict[str, tuple[int, int]]:
        """Return name -> (low, high) bytes of each estimated memory term, and of the sum `used_bytes`."""
        bounds = {name: (e.low, e.high) for name, e in self._estimates().items()}
        if self.weights_bounds[1] > self.rank.weights_bytes:
            bounds["weights_bytes"] = self.weights_bounds
        if self.draft_high > self.rank.draft_bytes:
            bounds["draft_bytes"] = (self.rank.draft_bytes, self.draft_high)
        bounds["used_bytes"] = self.used_bounds
        return bounds

    @property
    def weights_bounds(self) -> tuple[int, int]:
        """Return the lower and the upper bound of the model's weights on one rank, in bytes."""
        held, loaded = self.rank.weights_bytes, self.weights.loaded
        kernels = max(0, self.weights.padding_high - self.weights.padding)
        return held, held + loaded.high - loaded.total + kernels

    @property
    def loaded_bounds(self) -> tuple[int, int]:
        """Return the lower and the upper bound, in bytes, of the model's and the draft's weights together."""
        low, high = self.weights_bounds
        return low + self.rank.draft_bytes, high + max(self.rank.draft_bytes, self.draft_high)

    @property
    def used_bounds(self) -> tuple[int, int]:
        """Return the lower and the upper bound of a rank's used bytes, with the KV pool at its planned size."""
        low, high = self.runtime.bounds
        exact = self.rank.used_bytes - self.runtime.total
        more = self.weights_bounds[1] - self.weights_bounds[0] + max(0, self.draft_high - self.rank.draft_bytes)
        return exact + low, exact + high + more

    def _estimates(self) -> dict[str, Estimate]:
        """Return term name -> estimate, for the estimated memory terms that are not zero."""
        runtime = self.runtime
        found = {
            "framework_bytes": runtime.framework,
            "activation_bytes": runtime.activation,
            "cuda_graph_bytes": runtime.graphs,
        }
        return {name: estimate for name, estimate in found.items() if estimate.high}


def rank_architecture(architecture: Architecture, flags: Deployment, stage: int) -> Architecture:
    """Return the part of the model that one rank of pipeline stage `stage` holds.

    Raises:
        DeploymentError: a dimension of the model is not divisible by the parallel sizes, or it is not known how
            the engine divides the model or stores its KV cache.
    """
    engine = engine_of(flags.engine)
    if (
        architecture.via == "meta"
        and not engine.as_transformers
        and any(layer.value_head_size is not None for layer in architecture.cache_layers)
    ):
        raise DeploymentError(
            f"it is not known how {flags.engine} stores the KV cache of {architecture.model_type}: its keys "
            "and values have different sizes, so it may store a latent",
            field="--engine", hint="use --engine hf, which the planner supports",
        )  # fmt: skip
    if flags.tensor_parallel_size == flags.pipeline_parallel_size == flags.data_parallel_size == 1:
        return architecture
    if architecture.via == "meta":
        raise DeploymentError(
            f"it is not known how the layers of {architecture.model_type} are divided between ranks",
            field="--tensor-parallel-size", hint="plan it for one GPU",
        )  # fmt: skip
    sizes = parallel.Parallel(
        tensor=flags.tensor_parallel_size,
        pipeline=flags.pipeline_parallel_size,
        data=flags.data_parallel_size,
        expert=flags.enable_expert_parallel,
        pad_vocabulary=engine.pads_vocabulary,
        whole_towers=engine.whole_towers(architecture, flags),
        towers_everywhere=engine.towers_everywhere,
    )
    return parallel.rank_architecture(architecture, sizes, stage)


def _with_index(runtime: Runtime, index: int) -> Runtime:
    """Return ``runtime`` with the memory of a disk tier's index added to the framework bytes.

    The index takes 0 bytes while the tier is empty and about ``index`` bytes when it is full. The upper bound
    is ``INDEX_GROWTH`` times ``index``, because the index's dicts grow by doubling.
    """
    if not index:
        return runtime
    held = runtime.framework
    framework = replace(
        held, value=held.value + index, high=held.high + INDEX_GROWTH * index,
        formula=f"{held.formula}; index of a full disk tier {index:,}",
    )  # fmt: skip
    return replace(runtime, framework=framework)


def build_stages(
    engine: Engine, architecture: Architecture, held: Sequence[tuple[HeldWeights, Runtime]], chosen: Resolved,
    pool: PoolSpec, added: Added,
) -> list[Stage]:  # fmt: skip
    """Build every pipeline stage from the weights and the engine's runtime memory of one of its ranks.

    Args:
        engine: the engine.
        architecture: the whole model.
        held: for each pipeline stage, the weights and the runtime memory of one rank.
        chosen: the complete flags.
        pool: geometry of the KV block pool.
        added: bytes that LoRA slots, a draft model (on the last stage) and a KV tier add.

    Raises:
        UnsupportedArchitecture: a stage would have no layer with a KV cache.
    """
    index = engine.index_bytes(chosen, pool)
    sizes = _block_bytes(pool, architecture, chosen.flags)
    # The draft model is on the last pipeline stage (v1/worker/gpu/model_runner.py).
    before = replace(added, draft=0, draft_high=0)
    each = [before] * (len(held) - 1) + [added]
    stages = []
    for (weights, runtime), size, more in zip(held, sizes, each, strict=True):
        runtime = _with_index(runtime, index)
        rank = _rank(weights, runtime, chosen, more)
        stages.append(Stage(rank, weights, runtime, size, more.draft_high))
    return stages


def runtime_of(part: Architecture, chosen: Resolved) -> Runtime:
    """Return a rank's memory for framework, activations and CUDA graphs, calibrated if --calibration is set."""
    return calibrated(engine_of(chosen.flags.engine).runtime_terms(part, chosen), part, chosen)


def _rank(weights: HeldWeights, runtime: Runtime, chosen: Resolved, added: Added) -> RankPlan:
    """Return the planned bytes of one rank, with an empty KV pool."""
    return RankPlan(
        weights_bytes=weights.bytes,
        kv_pool_bytes=0,
        activation_bytes=runtime.activation.value,
        cuda_graph_bytes=runtime.graphs.value,
        framework_bytes=runtime.framework.value,
        total_bytes=chosen.device_memory,
        lora_bytes=added.lora,
        draft_bytes=added.draft,
        kv_tier_bytes=added.tier,
        offloaded_bytes=weights.offloaded,
    )


def _block_bytes(pool: PoolSpec, architecture: Architecture, flags: Deployment) -> list[int]:
    """Return the bytes of one KV block on each pipeline stage.

    A stage stores the KV cache of its own layers. The draft's layers are on the last stage; their indices
    follow the model's.
    """
    stages = flags.pipeline_parallel_size
    if stages == 1:
        return [pool.layout.bytes_per_block]
    out, first = [], 0
    behind = {layer for group in pool.layout.groups for layer in group.layers if layer >= architecture.layers}
    for count in parallel.stage_layers(architecture.layers, stages):
        mine = frozenset(range(first, first + count))
        first += count
        held = pool.stage_bytes(mine | behind if first == architecture.layers else mine)
        if not held:
            raise UnsupportedArchitecture(
                "too many stages: one of them would have no layer with a KV cache",
                field="--pipeline-parallel-size",
            )
        out.append(held)
    return out
