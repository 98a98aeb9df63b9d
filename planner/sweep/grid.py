"""Quantization x KV dtype x TP x GPU: one row a combination, the parts that do not change computed once.

Weights depend on (quantization, TP), the pool's geometry on (KV dtype, TP, batch), the runtime terms on
(GPU, KV dtype, TP); a combination itself is a division: 0.05 ms (benchmarks/plan_speed.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import Gpu
from tonnage.planner.devices.prices import Cost, cost_of
from tonnage.planner.engines.base import Engine
from tonnage.planner.engines.pool import PoolSpec
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.engines.runtime.estimate import Runtime
from tonnage.planner.engines.support import Support, support
from tonnage.planner.errors import TonnageError
from tonnage.planner.families.registry import architecture_of
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.capacity import at_most, check_lengths, hold
from tonnage.planner.model.requests import RequestLaw
from tonnage.planner.planning.build import (
    auto_dtype,
    check_checkpoint,
    notes_of_calibration,
    parts_of,
    stored_format,
    with_draft,
    within_draft,
)
from tonnage.planner.planning.deployment import complete
from tonnage.planner.planning.stages import Added, Stage, rank_architecture, runtime_of, stage_of
from tonnage.planner.planning.terms import lora_bytes
from tonnage.planner.planning.weights import HeldWeights
from tonnage.planner.plans import Resolved
from tonnage.planner.quantization.read import (
    check_quantization,
    flag_formats,
    read_quantization,
    stored_kv_dtype,
)
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.records import dataclass, replace
from tonnage.planner.source.resolve import ModelSource


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One combination. Bytes are of one GPU; ``usd_per_hour`` of all of them, None where no list has a price
    (``price_source`` says which has). ``refused``: why there is no plan (the other figures are 0 then);
    ``unsupported``: why the engine does not run it on that GPU, or not by itself, whatever the memory;
    ``stops``: why its start fails although the memory would do, and what would start. ``notes``: where the
    plan is not what the flags say.

    ``sequences``: of max_model_len tokens, or of the first of the lengths asked for, that run at once, at most
    --max-num-seqs; ``least_sequences``: where the engine takes the most memory it may. ``requests``: of each of
    these lengths, ``requests_held``: what the pool alone would hold of them. ``usd_per_sequence``: for an hour
    of one of ``least_sequences``.
    """

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
    model: str = ""
    unsupported: str = ""
    max_model_len: int = 0
    max_num_seqs: int = 0
    sequences: float = 0.0
    least_sequences: float = 0.0
    requests: tuple[int, ...] = ()
    requests_held: tuple[int, ...] = ()
    price_source: str = ""
    stops: str = ""
    notes: tuple[str, ...] = ()

    @property
    def usd_per_sequence(self) -> float | None:
        """None without a price, and where not one sequence is certain."""
        if self.usd_per_hour is None or not self.fits or self.least_sequences < 1:
            return None
        return self.usd_per_hour / self.least_sequences

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
_RuntimeKey = tuple[str, str, int, str | None]  # GPU, KV dtype, TP, format where a step depends on it
_SupportKey = tuple[str, str, str, str]  # GPU, format, KV dtype, dtype
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


