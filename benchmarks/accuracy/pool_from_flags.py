"""Section ``pool_from_flags``: vLLM's KV pool from flags alone, as a share of GPU memory.

The coefficients are fitted with one source left out at a time. Only rows with complete flags and an engine
version are graded. Each source counts once, with its median row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from accuracy import startups
from accuracy.common import Inputs, Section
from accuracy.runtime_fit import FitRow, fit, load_rows
from tonnage.planner.engines.runtime.estimate import Coefficients
from tonnage.planner.engines.runtime.gpu import coefficients

NAME = "pool_from_flags"


def score(inputs: Inputs, more: Sequence[FitRow] = ()) -> Section | None:
    """Return the scores of the section, or None without configs and reports.

    ``more`` is rows of other inputs that the fits may use.
    """
    if inputs.configs is None or inputs.reports is None:
        return None

    rows, left_out = load_rows(inputs)
    if not more and inputs.startups is not None:
        more = list(map(startups.row, startups.load(inputs)[0]))
    section = Section(covered=0)
    by_source: dict[str, list[FitRow]] = {}
    for row in rows:
        by_source.setdefault(row.source, []).append(row)
    details, others, width = [], [], 0.0
    for source, own in sorted(by_source.items()):
        fitted = fit([*(row for row in rows if row.source != source), *more])
        graded = [row for row in own if row.carries_bar]
        errors, covered = [], []
        for row in own:
            planned = row.planned_pool(fitted)
            error = (planned - row.pool) / row.device
            note = " (weights as printed)" if row.weights_printed else ""
            line = f"{row.name}: {100 * error:+.2f} % of the GPU{note}"
            if row in graded:
                errors.append(abs(error))
                low, high = row.pool_interval(fitted)
                covered.append(low <= row.pool <= high)
                width = max(width, (high - low) / row.device)
                details.append(line)
            else:
                others.append(line)
        if not graded:
            continue
        section.rows += 1
        section.errors.append(median(errors))
        section.exact += median(errors) < 0.001
        section.covered = (section.covered or 0) + (sum(covered) * 2 > len(covered))
    whole = fit([*rows, *more])
    graded = [row for row in rows if row.carries_bar]
    section.misses = [line for line in details if abs(float(line.split(": ")[-1].split(" %")[0])) > 1.5]
    section.extra |= {
        "unit": "share of GPU memory, one vote per source",
        "widest_interval": width,
        "shipped": _summary((row, coefficients()) for row in graded),
        "gpu_left_out": _summary(_without_gpu(graded, [*rows, *more])),
        "graded": details,
        "reported_only": others,
        "left_out": left_out,
        "coefficients": {k: getattr(whole, k) for k in whole.__dataclass_fields__},
    }
    return section


def _without_gpu(graded: Sequence[FitRow], rows: Sequence[FitRow]) -> Iterator[tuple[FitRow, Coefficients]]:
    """Yield each row of a known GPU with a fit that excludes all starts on that type of GPU."""
    for gpu in sorted({row.chosen.flags.gpu for row in graded if row.chosen.flags.gpu}):
        fitted = fit([row for row in rows if row.chosen.flags.gpu != gpu])
        for row in graded:
            if row.chosen.flags.gpu == gpu:
                yield row, fitted


def _summary(pairs: Iterable[tuple[FitRow, Coefficients]]) -> dict[str, Any]:
    """Return the errors with one vote per source, its median row.

    ``covered`` counts the sources for which most rows lie inside the interval.
    """
    errors: dict[str, list[float]] = {}
    inside: dict[str, list[bool]] = {}
    width = 0.0
    for row, fitted in pairs:
        low, high = row.pool_interval(fitted)
        errors.setdefault(row.source, []).append(abs(row.planned_pool(fitted) - row.pool) / row.device)
        inside.setdefault(row.source, []).append(low <= row.pool <= high)
        width = max(width, (high - low) / row.device)
    medians = sorted(median(found) for found in errors.values())
    return {
        "sources": len(medians), "median_error": median(medians), "worst_error": medians[-1],
        "covered": sum(2 * sum(found) > len(found) for found in inside.values()), "widest_interval": width,
    }  # fmt: skip
