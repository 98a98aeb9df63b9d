"""The fit of the GPU runtime model to start-up reports: usable rows, coefficients and spread.

benchmarks/fit_runtime.py uses it to write planner/engines/runtime/fitted.json. ``pool_from_flags`` fits once
per left-out source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from accuracy.common import Inputs, read_jsonl
from accuracy.reports import GIB, label, model_config, quantization_known
from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import capability_of, find_gpu, is_amd, shares_memory
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.engines.runtime.estimate import Coefficients, Runtime
from tonnage.planner.engines.runtime.gpu import coefficients
from tonnage.planner.engines.version import parse_version
from tonnage.planner.engines.vllm.activation import peak
from tonnage.planner.engines.vllm.budget import is_seen
from tonnage.planner.engines.vllm.framework import SMALL, is_hopper
from tonnage.planner.engines.vllm.graphs import capture_sizes
from tonnage.planner.engines.vllm.versions import rules
from tonnage.planner.errors import TonnageError
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.planning.deployment import complete
from tonnage.planner.planning.files import auto_dtype
from tonnage.planner.planning.stages import rank_architecture
from tonnage.planner.planning.weights import sum_weights
from tonnage.planner.plans import Resolved
from tonnage.planner.quantization.read import check_quantization, read_quantization
from tonnage.planner.source.resolve import ModelSource

# Limits of the interval's half-width, as shares of the device. The whole interval is at most 8 % of the device,
# and at most 3 % if every part was measured.
_LEAST_SPREAD, _MOST_SPREAD, _LEAST_SEEN = 0.01, 0.04, 0.01
# Bytes per logit without a report: bf16 logits 2; their float32 copy, sorted values, probabilities and their
# sums 4 each; indices 8, and another 8 while they are sorted (v1/sample/ops/topk_topp_sampler.py, 0.16).
SAMPLER_SORT = 34
# Bytes of the first capture, 512 tokens: 260, 256, 256 and 122 MiB in tests/data/startup_logs of 0.19.0.
GRAPH_FIRST = 256 << 20
_FEW_LAYERS = 20  # layers of a rank that separate the logged pipeline stages from the logged whole models


@dataclass(frozen=True)
class FitRow:
    """One report: the planner's resolution of its flags, and the engine's printed figures in bytes."""

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
    fused: int = 0  # derived part of ``non_torch``
    model: str = ""

    @property
    def device(self) -> int:
        """Return the device's memory in bytes."""
        return self.chosen.device_memory

    @property
    def hopper(self) -> bool:
        """Return whether the GPU is a data centre GPU from Hopper on."""
        return is_hopper(self.chosen.flags)

    @property
    def seen(self) -> bool:
        """Return whether logs that print every term cover each part of the plan."""
        return is_seen(self.architecture, self.chosen)

    @property
    def graphs_left(self) -> bool:
        """Return whether graphs were captured on trial within the profile run."""
        return rules(self.chosen.version).graphs_within_profile and not self.chosen.flags.enforce_eager

    def planned_pool(self, fitted: Coefficients) -> int:
        """Return the planned bytes of the pool with the coefficients ``fitted``."""
        return max(0, self.chosen.limit - self.weights - self.runtime(fitted).total)

    def pool_interval(self, fitted: Coefficients) -> tuple[int, int]:
        """Return the bounds of the planned pool with the coefficients ``fitted``."""
        bounds = self.runtime(fitted).sum_interval
        assert bounds is not None
        low, high = bounds
        least, most = self.chosen.memory_ends
        return max(0, least.limit - self.weights - high), max(0, most.limit - self.weights - low)

    def error(self, fitted: Coefficients) -> float:
        """Return the planned pool's absolute error as a share of the device.

        If the report does not print the device's total, it is the total of the catalogue's range that is
        nearest to the printed pool.
        """
        planned = self.planned_pool(fitted)
        low, high = (planned + end.limit - self.chosen.limit for end in self.chosen.memory_ends)
        return (
            max(low - self.pool, self.pool - high, 0 if low < high else abs(planned - self.pool)) / self.device
        )

    def runtime(self, fitted: Coefficients) -> Runtime:
        """Return the memory terms with the coefficients ``fitted``."""
        engine = engine_of(self.chosen.flags.engine)
        return engine.gpu_terms(self.architecture, self.chosen, fitted)

    def outside_pytorch(self) -> int | None:
        """Return the non-torch memory without its derived part, or None if not printed or not an NVIDIA GPU."""
        if self.non_torch is None or is_amd(self.chosen.flags.gpu):
            return None
        return self.non_torch - self.fused

    def outside_unified(self) -> int | None:
        """Return the rest of the budget on a machine whose GPU shares host memory, or None elsewhere."""
        if not shares_memory(self.chosen.flags.gpu) or not self.carries_bar or self.graph_estimate is None:
            return None

        inside = peak(self.architecture, self.chosen, coefficients()).total
        return self.chosen.limit - self.weights - self.pool - self.graph_estimate - inside

    def sampler_bytes_per_logit(self) -> float | None:
        """Return the bytes per logit of a sampler that sorts and is the peak, or None for another row."""
        if self.activation is None or rules(self.chosen.version).sampler != "sort":
            return None

        found = peak(self.architecture, self.chosen, coefficients())
        if self.activation < 1.2 * found.forward:
            return None
        stream = self.chosen.max_num_batched_tokens * self.architecture.hidden_size * 2
        rows = min(self.chosen.max_num_seqs, self.chosen.max_num_batched_tokens)
        each = (self.activation - stream - found.workspace) / (rows * self.architecture.vocab_size)
        return each if 0 < each < 64 else None

    def bytes_per_graph(self) -> float | None:
        """Return the bytes of each batch size after the first, or None with fewer sizes than by default."""
        count = len(capture_sizes(self.chosen))
        if self.graph_estimate is None or count < 51:
            return None
        return max(1 << 20, (self.graph_estimate - GRAPH_FIRST) / (count - 1))