def sweep(
    source: ModelSource, deployment: Deployment, grid: Grid, lengths: Sequence[tuple[int, int]] = (),
    prices: Mapping[str, float] | None = None,
) -> list[SweepRow]:  # fmt: skip
    """Every combination of ``grid``; other flags are ``deployment``'s. ``lengths``: prompt and output tokens of
    requests to be counted; ``prices``: USD an hour by GPU, before those of the lists. Raises what the model
    does."""
    architecture = architecture_of(source.config)
    engine, dtype = engine_of(deployment.engine), auto_dtype(source)
    stored, copies = stored_kv_dtype(source.config), check_checkpoint(source, architecture)

    def weights(key: _WeightsKey) -> tuple[HeldWeights, Added]:
        """Weights on the device, and bytes of LoRA slots and draft."""
        scheme, ranks, device, kind, kernel = key
        asked = None if scheme == "as is" else scheme
        flags = replace(
            deployment, tensor_parallel_size=ranks, quantization=asked, device=device, dtype=kind, gpu=kernel
        )
        quantization = read_quantization(source.config, flags.quantization)
        check_quantization(architecture, quantization, deployment.engine)
        ((_, held),) = parts_of(source, architecture, quantization, flags, copies)
        _, draft, draft_high, *_ = with_draft(source, architecture, flags)
        return held, Added(lora_bytes(architecture, flags), draft, draft_high)

    def resolve(key: tuple[str, str, int]) -> tuple[Resolved, tuple[str, ...]]:
        name, kv_dtype, ranks = key
        gpu = gpus[name]
        flags = replace(
            deployment, gpu=None, device=gpu.device, device_memory=gpu.memory_bytes, kv_cache_dtype=kv_dtype,
            tensor_parallel_size=ranks,
        )  # fmt: skip
        found = complete(replace(flags, gpu=gpu.name), architecture, dtype, stored)
        chosen, notes = within_draft(architecture, found)
        return chosen, (*notes, *notes_of_calibration(chosen))

    def pool(key: _PoolKey) -> PoolSpec:
        chosen = resolved_for[key]
        pooled, *_ = with_draft(source, architecture, chosen.flags)
        return engine.build_pool(pooled, chosen)

    def runtime(key: _RuntimeKey) -> Runtime:
        _, _, ranks, kind = key
        chosen = steps_of[key]
        flags = replace(chosen.flags, quantization=kind)
        *_, draft = with_draft(source, architecture, flags)
        chosen = replace(chosen, flags=flags, draft=draft)
        return runtime_of(part_of(ranks), chosen)

    def experts(scheme: str) -> str | None:
        """The format that changes what a step takes: MXFP4's experts have no buffer of their own."""
        found = format_of(scheme).scheme
        return found if found == "mxfp4" else None

    def scheme_of(scheme: str) -> Quantization:
        return read_quantization(source.config, None if scheme == "as is" else scheme)

    def supported(key: _SupportKey) -> Support:
        return support(engine, run_as[key], stored_format(source, format_of(key[1])), architecture)

    def law(key: _PoolKey) -> RequestLaw:
        chosen = resolved_for[key]
        return engine.request_law(architecture, chosen, pool_of(key))

    def part(ranks: int) -> Architecture:
        return rank_architecture(architecture, replace(deployment, tensor_parallel_size=ranks), 0)

    resolved_for: dict[_PoolKey, Resolved] = {}
    run_as: dict[_SupportKey, Resolved] = {}
    steps_of: dict[_RuntimeKey, Resolved] = {}
    gpus = {gpu.name: gpu for gpu in grid.gpus}
    weights_of, resolved, part_of = _Once(weights), _Once(resolve), _Once(part)
    pool_of, terms_of, experts_of = _Once(pool), _Once(runtime), _Once(experts)
    law_of, support_of, format_of = _Once(law), _Once(supported), _Once(scheme_of)
    rows = []
    for gpu in grid.gpus:
        kernel = engine.kernel_class(gpu.name)
        for ranks in grid.tensor_parallel_sizes:
            price = cost_of(gpu.name, ranks, prices)
            for kv_dtype in grid.kv_cache_dtypes:
                for scheme in grid.quantizations:
                    found = SweepRow(gpu.name, ranks, scheme, kv_dtype, False, model=source.id)
                    try:
                        chosen, notes = resolved((gpu.name, kv_dtype, ranks))
                        key = (chosen.flags.kv_cache_dtype, gpu.device, ranks, chosen.max_num_batched_tokens)
                        resolved_for.setdefault(key, chosen)
                        layout = pool_of(key)
                        held = weights_of((scheme, ranks, gpu.device, chosen.flags.dtype, kernel))
                        step = (gpu.name, chosen.flags.kv_cache_dtype, ranks, experts_of(scheme))
                        steps_of.setdefault(step, chosen)
                        terms = terms_of(step)
                        asked = [(law_of(key), *length) for length in lengths]
                        stage = stage_of(held[0], terms, chosen, held[1], layout.layout.bytes_per_block)
                        row = _row(found, engine, architecture, chosen, layout, stage, price, asked, notes)
                        kind = (gpu.name, scheme, chosen.flags.kv_cache_dtype, chosen.flags.dtype)
                        run_as.setdefault(kind, chosen)
                        if not (runs := support_of(kind)).runs:
                            row = replace(row, unsupported=runs.why, fits=row.fits and not runs.refused)
                        rows.append(row)
                    except TonnageError as error:
                        rows.append(replace(found, refused=str(error)))
    return rows


