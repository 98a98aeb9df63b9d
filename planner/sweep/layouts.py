"""Layouts of GPUs that `--target-concurrency` compares: tensor and pipeline parallelism, several machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import Gpu
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.source.resolve import ModelSource
from tonnage.planner.sweep.choices import Choices
from tonnage.planner.sweep.grid import Grid, sweep
from tonnage.planner.sweep.parts import Parts
from tonnage.planner.sweep.rows import SweepRow
from tonnage.planner.units import ceil_div

NODE = 8
"""Number of GPUs of one machine.

Layouts over several machines are compared only if no layout within one machine fits, and only up to twice the
number of GPUs of the smallest layout that fits.
"""

PCIE = 64e9
"""Bytes per second of PCIe 5.0 x16 in one direction (PCI-SIG). A faster link is NVLink or similar."""

_MOST_MACHINES = 8  # maximum number of machines of one replica
_STAGES = (2, 4, 8)  # numbers of pipeline stages within one machine

_Lengths = Sequence[tuple[int, int]]
_Prices = Mapping[str, float]


def layouts(
    source: ModelSource, deployment: Deployment, grids: Sequence[Grid], choices: Choices, wanted: int,
    lengths: _Lengths, prices: _Prices,
) -> list[SweepRow]:  # fmt: skip
    """Return the plans of GPU layouts within one machine and, where one machine is too small, over several.

    For a GPU that was given with a count, such as `2xa100-80g`, only the layout with that many tensor-parallel
    ranks is planned.

    Args:
        source: the model.
        deployment: the flags that do not vary. If pipeline_parallel_size is above 1, all layouts have this
            number of stages.
        grids: the values to combine, with a single pipeline stage.
        choices: the values that the user gave.
        wanted: sequences that have to run at once.
        lengths: (prompt, output) tokens of requests.
        prices: USD per hour of one GPU by its name.

    Raises:
        TonnageError: the model itself is not supported.
    """
    parts = Parts(source, deployment)
    given = deployment.pipeline_parallel_size
    if given > 1:
        staged = [replace(grid, pipeline_parallel_sizes=(given,)) for grid in grids]
        return [row for grid in staged for row in sweep(source, deployment, grid, lengths, prices, parts)]
    rows = [row for grid in grids for row in sweep(source, deployment, grid, lengths, prices, parts)]
    counted = {count for _, count in choices.gpus if count is not None}
    if counted or not engine_of(deployment.engine).divides:
        return rows
    for grid in grids:
        for piped in _within_machine(grid, rows):
            rows += sweep(source, deployment, piped, lengths, prices, parts)
    wide = [(gpu, grid) for grid in grids for gpu in _too_large(rows, grid.gpus)]
    return [*rows, *_over_machines(source, deployment, wide, rows, wanted, lengths, prices, parts)]


def _within_machine(grid: Grid, rows: Sequence[SweepRow]) -> Iterator[Grid]:
    """Yield grids with several pipeline stages on one machine, for GPUs where a pipeline can be better.

    A pipeline sends less data between GPUs than tensor parallelism, so it can be faster over PCIe. It also
    works if the number of attention heads is not divisible by the number of GPUs.

    Args:
        grid: the values to combine.
        rows: the sweep rows of the same values with a single pipeline stage.
    """
    weights: dict[int, int] = {}
    for row in rows:
        if row.weights_bytes and row.stages == 1:
            weights[row.gpus] = min(row.weights_bytes, weights.get(row.gpus, row.weights_bytes))
    divided = set(weights)
    for stages in _STAGES:
        for ranks in grid.tensor_parallel_sizes:
            count = ranks * stages
            if ranks not in divided or count > NODE:
                continue
            gpus = tuple(
                gpu
                for gpu in grid.gpus
                if gpu.device == "cuda" and weights[ranks] <= stages * gpu.memory_bytes
                and (count not in divided or gpu.link is None or gpu.link <= PCIE)
            )  # fmt: skip
            if gpus:
                sized = replace(grid, gpus=gpus, tensor_parallel_sizes=(ranks,))
                yield replace(sized, pipeline_parallel_sizes=(stages,))


def _too_large(rows: Sequence[SweepRow], gpus: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPU types with which one machine is not certain to hold a sequence of max_model_len tokens."""
    held = {row.gpu for row in rows if row.fits and row.least_sequences >= 1}
    return [gpu for gpu in gpus if gpu.device == "cuda" and gpu.name not in held]


def _over_machines(
    source: ModelSource, deployment: Deployment, wide: Sequence[tuple[Gpu, Grid]], rows: Sequence[SweepRow],
    wanted: int, lengths: _Lengths, prices: _Prices, parts: Parts,
) -> list[SweepRow]:  # fmt: skip
    """Return sweep rows of pipelines over several machines, with as many tensor-parallel ranks as possible.

    The number of stages grows until the layout holds the wanted sequences. The search stops at twice the
    number of GPUs of the smallest layout that fits.
    """
    if any(row.fits and row.least_sequences >= 1 for row in rows):
        return []
    tried = []
    for gpu, grid in wide:
        mine = [row for row in rows if row.gpu == gpu.name and row.stages == 1 and row.weights_bytes]
        mine = [row for row in mine if row.gpus <= NODE and not row.unsupported]
        if mine:
            ranks = max(row.gpus for row in mine)
            weights = min(row.weights_bytes for row in mine if row.gpus == ranks)
            tried.append((ranks * ceil_div(weights, gpu.memory_bytes), gpu, replace(grid, gpus=(gpu,)), ranks))
    found: list[SweepRow] = []
    smallest = 0
    for least, _, grid, ranks in sorted(tried, key=lambda entry: entry[0]):
        first = max(NODE // ranks + 1, least // ranks)
        for stages in range(first, _MOST_MACHINES * NODE // ranks + 1):
            if smallest and stages * ranks > 2 * smallest:
                break
            piped = replace(grid, tensor_parallel_sizes=(ranks,), pipeline_parallel_sizes=(stages,))
            here = sweep(source, deployment, piped, lengths, prices, parts)
            found += here
            fitting = [row for row in here if row.fits and row.least_sequences >= 1]
            if fitting:
                smallest = min(smallest or stages * ranks, stages * ranks)
            if any(row.least_sequences >= wanted for row in fitting) or all(row.refused for row in here):
                break
    return found
