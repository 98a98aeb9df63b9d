"""Aims of the admission matrix: which cells miss them, by mode."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import Any

PEER = "default"  # vLLM's own scheduler
DEAR = 0.05  # share of the peer's time that computes tokens again, from which on recomputing is dear
ROUNDING = 1e-6

# Per cell: figure, then whether its ratio to the peer's must be at least or at most the bound.
RATIO_AIMS = {
    "tokens_per_second": (">=", 0.99),
    "ttft_p50_s": ("<=", 1.05),
    "ttft_p99_s": ("<=", 1.05),
    "between_tokens_p99_s": ("<=", 1.0),
}
DEAR_AIM = 1.05  # mean ratio of tokens/s over the cells where recomputing is dear
GUARANTEED_AIM = 0.9  # median ratio of tokens/s over all cells


def ratios(figures: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return each mode's figures over the peer's."""
    peer = figures[PEER]
    return {
        mode: {key: round(each[key] / peer[key], 7) for key in RATIO_AIMS if peer[key]}
        for mode, each in figures.items()
        if mode != PEER
    }


def summarized(cells: Sequence[dict[str, Any]], modes: Iterable[str]) -> dict[str, Any]:
    """Return `summary` and `missed`: per mode, averages over cells, and for each missed aim its cells."""
    summary: dict[str, Any] = {}
    missed: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for mode in modes:
        rates = [cell["ratios"][mode]["tokens_per_second"] for cell in cells]
        dear = [
            cell["ratios"][mode]["tokens_per_second"]
            for cell in cells
            if cell["figures"][PEER]["recompute_share"] >= DEAR
        ]
        summary[mode] = {
            "tokens_per_second": {
                "least": min(rates), "median": round(statistics.median(rates), 4),
                "mean": round(statistics.mean(rates), 4), "most": max(rates),
            },
            "dear_cells": len(dear),
            "dear_tokens_per_second_mean": round(statistics.mean(dear), 4) if dear else None,
            "preemptions": sum(cell["figures"][mode]["preemptions"] for cell in cells),
            "peer_preemptions": sum(cell["figures"][PEER]["preemptions"] for cell in cells),
        }  # fmt: skip
        missed[mode] = _missed(cells, mode, summary[mode])
    return {"summary": summary, "missed": missed}


def _missed(cells: Sequence[dict[str, Any]], mode: str, summary: dict[str, Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}

    def miss(aim: str, cell: str, figure: float) -> None:
        found.setdefault(aim, []).append({"cell": cell, "figure": figure})

    for cell in cells:
        if lost := cell["figures"][mode]["lost"]:
            miss("lost = 0", cell["cell"], lost)
        if mode == "guaranteed":
            if preemptions := cell["figures"][mode]["preemptions"]:
                miss("preemptions = 0", cell["cell"], preemptions)
            continue
        for key, (relation, bound) in RATIO_AIMS.items():
            figure = cell["ratios"][mode].get(key, 1.0)
            excess = bound - figure if relation == ">=" else figure - bound
            if excess > ROUNDING:
                miss(f"{key} {relation} {bound}", cell["cell"], figure)
    median, dear = summary["tokens_per_second"]["median"], summary["dear_tokens_per_second_mean"]
    if mode == "guaranteed":
        if median < GUARANTEED_AIM:
            miss(f"median tokens_per_second >= {GUARANTEED_AIM}", "all", median)
    elif dear is not None and dear < DEAR_AIM:
        miss(f"mean tokens_per_second where recomputing is dear >= {DEAR_AIM}", "dear", dear)
    return found


def check(result: dict[str, Any]) -> int:
    """Name the missed aims on stderr; return the exit code."""
    for mode, aims in result["missed"].items():
        for aim, cells in aims.items():
            print(f"missed by {mode}: {aim} in {len(cells)} cells, such as {cells[0]}", file=sys.stderr)
    return int(any(result["missed"].values()))
