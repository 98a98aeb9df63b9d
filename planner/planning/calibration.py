"""Calibration of plans by measured engine starts, from the file that `tonnage fit-log --calibrate` writes.

The file has one entry for each rank of each start. An entry holds the planned and the logged bytes of the
memory terms that must be measured: framework, activations and CUDA graphs. A plan uses the entries of its own
engine, minor version and GPU:

* Framework: the median of the logged values under the same tensor and pipeline parallelism.
* Activations and CUDA graphs: the planned value times the median of logged / planned. Starts of models of the
same shape are preferred; without one, all starts count.

A calibrated interval covers all measured values and a margin on both sides of them. The margin is half the
width of the uncalibrated interval, divided by the number of starts plus one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.engines.runtime.estimate import Estimate, Runtime
from tonnage.planner.engines.version import parse_version
from tonnage.planner.errors import DeploymentError
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.plans import Resolved

FORMAT = 1
TERMS = ("framework_bytes", "activation_bytes", "cuda_graph_bytes")
# Maximum relative difference between two memory sizes of the same GPU type. Engines log memory in steps of
# 0.01 GiB, and the catalogue rounds differently.
_SAME_DEVICE = 0.01

Entry = dict[str, Any]


def read_calibration(path: str) -> list[Entry]:
    """Return the entries of the calibration file `path`.

    Raises:
        DeploymentError: if the file cannot be read or is not a calibration file.
    """
    try:
        changed = Path(path).stat().st_mtime_ns
    except OSError as error:
        raise DeploymentError(f"{path}: {error.strerror}", field="--calibration") from None
    return _read(path, changed)


@cache
def _read(path: str, changed: int) -> list[Entry]:
    """Return the checked entries of a calibration file, cached by path and modification time.

    `changed` is the modification time in nanoseconds.
    """
    try:
        content = json.loads(Path(path).read_text())
        if content["tonnage_calibration"] != FORMAT:
            raise ValueError
        for entry in content["starts"]:
            _check(entry)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, DeploymentError):
        raise DeploymentError(
            f"{path} is not a calibration file",
            field="--calibration",
            hint="tonnage fit-log --calibrate writes one",
        ) from None
    return list(content["starts"])


def _check(entry: Entry) -> None:
    """Check the types and keys of one entry of a calibration file.

    Raises:
        ValueError, KeyError, TypeError, DeploymentError: the entry is invalid.
    """
    parse_version(entry["version"] or "0")
    sizes = [size for pair in entry["terms"].values() for size in pair.values()]
    counts = [entry["device_memory"], *entry["ranks"], *sizes]
    texts = [entry["engine"], entry["log"], entry["gpu"] or ""]
    if not all(isinstance(n, int) for n in counts) or not all(isinstance(text, str) for text in texts):
        raise ValueError
    if not isinstance(entry["shape"], list) or not {*entry["terms"]} <= {*TERMS}:
        raise ValueError
    if any({*pair} != {"planned", "logged"} for pair in entry["terms"].values()):
        raise ValueError


def shape_of(architecture: Architecture, flags: Deployment) -> list[object]:
    """Return the model's shape: [class name, hidden size, vocabulary size, dtype].

    The activation memory of an engine step depends on these values.

    Measured activations of one model therefore apply to every model of the same shape. All ranks of a model
    have the same shape.
    """
    return [architecture.class_name, architecture.hidden_size, architecture.vocab_size, flags.dtype]


def calibrated(runtime: Runtime, architecture: Architecture, chosen: Resolved) -> Runtime:
    """Return the memory terms `runtime`, corrected by the engine starts measured in the --calibration file.

    Without --calibration, they are unchanged.

    Raises:
        DeploymentError: the file is not a calibration file.
    """
    if chosen.flags.calibration is None:
        return runtime
    entries = _matching(read_calibration(chosen.flags.calibration), chosen)
    ranks = [chosen.flags.tensor_parallel_size, chosen.flags.pipeline_parallel_size]
    own = [entry for entry in entries if [*entry["ranks"]] == ranks]
    shape = shape_of(architecture, chosen.flags)
    alike = [entry for entry in entries if entry["shape"] == shape] or entries
    beside = runtime.beside
    changed = replace(
        runtime,
        framework=_measured(runtime.framework, own),
        activation=_scaled(runtime.activation, "activation_bytes", alike),
        graphs=_scaled(runtime.graphs, "cuda_graph_bytes", alike),
        beside=None if beside is None else _scaled(beside, "cuda_graph_bytes", alike),
    )
    before = (runtime.framework, runtime.activation, runtime.graphs)
    after = (changed.framework, changed.activation, changed.graphs)
    if runtime.sum_interval is None or after == before:
        return changed
    # Calibration narrows the interval of each term. The interval of their sum is narrowed by the same factor as
    # the total width of the terms' intervals.
    width = sum(e.high - e.low for e in before)
    share = sum(e.high - e.low for e in after) / width if width else 1.0
    low, high = (int((bound - runtime.total) * min(share, 1.0)) for bound in runtime.sum_interval)
    return replace(changed, sum_interval=(max(0, changed.total + low), changed.total + high))


def calibration_notes(chosen: Resolved) -> tuple[str, ...]:
    """Return a note on how many engine starts of the --calibration file apply to the plan, if one is given."""
    flags = chosen.flags
    if flags.calibration is None:
        return ()
    entries = _matching(read_calibration(flags.calibration), chosen)
    starts = len({entry["log"] for entry in entries})
    where = f"{flags.engine} {_minor(flags)} on {flags.gpu or 'this device'}"
    if not starts:
        return (f"{flags.calibration} has no start of {where}: the plan is as without it",)
    return (f"calibrated by {starts} start{'s' if starts > 1 else ''} of {where} ({flags.calibration})",)


def _matching(entries: list[Entry], chosen: Resolved) -> list[Entry]:
    """Return the calibration entries that have the plan's engine, minor version, GPU and device memory."""
    flags = chosen.flags
    return [
        entry
        for entry in entries
        if entry["engine"] == flags.engine
        and parse_version(entry["version"] or "0")[:2] == chosen.version[:2]
        and abs(entry["device_memory"] - chosen.device_memory) <= _SAME_DEVICE * chosen.device_memory
        and (None in (entry["gpu"], flags.gpu) or entry["gpu"] == flags.gpu)
    ]


