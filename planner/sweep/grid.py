"""Sweep: plan every combination of GPUs, parallel sizes, KV cache dtypes and quantizations.

Each combination gives one row of a table. Combinations share partial results (parts.py), so a row takes only
0.05 ms (benchmarks/plan_speed.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod

from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import Gpu
from tonnage.planner.devices.prices import Cost, cost_of
from tonnage.planner.engines.base import Engine
from tonnage.planner.engines.pool import PoolSpec
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.errors import TonnageError
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.capacity import at_most, check_lengths, hold
from tonnage.planner.model.requests import RequestLaw
from tonnage.planner.planning.size import fill_pool
from tonnage.planner.planning.stages import Stage
from tonnage.planner.plans import Resolved
from tonnage.planner.quantization.read import flag_formats
from tonnage.planner.source.resolve import ModelSource
from tonnage.planner.sweep.parts import Parts
from tonnage.planner.sweep.rows import SweepRow


@dataclass(frozen=True, slots=True)
class Grid:
    """The values of each flag in a sweep, which plans every combination of them.

    Attributes:
        quantizations: values of --quantization, or "as is" for the checkpoint's own.
        pipeline_parallel_sizes: numbers of pipeline stages. Combinations with several stages are planned only
            within one machine.
    """

    gpus: tuple[Gpu, ...]
    quantizations: tuple[str, ...]
    kv_cache_dtypes: tuple[str, ...]
    tensor_parallel_sizes: tuple[int, ...]
    pipeline_parallel_sizes: tuple[int, ...] = (1,)

    def __len__(self) -> int:
        return prod(len(getattr(self, field.name)) for field in fields(self))


def sweep(
    source: ModelSource, deployment: Deployment, grid: Grid, lengths: Sequence[tuple[int, int]] = (),
    prices: Mapping[str, float] | None = None, parts: Parts | None = None,
) -> list[SweepRow]:  # fmt: skip
    """Plan every combination of a grid's flag values and return one row per combination.

    The row of a combination that cannot be planned has the reason instead of numbers.

    Args:
        source: the model.
        deployment: the flags that do not vary.
        grid: the values to combine.
        lengths: (prompt, output) tokens of requests; each row says how many run at once.
        prices: USD per hour of one GPU by its name; these prices replace the public lists.
        parts: partial results of an earlier sweep with the same model and flags.

    Raises:
        TonnageError: the model itself is not supported.
    """
    parts = parts or Parts(source, deployment)
    rows = []
    sizes = product(grid.gpus, grid.tensor_parallel_sizes, grid.pipeline_parallel_sizes)
    for gpu, ranks, stages in sizes:
        price = cost_of(gpu.name, ranks * stages, prices)
        for kv_dtype, scheme in product(grid.kv_cache_dtypes, grid.quantizations):
            row = SweepRow(gpu.name, ranks * stages, scheme, kv_dtype, False, model=source.id, stages=stages)
            try:
                rows.append(_planned_row(row, parts, gpu, price, lengths))
            except TonnageError as error:
                rows.append(replace(row, refused=str(error)))
    return rows


def _planned_row(
    row: SweepRow, parts: Parts, gpu: Gpu, price: Cost | None, lengths: Sequence[tuple[int, int]]
) -> SweepRow:
    """Plan one combination of flag values in a sweep and return `row` with the plan's numbers.

    Raises:
        TonnageError: a part of the plan is not possible.
    """
    scheme = row.quantization
    chosen, notes = parts.resolve(gpu, row.kv_cache_dtype, row.tensor, row.stages)
    pool, stages = parts.pool(chosen), parts.stages(chosen, scheme)
    asked = [(parts.law(chosen), *length) for length in lengths]
    row = _row(row, parts.engine, parts.architecture, chosen, pool, stages, price, asked, notes)
    runs = parts.support(chosen, scheme)
    return row if runs.runs else replace(row, unsupported=runs.why, fits=row.fits and not runs.refused)


def _row(
    row: SweepRow, engine: Engine, architecture: Architecture, chosen: Resolved, pool: PoolSpec,
    stages: list[Stage], price: Cost | None, asked: Sequence[tuple[RequestLaw, int, int]],
    notes: tuple[str, ...],
) -> SweepRow:  # fmt: skip
    """Return the sweep row `row` with the numbers of its plan, equal to those of a single plan (`Sizer`).

    Args:
        row: the row with the combination's GPU, quantization, KV cache dtype and tensor parallel size.
        engine: the engine.
        architecture: the model.
        chosen: the flags, with the engine's choice for every omitted flag.
        pool: geometry of the KV block pool.
        stages: for each pipeline stage, the memory of one rank without the KV pool.
        price: hourly price of the GPUs, or None.
        asked: (rules for the KV blocks of a request, prompt tokens, output tokens) of each request to count.
        notes: notes to store in the row.
    """
    pool = engine.adjust_pool(architecture, chosen, pool, max(stage.loaded_bounds[0] for stage in stages))
    filled = fill_pool(engine, chosen, pool, stages)
    held, (least, most) = filled.held, filled.bounds
    stage = max(filled.stages, key=lambda one: one.rank.used_bytes)
    rank, whole_pool = stage.rank, sum(one.rank.kv_pool_bytes for one in filled.stages)
    failure = engine.predict_failure(architecture, chosen, rank, pool, held)
    limit = engine.most_running(chosen, pool, held)
    stops = "" if failure is None else failure.why
    usable = held.usable_blocks, least.usable_blocks, most.usable_blocks
    for _, prompt, output in asked:
        check_lengths(prompt, output, chosen.max_model_len)
    requests = [hold(law, prompt, output, usable, limit) for law, prompt, output in asked]
    counts = [(at_most(found.at_once, limit), at_most(found.bounds[0], limit)) for found in requests]
    counts.append((at_most(held.max_concurrency, limit), at_most(least.max_concurrency, limit)))
    whole = int(whole_pool / held.max_concurrency) if held.max_concurrency else 0
    request_bytes, read_bytes = whole, whole
    if asked:
        law, prompt, output = asked[0]
        request_bytes, read_bytes = requests[0].bytes, law.read_bytes(prompt + output // 2)
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
        least_held=requests[0].bounds[0] if requests else least.max_concurrency,
        request_bytes=request_bytes,
        read_bytes=read_bytes,
        replica_pool_bytes=whole_pool * row.tensor,
    )


def default_grid(deployment: Deployment, gpus: Sequence[Gpu]) -> Grid:
    """Return the grid of flag values for --sweep: flags that the user gave keep their values, others vary."""
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