def load_rows(inputs: Inputs) -> tuple[list[FitRow], list[str]]:
    """Return (rows, left-out reports with the reason)."""
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


def _row(inputs: Inputs, index: int, report: dict[str, Any]) -> FitRow | str:

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
        printed = gpu is None or report["observed"].get("total_gpu_gib") is not None
        flags = _flags(report, memory if printed else None, gpu)
        chosen = complete(flags, architecture, auto_dtype(source))
        weights = _weights(report, source, architecture, chosen)
    except TonnageError as error:
        return str(error)
    if weights is None:
        return "weights neither planned nor printed"

    def size(key: str) -> int | None:
        value = seen.get(key)
        return None if value is None else int(value * GIB)

    return FitRow(
        name=label(index, report),
        source=str(report["source"] or f"row {index}").split(" ::")[0],
        architecture=architecture,
        chosen=chosen,
        weights=weights[0],
        weights_printed=weights[1],
        pool=size("available_kv_gib") or 0,
        activation=size("activation_peak_gib"),
        non_torch=None if report["engine_version"] and _version(report) is None else size("non_torch_gib"),
        graph_estimate=size("cudagraph_est_gib"),
        carries_bar=report["flags_complete"] is True and _version(report) is not None,
    )


def _device(report: dict[str, Any]) -> tuple[int | None, str | None]:

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

    try:
        parse_version(report["engine_version"] or "")
    except TonnageError:
        return None
    return str(report["engine_version"])


def _flags(report: dict[str, Any], memory: int | None, gpu: str | None) -> Any:

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
    """Return (bytes per GPU, whether they are the printed ones), or None if they are not known.

    They are planned where the report states the format. Else the engine's own figure is used, because a
    model's name is no quantization config.
    """
    printed = report["observed"].get("model_load_gib")
    if quantization_known(report) and not report["speculative"]:  # drafts are not in these flags
        try:
            quantization = read_quantization(source.config, None)
            check_quantization(architecture, quantization, "vllm")
            part = rank_architecture(architecture, chosen.flags, 0)
            return sum_weights(part, quantization, chosen.flags).total, False
        except TonnageError:
            pass
    return None if printed is None else (int(printed * GIB), True)


def fit(rows: Sequence[FitRow]) -> Coefficients:
    """Return the coefficients: medians over sources, each with one vote.

    The spreads cover 90 % of the sources, left out one at a time.
    """
    values = _values(rows)
    errors: dict[bool, list[float]] = {False: [], True: []}
    unified: list[float] = []
    for source in sorted({row.source for row in rows if row.carries_bar}):
        others = _values([row for row in rows if row.source != source])
        own = [row for row in rows if row.source == source and row.carries_bar]
        shared = [row for row in own if shares_memory(row.chosen.flags.gpu)]
        for seen in (False, True):
            found = [row.error(others) for row in own if row.seen is seen and row not in shared]
            if found:
                errors[seen].append(median(found))
        if shared:
            unified.append(median(row.error(others) for row in shared))
    return replace(
        values,
        spread=_covering(errors[False], _LEAST_SPREAD),
        spread_seen=_covering(errors[True], _LEAST_SEEN),
        # A quarter more, because only one source has a GPU that shares its memory with the host.
        spread_unified=_covering([1.25 * error for error in unified], _LEAST_SPREAD),
    )


