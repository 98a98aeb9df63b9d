"""Sizing of a model under flags: weights, runtime memory and pool of each pipeline stage, and the verdict.

Sizing has four phases. Each phase takes the frozen dataclasses that the earlier phases return:

1. `Sizer.resolve`: flags -> `ResolvedModel`: the model with complete flags, each rank's weights and the draft.
2. `stage_model`: -> `StagedModel`: an empty pool and the pipeline stages with the engine's memory.
3. `fill_pool`: -> `FilledPool`: the number of blocks and their bounds; every stage gets the same number.
4. `judge_size`: -> `Size`: the verdict (whether the model fits) and the results of all phases.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.base import Engine
from tonnage.planner.engines.pool import PoolCapacity, PoolSpec
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.engines.support import Support, support
from tonnage.planner.errors import DeploymentError, EngineRefusal, UnsupportedArchitecture
from tonnage.planner.families.registry import architecture_of
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.requests import RequestLaw
from tonnage.planner.model.tensor import TensorSpec
from tonnage.planner.planning.deployment import complete, version_of
from tonnage.planner.planning.files import auto_dtype, check_checkpoint, stored_format
from tonnage.planner.planning.fit import judge
from tonnage.planner.planning.speculative import Draft, add_draft, within_draft
from tonnage.planner.planning.stages import Added, Part, Stage, build_stages, rank_architecture, runtime_of
from tonnage.planner.planning.terms import lora_bytes
from tonnage.planner.planning.weights import as_stored, hold_weights
from tonnage.planner.plans import Failure, Resolved
from tonnage.planner.quantization.kv_cache import stored_cache
from tonnage.planner.quantization.read import check_quantization, read_quantization
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.source.resolve import ModelSource


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model with complete flags and the weight bytes of each rank; its KV pool is not yet planned.

    Attributes:
        parts: for each pipeline stage, the part of the model that one rank holds, and its weights.
        draft: the draft model for speculative decoding; without one, a `Draft` of the target alone.
        notes: notes on what the draft model changes.
    """

    architecture: Architecture
    quantization: Quantization
    chosen: Resolved
    support: Support
    parts: list[Part]
    draft: Draft
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StagedModel:
    """An empty KV pool, and the pipeline stages with their memory.

    `flags` are the plan's flags, with the block size of the KV pool.
    """

    pool: PoolSpec
    stages: list[Stage]
    flags: Deployment


@dataclass(frozen=True, slots=True)
class FilledPool:
    """The KV pool with its planned number of blocks.

    Attributes:
        held: capacity of the pool in tokens and sequences.
        bounds: capacity of the pool at the lower and at the upper bound of the number of blocks.
        stages: the pipeline stages, including the bytes of the pool.
    """

    held: PoolCapacity
    bounds: tuple[PoolCapacity, PoolCapacity]
    stages: list[Stage]


@dataclass(frozen=True, slots=True)
class Size:
    """The sizing of a model under complete flags: stages, pool and verdict.

    Attributes:
        parts: for each pipeline stage, the part of the model that one rank holds.
        place: index of the pipeline stage with the most used bytes, which decides whether the model fits.
        held: capacity of the KV pool in tokens and sequences.
        bounds: capacity of the pool at the lower and at the upper bound of the number of blocks.
        reasons: why the model does not fit; empty when it fits.
    """

    architecture: Architecture
    quantization: Quantization
    chosen: Resolved
    pool: PoolSpec
    parts: tuple[Architecture, ...]
    stages: list[Stage]
    place: int
    held: PoolCapacity
    bounds: tuple[PoolCapacity, PoolCapacity]
    reasons: tuple[str, ...]
    draft_notes: tuple[str, ...]
    support: Support
    failure: Failure | None

    @property
    def worst(self) -> Stage:
        """Return the pipeline stage whose ranks use the most memory."""
        return self.stages[self.place]

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return name -> (low, high) of each estimated memory term, of the KV pool and of its capacity."""
        found: dict[str, tuple[float, float]] = dict(self.worst.intervals())
        low, high = self.bounds
        if low.num_blocks < high.num_blocks:
            size, apart = self.worst.block_bytes, self.pool.apart
            found["kv_pool_bytes"] = low.num_blocks * size + apart, high.num_blocks * size + apart
            found["num_blocks"] = low.num_blocks, high.num_blocks
            found["tokens"] = low.tokens, high.tokens
            found["max_concurrency"] = round(low.max_concurrency, 4), round(high.max_concurrency, 4)
        return found

    @property
    def bytes_per_sequence(self) -> int:
        """Return the KV pool bytes that one sequence of max_model_len tokens needs."""
        return self.held.blocks_per_sequence * self.pool.layout.bytes_per_block

    @property
    def longest(self) -> int:
        """Return the longest sequence in tokens that the pool holds, at most the model's own maximum."""
        return self.pool.longest(self.held.usable_blocks, self.architecture.max_model_len)


