"""Partial results that several plans of a sweep have in common, each computed once.

The weights of a rank depend on (quantization, TP, PP). The KV pool's geometry depends on (KV cache dtype, TP,
batch size). The remaining memory of the engine depends on (GPU, KV cache dtype, TP, PP).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import Gpu
from tonnage.planner.engines.pool import PoolSpec
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.engines.runtime.estimate import Runtime
from tonnage.planner.engines.support import Support, support
from tonnage.planner.errors import TonnageError
from tonnage.planner.families.registry import architecture_of
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.requests import RequestLaw
from tonnage.planner.planning.calibration import calibration_notes
from tonnage.planner.planning.deployment import complete
from tonnage.planner.planning.files import auto_dtype, check_checkpoint, stored_format
from tonnage.planner.planning.size import parts_of
from tonnage.planner.planning.speculative import add_draft, within_draft
from tonnage.planner.planning.stages import Added, Part, Stage, build_stages, rank_architecture, runtime_of
from tonnage.planner.planning.terms import lora_bytes
from tonnage.planner.planning.weights import HeldWeights
from tonnage.planner.plans import Resolved
from tonnage.planner.quantization.kv_cache import stored_cache
from tonnage.planner.quantization.read import check_quantization, read_quantization
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.source.resolve import ModelSource

V = TypeVar("V")


class Parts:
    """A cache of partial results for all plans of a sweep over one model.

    If a result cannot be computed, its TonnageError is cached, and raised for every combination that needs the
    result.
    """

    def __init__(self, source: ModelSource, deployment: Deployment) -> None:
        """Read the model that is planned in every combination of the sweep.

        Args:
            source: the model.
            deployment: the flags that no combination varies.

        Raises:
            TonnageError: the model itself is not supported.
        """
        self.architecture = architecture_of(source.config)
        self.engine = engine_of(deployment.engine)
        self._source, self._deployment = source, deployment
        self._dtype, self._stored = auto_dtype(source), stored_cache(source.config)
        self._copies = check_checkpoint(source, self.architecture)
        self._found: dict[tuple[object, ...], Any] = {}

    def resolve(self, gpu: Gpu, kv_dtype: str, ranks: int, stages: int) -> tuple[Resolved, tuple[str, ...]]:
        """Return a combination's flags, completed with the engine's defaults, and notes for its table row."""

        def make() -> tuple[Resolved, tuple[str, ...]]:
            flags = replace(
                self._deployment, gpu=None, device=gpu.device, device_memory=gpu.memory_bytes,
                kv_cache_dtype=kv_dtype, tensor_parallel_size=ranks, pipeline_parallel_size=stages,
            )  # fmt: skip
            found = complete(replace(flags, gpu=gpu.name), self.architecture, self._dtype, self._stored)
            chosen, notes = within_draft(self.architecture, found)
            return chosen, (*self._source.notes, *notes, *calibration_notes(chosen))

        return self._cached(("resolve", gpu.name, kv_dtype, ranks, stages), make)

    def pool(self, chosen: Resolved) -> PoolSpec:
        """Return the KV block pool's geometry for the flags `chosen`: layer groups and bytes of a block."""

        def make() -> PoolSpec:
            draft = add_draft(self._source, self.architecture, chosen.flags)
            return self.engine.build_pool(draft.architecture, chosen)

        return self._cached(("pool", *_pool_key(chosen)), make)

    def law(self, chosen: Resolved) -> RequestLaw:
        """Return the rules that give a request's number of KV blocks from its prompt and output length."""
        return self._cached(
            ("law", *_pool_key(chosen)),
            lambda: self.engine.request_law(self.architecture, chosen, self.pool(chosen)),
        )

    def stages(self, chosen: Resolved, scheme: str) -> list[Stage]:
        """Return the pipeline stages of a plan, with an empty KV pool.

        Args:
            chosen: the resolved flags.
            scheme: a value of --quantization, or "as is" for the checkpoint's own quantization.
        """
        held, added = self._weights(chosen, scheme)
        memory = zip(held, self._runtime(chosen, scheme), strict=True)
        pool = self.pool(chosen)
        added = replace(added, tier=self.engine.tier_bytes(chosen, pool))
        return build_stages(self.engine, self.architecture, list(memory), chosen, pool, added)

    def _weights(self, chosen: Resolved, scheme: str) -> tuple[list[HeldWeights], Added]:
        """Return the weights of one rank per pipeline stage, and the bytes of LoRA slots and draft model."""
        asked = chosen.flags
        kernel = None if asked.gpu is None else self.engine.kernel_class(asked.gpu)

        def make() -> tuple[list[Part], Added]:
            flags = replace(
                self._deployment, tensor_parallel_size=asked.tensor_parallel_size,
                pipeline_parallel_size=asked.pipeline_parallel_size, device=asked.device,
                quantization=_flag(scheme), dtype=asked.dtype, gpu=kernel,
            )  # fmt: skip
            quantization = self._quantization(scheme)
            check_quantization(self.architecture, quantization, flags.engine)
            parts = parts_of(self._source, self.architecture, quantization, flags, self._copies)
            draft = add_draft(self._source, self.architecture, flags)
            return parts, Added(lora_bytes(self.architecture, flags), draft.weights, draft.high)

        key = ("weights", scheme, *_ranks(asked), asked.device, asked.dtype, kernel)
        parts, added = self._cached(key, make)
        held = [replace(held, buffers=self.engine.step_buffers(part, chosen)) for part, held in parts]
        return held, added

    def _runtime(self, chosen: Resolved, scheme: str) -> list[Runtime]:
        """Return, for each pipeline stage, the memory of one rank for activations, framework and CUDA graphs.

        The memory depends on the weights' quantization only for MXFP4, whose experts need no separate buffer.
        """
        flags = chosen.flags
        kind = "mxfp4" if self._quantization(scheme).scheme == "mxfp4" else None

        def make() -> list[Runtime]:
            as_asked = replace(flags, quantization=kind)
            draft = add_draft(self._source, self.architecture, as_asked).drafting
            resolved = replace(chosen, flags=as_asked, draft=draft)
            return [runtime_of(part, resolved) for part in self._shares(flags)]

        key = ("runtime", flags.gpu, flags.kv_cache_dtype, *_ranks(flags), kind)
        return self._cached(key, make)

    def support(self, chosen: Resolved, scheme: str) -> Support:
        """Return whether the engine runs the model in format ``scheme`` on the GPU, regardless of memory."""
        flags = chosen.flags

        def make() -> Support:
            stored = stored_format(self._source, self._quantization(scheme))
            return support(self.engine, chosen, stored, self.architecture)

        return self._cached(("support", flags.gpu, scheme, flags.kv_cache_dtype, flags.dtype), make)

    def _quantization(self, scheme: str) -> Quantization:
        return self._cached(("format", scheme), lambda: read_quantization(self._source.config, _flag(scheme)))

    def _shares(self, asked: Deployment) -> list[Architecture]:
        """Return, for each pipeline stage, the part of the model that one rank holds."""
        tensor, stages = _ranks(asked)
        flags = replace(self._deployment, tensor_parallel_size=tensor, pipeline_parallel_size=stages)
        return self._cached(
            ("shares", tensor, stages),
            lambda: [rank_architecture(self.architecture, flags, stage) for stage in range(stages)],
        )

    def _cached(self, key: tuple[object, ...], make: Callable[[], V]) -> V:
        """Return the result of `make`, cached under `key`; a TonnageError is cached and raised each time."""
        if key not in self._found:
            try:
                self._found[key] = make()
            except TonnageError as error:
                self._found[key] = error
        found = self._found[key]
        if isinstance(found, TonnageError):
            raise found
        value: V = found
        return value


def _flag(scheme: str) -> str | None:
    """Return the value of --quantization for the quantization `scheme` in a sweep.

    The value is None for "as is", the checkpoint's own quantization.
    """
    return None if scheme == "as is" else scheme


def _ranks(flags: Deployment) -> tuple[int, int]:
    return flags.tensor_parallel_size, flags.pipeline_parallel_size


def _pool_key(chosen: Resolved) -> tuple[object, ...]:
    """Return the flag values that determine the KV pool's geometry, as a key of the cache of geometries."""
    flags = chosen.flags
    return flags.kv_cache_dtype, flags.device, flags.tensor_parallel_size, chosen.max_num_batched_tokens
