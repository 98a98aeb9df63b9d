"""Section ``published``: published starts of vLLM that no coefficient was fitted to, by kind of device.

Each start is planned from its flags with the shipped coefficients, and with coefficients of a fit that leaves
out all starts on the same kind of device. Errors are shares of the memory of one GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from statistics import fmean, median
from typing import Any

from accuracy import startups
from accuracy.common import Inputs, Section, read_jsonl
from accuracy.reports import GIB, model_config, quantization_known
from accuracy.runtime_fit import FitRow, fit, load_rows
from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import find_gpu
from tonnage.planner.engines.vllm.framework import fused_all_reduce
from tonnage.planner.errors import TonnageError
from tonnage.planner.planning.build import plan_source
from tonnage.planner.planning.size import Sizer
from tonnage.planner.plans import Plan
from tonnage.planner.source.resolve import ModelSource

NAME = "published"
_FIELDS = {field.name for field in fields(Deployment)}


@dataclass(frozen=True)
class PublishedStart:
    """One published start.

    Attributes:
        name: Version, model and device.
        source: Repository and file, or the address of a page.
        found: The model.
        flags: The deployment.
        pool: Printed bytes of the KV pool of one GPU.
        weights: Printed bytes of the weights of one GPU, or None.
    """

    name: str
    source: str
    found: ModelSource
    flags: Deployment
    pool: int
    weights: int | None

    @property
    def kind(self) -> str:
        """Return the catalogue's name of the device."""
        return self.flags.gpu or "unknown"


def load(inputs: Inputs) -> tuple[list[PublishedStart], list[str]]:
    """Return (starts with a config and a known device, the others with the reason)."""
    assert inputs.published is not None
    starts, left_out = [], []
    for index, row in enumerate(read_jsonl(inputs.published)):
        name = f"vLLM {row['engine_version']} {row['model']} on {row['gpu']}, line {index}"
        config = model_config(inputs, row)
        if config is None or not quantization_known(row):
            left_out.append(f"{name}: no config")
            continue
        try:
            flags = _flags(row)
        except TonnageError as error:
            left_out.append(f"{name}: {error}")
            continue
        found = ModelSource(row["model"], row["model"], config, "folder")
        seen = row["observed"]
        weights = seen.get("model_load_gib")
        pool = int(seen["available_kv_gib"] * GIB)
        starts.append(
            PublishedStart(
                name, row["source"], found, flags, pool, None if weights is None else int(weights * GIB)
            )
        )
    return starts, left_out


def _flags(row: dict[str, Any]) -> Deployment:
    total = row["observed"].get("total_gpu_gib")
    given = {name: value for name, value in (row["other_flags"] or {}).items() if name in _FIELDS}
    return Deployment(
        engine="vllm",
        engine_version=row["engine_version"],
        device="cuda",
        gpu=find_gpu(row["gpu"]).name,
        device_memory=None if total is None else int(total * GIB),
        gpu_memory_utilization=row["gpu_memory_utilization"],
        max_model_len=row["max_model_len"],
        max_num_seqs=row["max_num_seqs"],
        max_num_batched_tokens=row["max_num_batched_tokens"],
        tensor_parallel_size=row["tensor_parallel"] or 1,
        pipeline_parallel_size=row["pipeline_parallel"] or 1,
        enforce_eager=bool(row["enforce_eager"]),
        **given,
    )


def planned(start: PublishedStart) -> Plan:
    """Return the plan of a start, with the shipped coefficients."""
    return plan_source(start.found, start.flags)