# Flags that change neither the tensors nor their dtypes. Plans that differ only in these flags reuse the sum of
# the weights.
_WEIGHTLESS = (
    "cudagraph_capture_sizes", "max_cudagraph_capture_size", "cuda_graph_sizes",
    "device_memory", "gpu_memory_utilization", "mem_fraction_static", "enforce_eager", "max_model_len",
    "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_dtype", "kv_cache_memory_bytes",
)  # fmt: skip


class Sizer:
    """A calculator of one model's memory under several deployments; it sums the model's weights only once."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self._formats: dict[tuple[str | None, str], Quantization] = {}
        self._copies: tuple[TensorSpec, ...] | None = None
        self._parts: dict[tuple[object, ...], list[Part]] = {}
        self._hash: Any = None

    def hash(self) -> Any:
        """Return a copy of a SHA-256 object that has hashed the model's id, config and tensor headers.

        Callers add the flags to the copy, to get the id of a plan.
        """
        if self._hash is None:
            source = self.source
            tensors = [[t.name, t.dtype, t.shape] for t in source.tensors or ()]
            self._hash = sha256(json.dumps([source.id, source.config, tensors], sort_keys=True)[:-1].encode())
        return self._hash.copy()

    def size(self, deployment: Deployment) -> Size:
        """Return the model's weights, runtime memory, KV pool and verdict for `deployment`.

        The method raises the errors that `make_plan` raises. If the engine itself would refuse the deployment,
        the error also quotes the engine's own message.
        """
        try:
            model = self.resolve(deployment)
            staged = stage_model(model)
            engine = engine_of(model.chosen.flags.engine)
            filled = fill_pool(engine, model.chosen, staged.pool, staged.stages)
            return judge_size(model, staged, filled, asked=deployment.max_model_len is not None)
        except EngineRefusal as error:
            engine = engine_of(deployment.engine)
            version, name = version_of(engine, deployment)
            said = engine.error_message(error.cause, version, error.facts)
            if said is None:
                raise
            raise DeploymentError(
                f"{error.message}; {engine.title} {name} stops with: {said}", field=error.field, hint=error.hint
            ) from None

    def resolve(self, deployment: Deployment) -> ResolvedModel:
        """Complete the flags with defaults, check them against the model, and sum each rank's weight bytes."""
        source = self.source
        architecture = architecture_of(source.config)
        quantization = self._format(architecture, deployment)
        if self._copies is None:
            self._copies = check_checkpoint(source, architecture)
        chosen = complete(deployment, architecture, auto_dtype(source), stored_cache(source.config))
        if quantization.scheme != "none":
            chosen = replace(chosen, flags=replace(chosen.flags, quantization=quantization.scheme))
        chosen, notes = within_draft(architecture, chosen)
        engine = engine_of(chosen.flags.engine)
        supported = support(engine, chosen, stored_format(source, quantization), architecture)
        parts = [
            (part, replace(held, buffers=engine.step_buffers(part, chosen)))
            for part, held in self._held(architecture, quantization, chosen.flags)
        ]
        draft = add_draft(source, architecture, chosen.flags)
        chosen, notes = replace(chosen, draft=draft.drafting), (*notes, *draft.notes)
        return ResolvedModel(architecture, quantization, chosen, supported, parts, draft, notes)

    def _format(self, architecture: Architecture, flags: Deployment) -> Quantization:
        """Return the quantization of the weights, after checking that model and engine support it.

        The result is cached for each pair of --quantization and --engine.
        """
        key = flags.quantization, flags.engine
        if key not in self._formats:
            quantization = read_quantization(self.source.config, flags.quantization)
            check_quantization(architecture, quantization, flags.engine)
            self._formats[key] = quantization
        return self._formats[key]

    def _held(self, architecture: Architecture, quantization: Quantization, flags: Deployment) -> list[Part]:
        """Return the result of `parts_of`, cached for deployments whose flags give the same weights."""
        key = tuple(getattr(flags, name) for name in flags.__match_args__ if name not in _WEIGHTLESS)
        if key not in self._parts:
            copies = self._copies or ()
            self._parts[key] = parts_of(self.source, architecture, quantization, flags, copies)
        return self._parts[key]


