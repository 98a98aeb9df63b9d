"""Section ``startups``: vLLM's start-ups with every term in the log, each term compared with the plan's.

The shipped planner is scored, with the coefficients in fitted.json. The worst rank of each start counts,
because its pool decides. ``model_left_out`` scores the KV pool with each model's starts left out of the fit,
because a fitted figure must not be judged by its own data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from accuracy.common import Inputs, Section, read_jsonl
from accuracy.reports import GIB
from accuracy.runtime_fit import FitRow, fit, load_rows
from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.vllm.framework import fused_all_reduce
from tonnage.planner.planning.build import plan_source
from tonnage.planner.planning.size import Sizer
from tonnage.planner.plans import Plan
from tonnage.planner.source.resolve import ModelSource

NAME = "startups"
SWEEP = "jgchn/llm-d-planner"  # rows of one sweep are not independent, so they share one vote
# Term of the log -> component of the plan. Errors are shares of the device, because some terms are small.
TERMS = {
    "weights_gib": "weights_bytes",
    "torch_peak_gib": "activation_bytes",
    "non_torch_gib": "framework_bytes",
    "cudagraph_estimate_gib": "cuda_graph_bytes",
    "available_kv_gib_worst": "kv_pool_bytes",
}


@dataclass(frozen=True)
class Start:
    """One successful start.

    Attributes:
        name: Its identifier.
        found: The model.
        flags: The deployment.
        logged: Bytes of the deciding rank, by term of the plan.
        tokens: Printed tokens, or None.
        concurrency: Printed concurrency, or None.
    """

    name: str
    found: ModelSource
    flags: Deployment
    logged: dict[str, int]
    tokens: int | None
    concurrency: float | None


def load(inputs: Inputs) -> tuple[list[Start], list[str]]:
    """Load the start-up logs and return (starts, left-out starts with the reason)."""
    assert inputs.startups is not None
    starts, left_out = [], []
    for row in read_jsonl(inputs.startups):
        seen = row["observed"]
        if row["status"] != "ok":
            left_out.append(f"{row['id']}: {row['failure']['class'] if row['failure'] else row['status']}")
            continue
        config = inputs.config(row["config"] or "")
        if config is None:
            left_out.append(f"{row['id']}: no config")
            continue
        flags = Deployment(
            engine="vllm",
            engine_version=row["engine_version"],
            device="cuda",
            gpu="h100-80g" if row["gpu"] == "H100-80GB" else None,
            gpu_memory_utilization=row["gpu_memory_utilization"],
            dtype=row["dtype"] or "auto",
            quantization=row["quantization"],
            kv_cache_dtype=row["kv_cache_dtype"] or "auto",
            max_model_len=row["max_model_len"],
            max_num_seqs=row["max_num_seqs"],
            max_num_batched_tokens=row["max_num_batched_tokens"],
            tensor_parallel_size=row["tensor_parallel"] or 1,
            pipeline_parallel_size=row["pipeline_parallel"] or 1,
            enforce_eager=bool(row["enforce_eager"]),
            enable_prefix_caching=row["enable_prefix_caching"],
        )
        worst = dict(seen)
        worst["available_kv_gib_worst"] = seen["available_kv_gib_worst"] or seen["available_kv_gib"]
        logged = {term: int(worst[key] * GIB) for key, term in TERMS.items() if worst.get(key) is not None}
        starts.append(
            Start(
                row["id"], ModelSource(row["model"], row["model"], config, "folder"), flags, logged,
                seen["kv_tokens"], seen["max_concurrency"],
            )
        )  # fmt: skip
    return starts, left_out


def planned(start: Start) -> Plan:
    """Return the plan of a start, with the shipped coefficients."""
    return plan_source(start.found, start.flags)


def row(start: Start) -> FitRow:
    """Return a start as a row for the fit of the GPU coefficients."""
    size = Sizer(start.found).size(start.flags)
    part, chosen = size.parts[size.place], size.chosen
    return FitRow(
        name=start.name, source=SWEEP, architecture=part, chosen=chosen,
        weights=size.worst.rank.weights_bytes, weights_printed=False, pool=start.logged["kv_pool_bytes"],
        activation=start.logged.get("activation_bytes"), non_torch=start.logged.get("framework_bytes"),
        graph_estimate=start.logged.get("cuda_graph_bytes"), carries_bar=True,
        fused=fused_all_reduce(part, chosen), model=start.found.id,
    )  # fmt: skip


def score(inputs: Inputs) -> Section | None:
    """Return the scores of the section, or None without configs and start-ups."""
    if inputs.configs is None or inputs.startups is None:
        return None
    starts, left_out = load(inputs)
    section = Section(covered=0)
    errors: dict[str, list[float]] = {term: [] for term in TERMS.values()}
    signed: list[float] = []
    capacity: dict[str, list[float]] = {"tokens": [], "max_concurrency": []}
    inside = {"tokens": 0, "max_concurrency": 0}
    width = 0.0
    for start in starts:
        plan = planned(start)
        for term, logged in start.logged.items():
            ours = _component(plan, term)
            if term == "kv_pool_bytes":
                section.add(start.name, ours, logged)
                signed.append((ours - logged) / logged)
                low, high = plan.intervals[term]
                section.covered = (section.covered or 0) + (low <= logged <= high)
                width = max(width, (high - low) / plan.rank.total_bytes)
            errors[term].append((ours - logged) / plan.rank.total_bytes)
        for name, printed in (("tokens", start.tokens), ("max_concurrency", start.concurrency)):
            if printed is not None:
                low, high = plan.intervals[name]
                capacity[name].append(abs(getattr(plan.kv_cache, name) - printed) / printed)
                inside[name] += low <= printed <= high
    section.extra |= {
        "widest_interval": width,
        "capacity": {
            name: {"rows": len(found), "mean_error": mean(found), "covered": inside[name]}
            for name, found in capacity.items()
        },
        "mean_error": mean(section.errors), "mean_signed_error": mean(signed),
        "model_left_out": _left_out(inputs, starts),
        "terms_share_of_gpu": {term: _spread(found) for term, found in errors.items() if found},
        "left_out": left_out,
    }  # fmt: skip
    return section


def _left_out(inputs: Inputs, starts: list[Start]) -> dict[str, Any]:
    """Return the errors of the KV pool with each model's starts left out of the fit."""
    reports = load_rows(inputs)[0] if inputs.reports is not None else []
    rows = [row(start) for start in starts]
    errors, covered, width = [], 0, 0.0
    for model in sorted({item.model for item in rows}):
        fitted = fit([*reports, *(item for item in rows if item.model != model)])
        for item in (item for item in rows if item.model == model):
            errors.append(abs(item.planned_pool(fitted) - item.pool) / item.pool)
            low, high = item.pool_interval(fitted)
            covered += low <= item.pool <= high
            width = max(width, (high - low) / item.device)
    errors.sort()
    return {
        "rows": len(errors), "mean_error": mean(errors), "median_error": median(errors),
        "p90_error": errors[int(0.9 * len(errors))], "covered": covered, "widest_interval": width,
    }  # fmt: skip


def _component(plan: Plan, term: str) -> int:
    rank = plan.rank
    if term == "cuda_graph_bytes" and not rank.cuda_graph_bytes:
        return next((item.value for item in plan.terms if item.name == "cuda_graphs_beside_bytes"), 0)
    value: int = getattr(rank, term)
    return value


def _spread(errors: Iterable[float]) -> dict[str, Any]:
    sizes = sorted(map(abs, errors))
    return {
        "rows": len(sizes), "mean": mean(sizes), "median": median(sizes),
        "p90": sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))], "signed": mean(errors),
    }  # fmt: skip