def _row(
    row: SweepRow, engine: Engine, architecture: Architecture, chosen: Resolved, pool: PoolSpec, stage: Stage,
    price: Cost | None, asked: Sequence[tuple[RequestLaw, int, int]], notes: tuple[str, ...],
) -> SweepRow:  # fmt: skip
    """``row`` with its figures, as Sizer has them of one plan. ``stage``: what a rank holds beside the pool;
    ``asked``: lengths of requests, each with what one takes."""
    size, weights = stage.block_bytes, stage.loaded_bounds
    pool = engine.settle_pool(architecture, chosen, pool, weights[0])
    blocks = engine.num_blocks(chosen, pool, size, stage.rank.used_bytes, weights[0])
    ends = engine.block_bounds(chosen, pool, size, stage.used_bounds, weights, stage.runtime.framework.high)
    held, least, most = (engine.capacity(pool, chosen, count) for count in (blocks, *ends))
    rank = stage.with_blocks(blocks, pool.apart).rank
    failure = engine.foresee(architecture, chosen, rank, pool, held)
    limit = engine.most_running(chosen, pool, held)
    stops = "" if failure is None else failure.why
    usable = held.usable_blocks, least.usable_blocks, most.usable_blocks
    for _, prompt, output in asked:
        check_lengths(prompt, output, chosen.max_model_len)
    requests = [hold(law, prompt, output, usable, limit) for law, prompt, output in asked]
    counts = [(at_most(found.at_once, limit), at_most(found.bounds[0], limit)) for found in requests]
    counts.append((at_most(held.max_concurrency, limit), at_most(least.max_concurrency, limit)))
    enough = rank.used_bytes <= chosen.limit and held.blocks_per_sequence <= held.usable_blocks
    return replace(
        row,
        fits=enough and not stops,
        weights_bytes=rank.weights_bytes,
        kv_pool_bytes=rank.kv_pool_bytes,
        runtime_bytes=stage.runtime.total,
        free_bytes=rank.free_bytes,
        total_bytes=rank.total_bytes,
        tokens=held.tokens,
        max_concurrency=held.max_concurrency,
        usd_per_hour=None if price is None else price.usd,
        price_source="" if price is None else price.source,
        added_bytes=rank.lora_bytes + rank.draft_bytes,
        least_concurrency=least.max_concurrency,
        max_model_len=chosen.max_model_len,
        max_num_seqs=limit,
        sequences=counts[0][0],
        least_sequences=counts[0][1],
        requests=tuple(found.running for found in requests),
        requests_held=tuple(found.at_once for found in requests),
        stops=stops,
        notes=notes,
    )


def cheapest(rows: Iterable[SweepRow], concurrency: int) -> list[SweepRow]:
    """Rows that run so many sequences at once, the cheapest first: at the lower end of what
    their pools may be, since somebody buys them."""
    return sorted(
        (row for row in rows if row.fits and row.least_sequences >= concurrency), key=lambda r: r.cost
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