def parts_of(
    source: ModelSource, architecture: Architecture, quantization: Quantization, flags: Deployment,
    stored_copies: tuple[TensorSpec, ...],
) -> list[Part]:  # fmt: skip
    """Return, for each pipeline stage, the part of the model that one rank holds and the bytes of its weights.

    If the engine keeps the tensor types of a GGUF file, the bytes are those of these types. `stored_copies` are
    the tied tensors that `check_checkpoint` found in the files.

    Raises:
        DeploymentError: the parallel sizes do not divide a dimension of the model.
        UnsupportedArchitecture: it is not known how the engine divides the model.
    """
    shares = [rank_architecture(architecture, flags, stage) for stage in range(flags.pipeline_parallel_size)]
    parts = [(part, hold_weights(part, quantization, flags, stored_copies)) for part in shares]
    engine = engine_of(flags.engine)
    if source.kind != "gguf" or not engine.keeps_gguf:
        return parts
    whole = hold_weights(architecture, quantization, flags).loaded.total
    stored = engine.stored_tensors(source.tensors or (), flags)
    known_from = f"{source.file_type} by src/llama-quant.cpp" if source.file_type else "the GGUF header"
    return [(part, as_stored(held, whole, stored, known_from)) for part, held in parts]


def stage_model(model: ResolvedModel) -> StagedModel:
    """Build an empty KV pool, and the pipeline stages with all planned memory except that of the KV pool."""
    architecture, chosen, draft = model.architecture, model.chosen, model.draft
    engine = engine_of(chosen.flags.engine)
    pool = engine.build_pool(draft.architecture, chosen)
    flags = engine.shown_flags(chosen.flags, pool)
    tier = engine.tier_bytes(chosen, pool)
    added = Added(lora_bytes(architecture, flags), draft.weights, draft.high, tier)
    held = [(weights, runtime_of(part, chosen)) for part, weights in model.parts]
    stages = build_stages(engine, architecture, held, chosen, pool, added)
    heaviest = max(stage.loaded_bounds[0] for stage in stages)
    return StagedModel(engine.adjust_pool(architecture, chosen, pool, heaviest), stages, flags)


def fill_pool(engine: Engine, chosen: Resolved, pool: PoolSpec, stages: list[Stage]) -> FilledPool:
    """Fill the KV pool with as many blocks as the stage with the least free memory can hold."""
    num_blocks = min(
        engine.num_blocks(chosen, pool, stage.block_bytes, stage.rank.used_bytes, stage.loaded_bounds[0])
        for stage in stages
    )
    ends = [_block_bounds(engine, chosen, pool, stage) for stage in stages]
    fewest, most = (engine.capacity(pool, chosen, min(counts)) for counts in zip(*ends, strict=True))
    stages = [stage.with_blocks(num_blocks, pool.apart) for stage in stages]
    return FilledPool(engine.capacity(pool, chosen, num_blocks), (fewest, most), stages)


def _block_bounds(engine: Engine, chosen: Resolved, pool: PoolSpec, stage: Stage) -> tuple[int, int]:
    """Return the fewest and the most KV blocks that fit on a pipeline stage.

    The range covers the different totals of device memory that drivers may report.
    """
    framework = stage.runtime.framework.high
    bounds = [
        engine.block_bounds(end, pool, stage.block_bytes, stage.used_bounds, stage.loaded_bounds, framework)
        for end in ((chosen,) if chosen.memory_bounds is None else chosen.memory_ends)
    ]
    return bounds[0][0], bounds[-1][1]


def judge_size(model: ResolvedModel, staged: StagedModel, filled: FilledPool, *, asked: bool) -> Size:
    """Return the model's `Size` with the verdict whether it fits.

    `asked` is whether the user set --max-model-len.
    """
    architecture, chosen, pool, held = model.architecture, model.chosen, staged.pool, filled.held
    engine = engine_of(chosen.flags.engine)
    place, worst = max(enumerate(filled.stages), key=lambda pair: pair[1].rank.used_bytes)
    reasons = (*model.support.refused, *judge(chosen, worst.rank, pool, held, asked=asked))
    failure = engine.predict_failure(architecture, chosen, worst.rank, pool, held)
    if failure is not None and failure.why:
        reasons = (*reasons, failure.why)
    flags = replace(staged.flags, max_num_seqs=engine.most_running(chosen, pool, held))
    shares = tuple(part for part, _ in model.parts)
    return Size(
        architecture, model.quantization, replace(chosen, flags=flags), pool, shares, filled.stages, place,
        held, filled.bounds, reasons, model.notes, model.support, failure,
    )  # fmt: skip


def request_law(size: Size) -> tuple[RequestLaw | None, str]:
    """Return the rule for the KV blocks that a request takes, or None and the reason why it is not known."""
    try:
        return engine_of(size.chosen.flags.engine).request_law(size.architecture, size.chosen, size.pool), ""
    except UnsupportedArchitecture as error:
        return None, error.message