def _covering(errors: Sequence[float], least: float) -> float:
    """Return the error that 90 % of ``errors`` do not exceed, within bounds."""
    if not errors:
        return _MOST_SPREAD
    spread = sorted(errors)[min(len(errors) - 1, int(0.9 * len(errors)))]
    return min(_MOST_SPREAD, max(least, spread))


def _values(rows: Sequence[FitRow]) -> Coefficients:

    sort: _Votes = {}
    alone: _Votes = {}
    small: _Votes = {}
    hopper: _Votes = {}
    unified: _Votes = {}
    parallel: _Votes = {}
    ranks: _Votes = {}
    stage: _Votes = {}
    for row in rows:
        flags = row.chosen.flags
        _vote(sort, row, row.sampler_bytes_per_logit())
        outside = row.outside_pytorch()
        if outside is not None and not row.graphs_left:
            if flags.tensor_parallel_size == 1:
                later = row.hopper and rules(row.chosen.version).torch_2_8
                _vote(hopper if later else alone if row.device >= SMALL else small, row, outside)
            elif not row.hopper:
                _vote(parallel, row, outside)
        if outside is not None and row.hopper:
            if flags.pipeline_parallel_size > 1:
                _vote(stage, row, outside)
            elif flags.tensor_parallel_size == 2:
                _vote(ranks, row, outside)
        _vote(unified, row, row.outside_unified())
    each, layer = _graphs(rows)
    plain, two = _median(hopper, 0.0), _median(ranks, 0.0)
    left: _Votes = {}
    doubling: _Votes = {}
    for row in rows:
        outside, flags = row.outside_pytorch(), row.chosen.flags
        if outside is not None and row.hopper:
            if row.graphs_left and flags.tensor_parallel_size == flags.pipeline_parallel_size == 1:
                _vote(left, row, outside - plain)
            elif flags.tensor_parallel_size == 4:
                _vote(doubling, row, outside - two)
    return Coefficients(
        sampler_sort=_median(sort, float(SAMPLER_SORT)),
        non_torch=int(_median(alone, 0.0)),
        non_torch_small=int(_median(small, _median(alone, 0.0))),
        non_torch_hopper=int(plain),
        graph_profile=int(_median(left, 0.0)),
        non_torch_unified=int(_median(unified, _median(alone, 0.0))),
        # Hopper's ranks have NVSwitch and its buffers, so they say nothing about ranks on other GPUs.
        non_torch_parallel=int(_median(parallel, _median(alone, 0.0))),
        non_torch_ranks=int(two),
        non_torch_doubling=int(_median(doubling, 0.0)),
        non_torch_stage=int(_median(stage, 0.0)),
        graph_first=GRAPH_FIRST,
        graph_each=each,
        graph_layer=layer,
        spread=_MOST_SPREAD,
        spread_seen=_MOST_SPREAD,
        spread_unified=_MOST_SPREAD,
        capabilities=" ".join(f"{major}.{minor}" for major, minor in sorted(_capabilities(rows))),
    )


def _capabilities(rows: Sequence[FitRow]) -> set[tuple[int, int]]:

    found = (capability_of(row.chosen.flags.gpu) for row in rows if row.carries_bar and row.chosen.flags.gpu)
    return {capability for capability in found if capability is not None}


def _graphs(rows: Sequence[FitRow]) -> tuple[int, int]:
    """Return the bytes of a batch size, and its additional bytes per layer.

    They are the line through the medians of ranks with few and with many layers; each model and each number
    of layers has one vote.
    """
    votes: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        size = row.bytes_per_graph()
        if size is not None:
            layers = len({layer.layer for layer in row.architecture.cache_layers})
            votes.setdefault((row.model or row.name, layers), []).append(size)
    points = [(layers, median(found)) for (_, layers), found in votes.items()]
    few, many = ([p for p in points if (p[0] <= _FEW_LAYERS) is low] for low in (True, False))
    if not few or not many:
        return int(median(size for _, size in points)) if points else 0, 0
    (x0, y0), (x1, y1) = ((median(x for x, _ in side), median(y for _, y in side)) for side in (few, many))
    slope = max(0.0, (y1 - y0) / (x1 - x0))
    return int(y0 - slope * x0), int(slope)


_Votes = dict[str, list[float]]


def _vote(votes: _Votes, row: FitRow, value: float | None) -> None:
    if value is not None:
        votes.setdefault(row.source, []).append(value)


def _median(votes: _Votes, otherwise: float) -> float:
    """Return the median over sources of each source's median."""
    return median(median(found) for found in votes.values()) if votes else otherwise