def score(inputs: Inputs) -> Section | None:
    """Return the scores of the section, or None without configs and published starts."""
    if inputs.configs is None or inputs.published is None:
        return None
    starts, left_out = load(inputs)
    section = Section(covered=0)
    shipped: list[_Outcome] = []
    weights = []
    for start in starts:
        try:
            plan = planned(start)
        except TonnageError as error:
            section.refuse(start.name, error)
            continue
        low, high = plan.intervals["kv_pool_bytes"]
        outcome = _Outcome(start, plan.rank.kv_pool_bytes, int(low), int(high), plan.rank.total_bytes)
        shipped.append(outcome)
        section.rows += 1
        section.errors.append(abs(outcome.error))
        section.covered = (section.covered or 0) + outcome.inside
        if not outcome.inside:
            section.misses.append(f"{start.name}: {100 * outcome.error:+.2f} % of the GPU, outside")
        if start.weights is not None:
            weights.append(abs(plan.rank.weights_bytes - start.weights) / start.weights)
    section.extra |= {
        "unit": "share of GPU memory",
        "starts": len(starts),
        "by_device": _by_device(shipped),
        "device_left_out": _without_device(inputs, [outcome.start for outcome in shipped]),
        "interval_width": _spread([outcome.width for outcome in shipped]),
        "weights_error": _spread(weights),
        "left_out": left_out,
    }
    return section


@dataclass(frozen=True)
class _Outcome:
    """Planned bytes of a start's KV pool with their bounds, and the bytes of one GPU."""

    start: PublishedStart
    planned: int
    low: int
    high: int
    device: int

    @property
    def error(self) -> float:
        return (self.planned - self.start.pool) / self.device

    @property
    def inside(self) -> bool:
        return self.low <= self.start.pool <= self.high

    @property
    def width(self) -> float:
        return (self.high - self.low) / self.device


def _without_device(inputs: Inputs, starts: list[PublishedStart]) -> dict[str, Any]:
    """Return the scores with coefficients of a fit without the starts on the same kind of device."""
    others = load_rows(inputs)[0] if inputs.reports is not None else []
    if inputs.startups is not None:
        others = [*others, *map(startups.row, startups.load(inputs)[0])]
    found = []
    for kind in sorted({start.kind for start in starts}):
        fitted = fit([row for row in others if row.chosen.flags.gpu != kind])
        own = [start for start in starts if start.kind == kind]
        for start in own:
            row = _fit_row(start)
            low, high = row.pool_interval(fitted)
            found.append(_Outcome(start, row.planned_pool(fitted), low, high, row.device))
    return {**_summary(found), "by_device": _by_device(found)}


def _fit_row(start: PublishedStart) -> FitRow:

    size = Sizer(start.found).size(start.flags)
    part, chosen = size.parts[size.place], size.chosen
    return FitRow(
        name=start.name, source=start.source, architecture=part, chosen=chosen,
        weights=size.worst.rank.weights_bytes, weights_printed=False, pool=start.pool, activation=None,
        non_torch=None, graph_estimate=None, carries_bar=True, fused=fused_all_reduce(part, chosen),
        model=start.found.id,
    )  # fmt: skip


def _by_device(found: list[_Outcome]) -> dict[str, Any]:

    kinds = sorted({outcome.start.kind for outcome in found})
    return {kind: _summary([outcome for outcome in found if outcome.start.kind == kind]) for kind in kinds}


def _summary(found: list[_Outcome]) -> dict[str, Any]:

    return {
        **_spread([abs(outcome.error) for outcome in found]),
        "signed": [round(outcome.error, 5) for outcome in found] if len(found) < 8 else None,
        "inside": sum(outcome.inside for outcome in found),
        "width": median(outcome.width for outcome in found) if found else None,
        "mean_width": fmean(outcome.width for outcome in found) if found else None,
    }


def _spread(values: Iterable[float]) -> dict[str, Any]:

    ranked = sorted(values)
    return {
        "rows": len(ranked),
        "mean": fmean(ranked) if ranked else None,
        "median": median(ranked) if ranked else None,
        "p90": ranked[min(len(ranked) - 1, int(0.9 * len(ranked)))] if ranked else None,
        "worst": ranked[-1] if ranked else None,
    }
