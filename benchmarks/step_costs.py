"""Milliseconds of one engine step as a function of its batch, for schedulers that are driven under a clock.

Sources are in tests/data/SOURCES.md (step_times). A cost is only as good as a straight line through public
figures: it ranks scheduling decisions, it does not predict a server.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

ROWS = Path(__file__).parents[1] / "tests" / "data" / "step_times" / "llama_70b_h100_tp4.jsonl"


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of one step, linear in the tokens of its batch."""

    fixed: float
    """Milliseconds of a step, whatever its batch."""
    prefill: float
    """Milliseconds per prompt token, computed again or for the first time."""
    decode: float
    """Milliseconds per sequence that gets one token."""
    context: float = 0.0
    """Milliseconds per 1,000 tokens of context of the sequences in the batch."""

    def seconds(self, prefill: float, decode: float, context: float) -> float:
        """Return the seconds of a step.

        Args:
            prefill: Prompt tokens in the batch.
            decode: Sequences in the batch that get one token.
            context: Tokens of context of all sequences in the batch.
        """
        ms = self.fixed + self.prefill * prefill + self.decode * decode + self.context * context / 1000
        return ms / 1000


def fitted(rows: list[dict[str, Any]]) -> StepCost:
    """Return the non-negative least-squares fit to benchmark rows, in relative errors.

    In the steady state of a closed loop with C clients, C sequences decode in each step, C / output prompts
    arrive per step, and a sequence has on average its prompt and half its output as context. The mean time
    per output token is then the time of the mean step.

    Args:
        rows: Rows with `concurrency`, `input_tokens`, `output_tokens` (per request) and `tpot_ms`.
    """
    terms = np.array(
        [
            (
                1.0,
                row["concurrency"] * row["input_tokens"] / row["output_tokens"],
                row["concurrency"],
                row["concurrency"] * (row["input_tokens"] + row["output_tokens"] / 2) / 1000,
            )
            for row in rows
        ]
    )
    measured = np.array([row["tpot_ms"] for row in rows])
    terms, ones = terms / measured[:, None], np.ones(len(rows))
    best, least = np.zeros(4), float("inf")
    for count in range(1, 5):  # the best fit with four non-negative terms is the best one over all subsets
        for chosen in combinations(range(4), count):
            solution = np.linalg.lstsq(terms[:, chosen], ones, rcond=None)[0]
            error = float(np.square(terms[:, chosen] @ solution - ones).sum())
            if solution.min() >= 0 and error < least:
                best, least = np.zeros(4), error
                best[list(chosen)] = solution
    return StepCost(*(round(float(value), 5) for value in best))


def published_rows() -> list[dict[str, Any]]:
    """Return the benchmark rows of the 70B model."""
    return [json.loads(line) for line in ROWS.read_text().splitlines()]


@cache
def named() -> dict[str, StepCost]:
    """Return the costs of the matrix by name.

    - `cpu`: what vLLM 0.32 takes for the 135M demo model on two CPU cores.
    - `gpu`: a prefilled token is almost free.
    - `h100-8b`: Llama-3.1-8B-Instruct on one H100 under vLLM, coefficients as published (no rows are public).
    - `h100-70b-tp4`: Llama-3.1-70B-Instruct in fp8 on four H100 under vLLM, fitted here to published rows.
    """
    return {
        "cpu": StepCost(17, 1, 1),
        "gpu": StepCost(20, 0.03, 0.03),
        "h100-8b": StepCost(5.7527, 0.01725, 0.006),
        "h100-70b-tp4": fitted(published_rows()),
    }


def parsed(text: str) -> tuple[str, StepCost]:
    """Return the name and the cost in `NAME=fixed,prefill,decode,context` (milliseconds).

    Raises:
        ValueError: The text has another form.
    """
    name, _, values = text.partition("=")
    numbers = [float(value) for value in values.split(",")]
    if not name or not 3 <= len(numbers) <= 4 or min(numbers) < 0:
        raise ValueError(f"{text!r} is not NAME=fixed,prefill,decode,context in milliseconds")
    return name, StepCost(*numbers)
