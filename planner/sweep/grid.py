"""Quantization x KV dtype x TP x GPU: one row a combination, the parts that do not change computed once.

Weights depend on (quantization, TP), the pool's geometry on (KV dtype, TP, batch), the runtime terms on
(GPU, TP); a combination itself is a division. 10,000 combinations take well under half a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from tonnage.planner.devices.catalogue import Gpu
from tonnage.planner.engines.base import Engine
from tonnage.planner.engines.pool import PoolSpec
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.engines.runtime.estimate import Runtime
from tonnage.planner.errors import TonnageError
from tonnage.planner.families.registry import architecture_of
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.planning.build import auto_dtype, with_draft
from tonnage.planner.planning.deployment import complete
from tonnage.planner.planning.stages import rank_architecture
from tonnage.planner.planning.terms import lora_bytes
from tonnage.planner.planning.weights import hold_weights
from tonnage.planner.plans import Deployment, Resolved
from tonnage.planner.quantization.read import (
    check_quantization,
    flag_formats,
    read_quantization,
    stored_kv_dtype,
)
from tonnage.planner.records import dataclass, replace
from tonnage.planner.source.resolve import ModelSource


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One combination. Bytes are of one GPU; ``usd_per_hour`` of all of them, None without a list price.
    ``refused``: why there is no plan (the other figures are 0 then)."""

    gpu: str
    gpus: int
    quantization: str
    kv_cache_dtype: str
    fits: bool
    weights_bytes: int = 0
    kv_pool_bytes: int = 0
    runtime_bytes: int = 0
    free_bytes: int = 0
    total_bytes: int = 0
    tokens: int = 0
    max_concurrency: float = 0.0
    usd_per_hour: float | None = None
    refused: str = ""
    added_bytes: int = 0  # LoRA slots and the draft's weights
    least_concurrency: float = 0.0  # ``max_concurrency`` where the engine takes the most it may

    @property
    def cost(self) -> tuple[int, float]:
        """Priced offers first, the cheapest first; the others by their memory."""
        if self.usd_per_hour is not None:
            return 0, self.usd_per_hour
        return 1, float(self.gpus * self.total_bytes)


@dataclass(frozen=True, slots=True)
class Grid:
    """What is combined. ``quantizations``: names of --quantization, or "as is" for the checkpoint's own."""

    gpus: tuple[Gpu, ...]
    quantizations: tuple[str, ...]
    kv_cache_dtypes: tuple[str, ...]
    tensor_parallel_sizes: tuple[int, ...]

    def __len__(self) -> int:
        return (
            len(self.gpus)
            * len(self.quantizations)
            * len(self.kv_cache_dtypes)
            * len(self.tensor_parallel_sizes)
        )


_PoolKey = tuple[str, str, int, int]  # KV dtype, device, TP, tokens of a step
_WeightsKey = tuple[str, int, str, str, str | None]  # format, TP, device, dtype, a GPU with the same kernels
K = TypeVar("K")
V = TypeVar("V")


class _Once(Generic[K, V]):
    """Values computed once per key; a TonnageError is kept and raised again as itself."""

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make
        self._found: dict[K, V | TonnageError] = {}

    def __call__(self, key: K) -> V:
        if key not in self._found:
            try:
                self._found[key] = self._make(key)
            except TonnageError as error:
                self._found[key] = error
        found = self._found[key]
        if isinstance(found, TonnageError):
            raise found
        return found


