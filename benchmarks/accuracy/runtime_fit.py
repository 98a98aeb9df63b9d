"""The GPU runtime model's fit to start-up reports: which rows carry it, its coefficients, its spread.

Used by benchmarks/fit_runtime.py (which writes planner/engines/runtime/fitted.json) and by ``pool_from_flags``,
which fits once per source left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from accuracy.common import Inputs, read_jsonl
from accuracy.reports import GIB, label, model_config, quantization_known

if TYPE_CHECKING:
    from tonnage.planner.engines.runtime.estimate import Coefficients
    from tonnage.planner.model.architecture import Architecture
    from tonnage.planner.plans import Resolved

# Half-widths of the interval tried: as wide as the sources need, and never more than 8 % of the device in all.
_LEAST_SPREAD, _MOST_SPREAD = 0.01, 0.04


@dataclass(frozen=True)
class Row:
    """One report: what the planner resolves from its flags, and what the engine printed (bytes)."""

    name: str
    source: str
    architecture: Architecture
    chosen: Resolved
    weights: int
    weights_printed: bool
    pool: int
    activation: int | None
    non_torch: int | None
    graph_estimate: int | None
    carries_bar: bool

    @property
    def device(self) -> int:
        return self.chosen.device_memory

    def planned_pool(self, fitted: Coefficients) -> int:
        return max(0, self.chosen.limit - self.weights - self.runtime(fitted))

    def runtime(self, fitted: Coefficients) -> int:
        from tonnage.planner.engines.registry import engine_of

        engine = engine_of(self.chosen.flags.engine)
        return engine.gpu_terms(self.architecture, self.chosen, fitted).total


def load_rows(inputs: Inputs) -> tuple[list[Row], list[str]]:
    """(rows, what was left out and why)."""
    rows, left_out = [], []
    assert inputs.reports is not None
    for index, report in enumerate(read_jsonl(inputs.reports)):
        if not report["engine"].startswith("vLLM") or report["observed"].get("available_kv_gib") is None:
            continue
        found = _row(inputs, index, report)
        if isinstance(found, str):
            left_out.append(f"{label(index, report)}: {found}")
        else:
            rows.append(found)
    return rows, left_out


def _row(inputs: Inputs, index: int, report: dict[str, Any]) -> Row | str:
    from tonnage.planner.errors import TonnageError
    from tonnage.planner.families.registry import build_architecture
    from tonnage.planner.planning.build import auto_dtype
    from tonnage.planner.planning.deployment import complete
    from tonnage.planner.source.resolve import ModelSource

    seen = report["observed"]
    config = model_config(inputs, report)
    if config is None:
        return "no config"
    memory, gpu = _device(report)
    if memory is None:
        return "neither GPU nor its memory given"
    if seen["available_kv_gib"] <= 0:
        return "did not start"
    try:
        architecture = build_architecture(config)
        source = ModelSource(report["model"], report["model"], config, "folder")
        chosen = complete(_flags(report, memory, gpu), architecture, auto_dtype(source))
        weights = _weights(report, source, architecture, chosen)
    except TonnageError as error:
        return str(error)
    if weights is None:
        return "weights neither planned nor printed"

    def size(key: str) -> int | None:
        value = seen.get(key)
        return None if value is None else int(value * GIB)

    return Row(
        name=label(index, report),
        source=str(report["source"] or f"row {index}").split(" ::")[0],
        architecture=architecture,
        chosen=chosen,
        weights=weights[0],
        weights_printed=weights[1],
        pool=size("available_kv_gib") or 0,
        activation=size("activation_peak_gib"),
        non_torch=size("non_torch_gib"),
        graph_estimate=size("cudagraph_est_gib"),
        carries_bar=report["flags_complete"] is True and _version(report) is not None,
    )


def _device(report: dict[str, Any]) -> tuple[int | None, str | None]:
    from tonnage.planner.devices.catalogue import find_gpu
    from tonnage.planner.errors import TonnageError

    total, name = report["observed"].get("total_gpu_gib"), report["gpu"]
    found = None
    if name:
        try:
            found = find_gpu(name.partition(" (")[0])
        except TonnageError:
            found = None
    memory = int(total * GIB) if total else found.memory_bytes if found else None
    return memory, found.name if found else None


def _version(report: dict[str, Any]) -> str | None:
    from tonnage.planner.engines.version import parse_version
    from tonnage.planner.errors import TonnageError

    try:
        parse_version(report["engine_version"] or "")
    except TonnageError:
        return None
    return str(report["engine_version"])


def _flags(report: dict[str, Any], memory: int, gpu: str | None) -> Any:
    from tonnage.planner.plans import Deployment

    return Deployment(
        engine="vllm",
        engine_version=_version(report) or "0.11.0",
        device="cuda",
        gpu=gpu,
        device_memory=memory,
        gpu_memory_utilization=report["gpu_memory_utilization"],
        dtype="float16" if report["gpu"] == "Tesla T4" else "auto",
        max_model_len=report["max_model_len"],
        max_num_seqs=report["max_num_seqs"],
        max_num_batched_tokens=report["max_num_batched_tokens"],
        tensor_parallel_size=report["tensor_parallel"] or 1,
        enforce_eager=bool(report["enforce_eager"]),
    )


def _weights(
    report: dict[str, Any], source: Any, architecture: Architecture, chosen: Resolved
) -> tuple[int, bool] | None:
    """(bytes per GPU, whether they are the printed ones): planned where the row says the format, else the
    engine's own figure, because a model's name is no quantization config."""
    from tonnage.planner.errors import TonnageError
    from tonnage.planner.planning.stages import rank_architecture
    from tonnage.planner.planning.weights import sum_weights
    from tonnage.planner.quantization.read import check_quantization, read_quantization

    printed = report["observed"].get("model_load_gib")
    if quantization_known(report):
        try:
            quantization = read_quantization(source.config, None)
            check_quantization(architecture, quantization, "vllm")
            part = rank_architecture(architecture, chosen.flags, 0)
            return sum_weights(part, quantization, chosen.flags).total, False
        except TonnageError:
            pass
    return None if printed is None else (int(printed * GIB), True)


def fit(rows: Sequence[Row]) -> Coefficients:
    """Medians over sources (each counts once); the spread covers 90 % of them, left out one at a time."""
    values = _values(rows)
    sources = sorted({row.source for row in rows if row.carries_bar})
    errors = []
    for source in sources:
        others = _values([row for row in rows if row.source != source])
        own = [row for row in rows if row.source == source and row.carries_bar]
        errors.append(median(abs(row.planned_pool(others) - row.pool) / row.device for row in own))
    errors.sort()
    spread = errors[min(len(errors) - 1, int(0.9 * len(errors)))] if errors else _MOST_SPREAD
    return replace(values, spread=min(_MOST_SPREAD, max(_LEAST_SPREAD, 1.25 * spread)))


def _values(rows: Sequence[Row]) -> Coefficients:
    from tonnage.planner.engines.runtime.estimate import Coefficients
    from tonnage.planner.engines.runtime.gpu import SAMPLER_BYTES, forward_bytes
    from tonnage.planner.engines.vllm.versions import rules

    sort: dict[str, list[float]] = {}
    fused: dict[str, list[float]] = {}
    alone: dict[str, list[float]] = {}
    parallel: dict[str, list[float]] = {}
    graphs: dict[str, list[float]] = {}
    for row in rows:
        ranks = row.chosen.flags.tensor_parallel_size
        if row.non_torch is not None:
            (parallel if ranks > 1 else alone).setdefault(row.source, []).append(row.non_torch)
        if row.graph_estimate is not None:
            graphs.setdefault(row.source, []).append(row.graph_estimate)
        peak = row.activation
        if peak is None and row.carries_bar:
            peak = row.chosen.limit - row.weights - row.pool - (row.graph_estimate or 0)
        if peak is None:
            continue
        hidden = row.chosen.max_num_batched_tokens * row.architecture.hidden_size * 2
        forward = forward_bytes(row.architecture, row.chosen.max_num_batched_tokens, 2, ranks)
        each = (peak - hidden) / (row.chosen.max_num_seqs * row.architecture.vocab_size)
        if peak > 1.2 * forward and row.activation is not None and 0 < each < 64:
            target = fused if rules(row.chosen.version).fused_sampler else sort
            target.setdefault(row.source, []).append(each)
    return Coefficients(
        sampler_sort=_vote(sort, float(SAMPLER_BYTES)),
        sampler_fused=_vote(fused, float(SAMPLER_BYTES)),
        non_torch=int(_vote(alone, 0.0)),
        non_torch_parallel=int(_vote(parallel, 0.0)),
        graphs=int(_vote(graphs, 0.0)),
        spread=_MOST_SPREAD,
    )


def _vote(values: dict[str, list[float]], otherwise: float) -> float:
    """Median over sources of each source's median."""
    return median(median(found) for found in values.values()) if values else otherwise
