"""Pipeline stages: what a rank of each holds beside the pool, and what one block of the pool is there."""

from __future__ import annotations

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.pool import PoolSpec
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.engines.runtime.estimate import Estimate, Runtime
from tonnage.planner.errors import DeploymentError, UnsupportedArchitecture
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.tensor import TensorSpec
from tonnage.planner.planning.weights import HeldWeights, hold_weights
from tonnage.planner.plans import RankPlan, Resolved, Term
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.records import dataclass, replace

Part = tuple[Architecture, HeldWeights]
"""A rank's share of the model, and its weights."""


@dataclass(frozen=True, slots=True)
class Added:
    """Bytes that flags add: ``lora`` on every rank, ``draft``, at most ``draft_high``, on those of the last
    stage."""

    lora: int
    draft: int
    draft_high: int


@dataclass(frozen=True, slots=True)
class Stage:
    """``rank``: one of the stage's ranks; its pool is empty until ``with_blocks``."""

    rank: RankPlan
    weights: HeldWeights
    runtime: Runtime
    block_bytes: int
    draft_high: int

    def with_blocks(self, num_blocks: int, apart: int) -> Stage:
        """The stage with so many blocks: every one gets the smallest one's (get_kv_cache_configs). ``apart``:
        the pool's bytes that are no blocks."""
        return replace(self, rank=replace(self.rank, kv_pool_bytes=num_blocks * self.block_bytes + apart))

    def runtime_terms(self) -> list[Term]:
        found = self._estimates()
        if self.runtime.beside is not None:  # no part of the sum
            found["cuda_graphs_beside_bytes"] = self.runtime.beside
        return [Term(name, e.value, e.formula, e.source) for name, e in found.items()]

    def intervals(self) -> dict[str, tuple[int, int]]:
        """Bounds of every figure that is not exact, and of their sum with the exact ones."""
        bounds = {name: (e.low, e.high) for name, e in self._estimates().items()}
        if self.weights_bounds[1] > self.rank.weights_bytes:
            bounds["weights_bytes"] = self.weights_bounds
        if self.draft_high > self.rank.draft_bytes:
            bounds["draft_bytes"] = (self.rank.draft_bytes, self.draft_high)
        bounds["used_bytes"] = self.used_bounds
        return bounds

    @property
    def weights_bounds(self) -> tuple[int, int]:
        held, loaded = self.rank.weights_bytes, self.weights.loaded
        return held, held + loaded.high - loaded.total

    @property
    def loaded_bounds(self) -> tuple[int, int]:
        """Of the weights and the draft's."""
        low, high = self.weights_bounds
        return low + self.rank.draft_bytes, high + max(self.rank.draft_bytes, self.draft_high)

    @property
    def used_bounds(self) -> tuple[int, int]:
        """Of the sum of all, the pool as it is."""
        low, high = self.runtime.bounds
        exact = self.rank.used_bytes - self.runtime.total
        more = self.weights_bounds[1] - self.weights_bounds[0] + max(0, self.draft_high - self.rank.draft_bytes)
        return exact + low, exact + high + more

    def _estimates(self) -> dict[str, Estimate]:
        runtime = self.runtime
        found = {
            "framework_bytes": runtime.framework,
            "activation_bytes": runtime.activation,
            "cuda_graph_bytes": runtime.graphs,
        }
        return {name: estimate for name, estimate in found.items() if estimate.high}


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
        whole_towers=engine.whole_towers(architecture, flags),
        towers_everywhere=engine.towers_everywhere,
    )
    return parallel.rank_architecture(architecture, sizes, stage)


def held_parts(
    architecture: Architecture, quantization: Quantization, flags: Deployment,
    stored_copies: tuple[TensorSpec, ...],
) -> list[Part]:  # fmt: skip
    """What a rank of each pipeline stage holds. Raises DeploymentError and UnsupportedArchitecture for a model
    that cannot be divided so. ``stored_copies``: as for ``weights.sum_weights``."""
    parts = [rank_architecture(architecture, flags, stage) for stage in range(flags.pipeline_parallel_size)]
    return [(part, hold_weights(part, quantization, flags, stored_copies)) for part in parts]


def build_stages(
    architecture: Architecture, parts: list[Part], chosen: Resolved, pool: PoolSpec, added: Added
) -> list[Stage]:
    """Every stage of ``chosen``, whose ranks hold ``parts``. Raises UnsupportedArchitecture for a stage
    without a cache."""
    held = [(weights, runtime_of(part, chosen)) for part, weights in parts]
    sizes = _block_bytes(pool, architecture, chosen.flags)
    before = replace(
        added, draft=0, draft_high=0
    )  # the draft is on the last stage (v1/worker/gpu/model_runner.py)
    each = [before] * (len(held) - 1) + [added]
    return [
        stage_of(weights, runtime, chosen, more, size)
        for (weights, runtime), size, more in zip(held, sizes, each, strict=True)
    ]


def stage_of(weights: HeldWeights, runtime: Runtime, chosen: Resolved, added: Added, block_bytes: int) -> Stage:
    """A stage whose ranks hold these, without a pool."""
    return Stage(_rank(weights, runtime, chosen, added), weights, runtime, block_bytes, added.draft_high)


def runtime_of(part: Architecture, chosen: Resolved) -> Runtime:
    """What the engine takes beside weights and pool, as starts of this GPU have it where flags name them."""
    runtime = engine_of(chosen.flags.engine).runtime_terms(part, chosen)
    if chosen.flags.calibration is None:
        return runtime
    from tonnage.planner.planning.calibration import calibrated  # few plans have one

    return calibrated(runtime, part, chosen)


def _rank(weights: HeldWeights, runtime: Runtime, chosen: Resolved, added: Added) -> RankPlan:
    return RankPlan(
        weights_bytes=weights.bytes,
        kv_pool_bytes=0,
        activation_bytes=runtime.activation.value,
        cuda_graph_bytes=runtime.graphs.value,
        framework_bytes=runtime.framework.value,
        total_bytes=chosen.device_memory,
        lora_bytes=added.lora,
        draft_bytes=added.draft,
        offloaded_bytes=weights.offloaded,
    )


def _block_bytes(pool: PoolSpec, architecture: Architecture, flags: Deployment) -> list[int]:
    """Bytes of one block on each pipeline stage, which stores its own layers only; a draft's, numbered behind
    the model's, are the last stage's."""
    stages = flags.pipeline_parallel_size
    if stages == 1:
        return [pool.layout.bytes_per_block]
    from tonnage.planner.engines.parallel import stage_layers

    out, first = [], 0
    behind = {layer for group in pool.layout.groups for layer in group.layers if layer >= architecture.layers}
    for count in stage_layers(architecture.layers, stages):
        mine = frozenset(range(first, first + count))
        first += count
        held = pool.stage_bytes(mine | behind if first == architecture.layers else mine)
        if not held:
            raise UnsupportedArchitecture(
                "a stage without a KV cache is not planned", field="--pipeline-parallel-size"
            )
        out.append(held)
    return out