def sweep(source: ModelSource, deployment: Deployment, grid: Grid) -> list[SweepRow]:
    """Every combination of ``grid``; other flags are ``deployment``'s. Raises what the model does."""
    architecture = architecture_of(source.config)
    engine, dtype = engine_of(deployment.engine), auto_dtype(source)
    stored = stored_kv_dtype(source.config)

    def weights(key: _WeightsKey) -> tuple[int, int]:
        """Bytes of the weights on the device, and of LoRA slots and draft."""
        scheme, ranks, device, kind, kernel = key
        asked = None if scheme == "as is" else scheme
        flags = replace(
            deployment, tensor_parallel_size=ranks, quantization=asked, device=device, dtype=kind, gpu=kernel
        )
        quantization = read_quantization(source.config, flags.quantization)
        check_quantization(architecture, quantization, deployment.engine)
        held = hold_weights(part_of(ranks), quantization, flags)
        _, draft, *_ = with_draft(source, architecture, flags)
        return held.bytes, lora_bytes(architecture, flags) + draft

    def resolve(key: tuple[int, str, int]) -> Resolved:
        place, kv_dtype, ranks = key
        gpu = grid.gpus[place]
        flags = replace(
            deployment, gpu=None, device=gpu.device, device_memory=gpu.memory_bytes, kv_cache_dtype=kv_dtype,
            tensor_parallel_size=ranks,
        )  # fmt: skip
        return complete(replace(flags, gpu=gpu.name), architecture, dtype, stored)

    def pool(key: _PoolKey) -> PoolSpec:
        chosen = resolved_for[key]
        pooled, *_ = with_draft(source, architecture, chosen.flags)
        return engine.build_pool(pooled, chosen)

    def runtime(key: tuple[int, int, str | None]) -> Runtime:
        place, ranks, kind = key
        chosen = resolved((place, grid.kv_cache_dtypes[0], ranks))
        flags = replace(chosen.flags, quantization=kind)
        *_, draft = with_draft(source, architecture, flags)
        chosen = replace(chosen, flags=flags, draft=draft)
        return engine.runtime_terms(part_of(ranks), chosen)

    def experts(scheme: str) -> str | None:
        """The format that changes what a step takes: MXFP4's experts have no buffer of their own."""
        found = read_quantization(source.config, None if scheme == "as is" else scheme).scheme
        return found if found == "mxfp4" else None

    def part(ranks: int) -> Architecture:
        return rank_architecture(architecture, replace(deployment, tensor_parallel_size=ranks), 0)

    resolved_for: dict[_PoolKey, Resolved] = {}
    weights_of, resolved, part_of = _Once(weights), _Once(resolve), _Once(part)
    pool_of, runtime_of, experts_of = _Once(pool), _Once(runtime), _Once(experts)
    rows = []
    for place, gpu in enumerate(grid.gpus):
        kernel = engine.kernel_class(gpu.name)
        for ranks in grid.tensor_parallel_sizes:
            price = None if gpu.usd_per_hour is None else gpu.usd_per_hour * ranks
            for kv_dtype in grid.kv_cache_dtypes:
                refused = ""
                try:
                    chosen = resolved((place, kv_dtype, ranks))
                    key = (chosen.flags.kv_cache_dtype, gpu.device, ranks, chosen.max_num_batched_tokens)
                    resolved_for.setdefault(key, chosen)
                    layout = pool_of(key)
                except TonnageError as error:
                    refused = str(error)
                for scheme in grid.quantizations:
                    if not refused:
                        try:
                            held = weights_of((scheme, ranks, gpu.device, chosen.flags.dtype, kernel))
                            terms = runtime_of((place, ranks, experts_of(scheme)))
                        except TonnageError as error:
                            why = str(error)
                            rows.append(SweepRow(gpu.name, ranks, scheme, kv_dtype, False, refused=why))
                            continue
                        rows.append(
                            _row(engine, gpu, ranks, scheme, kv_dtype, chosen, layout, held, terms, price)
                        )
                        continue
                    rows.append(SweepRow(gpu.name, ranks, scheme, kv_dtype, False, refused=refused))
    return rows


def _row(
    engine: Engine, gpu: Gpu, ranks: int, scheme: str, kv_dtype: str, chosen: Resolved, pool: PoolSpec,
    loaded: tuple[int, int], runtime: Runtime, price: float | None,
) -> SweepRow:  # fmt: skip
    size, (weights, added) = pool.layout.bytes_per_block, loaded
    exact, terms = weights + added, runtime.total
    blocks = engine.num_blocks(chosen, pool, size, exact + terms, weights)
    low, high = runtime.bounds
    fewest, _ = engine.block_bounds(
        chosen, pool, size, (exact + low, exact + high), (weights, weights), runtime.framework.high
    )
    held, least = (engine.capacity(pool, chosen, count) for count in (blocks, fewest))
    taken = exact + terms + blocks * size
    fits = taken <= chosen.limit and held.blocks_per_sequence <= held.usable_blocks
    return SweepRow(
        gpu.name, ranks, scheme, kv_dtype, fits, weights, blocks * size, terms, gpu.memory_bytes - taken,
        gpu.memory_bytes, held.tokens, held.max_concurrency, price, added_bytes=added,
        least_concurrency=least.max_concurrency,
    )  # fmt: skip


def cheapest(rows: Iterable[SweepRow], concurrency: int) -> list[SweepRow]:
    """Rows that hold so many sequences of max_model_len tokens, the cheapest first: at the lower end of what
    their pools may be, since somebody buys them."""
    return sorted(
        (row for row in rows if row.fits and row.least_concurrency >= concurrency), key=lambda r: r.cost
    )


def default_grid(deployment: Deployment, gpus: Sequence[Gpu]) -> Grid:
    """Whatever a flag fixes is not varied."""
    schemes: tuple[str, ...] = ("as is", *flag_formats())
    if deployment.quantization is not None:
        schemes = (deployment.quantization,)
    engine = engine_of(deployment.engine)
    kv = ("auto", "fp8") if engine.fp8_kv_cache else ("auto",)
    if deployment.kv_cache_dtype != "auto":
        kv = (deployment.kv_cache_dtype,)
    sizes = (1, 2, 4, 8) if engine.divides else (1,)
    if deployment.tensor_parallel_size != 1:
        sizes = (deployment.tensor_parallel_size,)
    return Grid(tuple(gpus), schemes, kv, sizes)