def _minor(flags: Deployment) -> str:
    """Return the engine's version as text, without the patch number; empty for engines without versions."""
    if not any(engine_of(flags.engine).newest):
        return ""
    return ".".join(map(str, parse_version(flags.engine_version or "0")[:2]))


def _median(values: list[float]) -> float:
    """Return the median of a list that is not empty."""
    from statistics import median  # lazy import, only for a calibrated plan, because it takes 4 ms

    return median(values)


def _measured(estimate: Estimate, entries: list[Entry]) -> Estimate:
    """Return `estimate` with the median of the framework bytes logged in `entries` as its value."""
    pairs = [entry["terms"].get("framework_bytes") for entry in entries]
    logged = [float(pair["logged"]) for pair in pairs if pair]
    return _around(estimate, logged, f"median of {len(logged)} logged")


def _scaled(estimate: Estimate, term: str, entries: list[Entry]) -> Estimate:
    """Return `estimate` multiplied by the median of logged / planned bytes of the memory term `term`.

    The median is over the calibration entries `entries`.
    """
    pairs = [entry["terms"][term] for entry in entries if term in entry["terms"]]
    factors = [pair["logged"] / pair["planned"] for pair in pairs if pair["planned"] and pair["logged"] > 0]
    values = [estimate.value * factor for factor in factors]
    said = f"{estimate.formula} x {_median(factors):.3f}, median of {len(factors)} starts" if factors else ""
    return _around(estimate, values, said)


def _around(estimate: Estimate, values: list[float], formula: str) -> Estimate:
    """Return an estimate whose value is the median of `values` and whose bounds contain all of them.

    The bounds are the smallest value minus a margin and the largest plus the margin. The margin is half the
    width of `estimate`'s interval, divided by the number of values plus one.
    """
    if not values or not estimate.high:
        return estimate
    beyond = (estimate.high - estimate.low) / 2 / (len(values) + 1)
    low, high = max(0, int(min(values) - beyond)), int(max(values) + beyond)
    return Estimate(int(_median(values)), low, high, formula, "tonnage fit-log --calibrate")
