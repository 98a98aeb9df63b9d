"""The cost of an engine step in seconds, fitted online from the steps that ran.

Admission trades blocks that stay idle against tokens that are recomputed after a preemption. Which of the two
costs more depends on the engine, so its step times are measured. On a CPU one recomputed token costs 1/17 of a
step, on a GPU 1/700.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np

# The fitted step cost is used after `_STEPS` steps, of which at least `_PROMPT_STEPS` computed prompt tokens.
# With fewer steps, the four costs cannot be separated (benchmarks/vllm_admission.py --matrix, cold start).
_STEPS, _PROMPT_STEPS = 64, 8
# The sums of the least-squares fit are multiplied by `_KEEP` every `_EVERY` steps, so that the last 700 steps
# have half of the weight.
_KEEP, _EVERY = 0.94, 64
# A step that took more than this many times its forecast duration is left out of the fit as an outlier, such as
# a pause of the machine or a first compilation.
_OUTLIER = 5.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost model of an engine step: seconds as a linear function of its tokens and sequences.

    Attributes:
        fixed: Seconds of every step.
        prefill: Seconds per computed token, not counting the first token of each sequence.
        sequence: Seconds per sequence that computes in the step.
        context: Seconds per token of KV cache held by running sequences.
    """

    fixed: float
    prefill: float
    sequence: float
    context: float

    def seconds(self, prefill_tokens: int, sequences: int, context_tokens: int) -> float:
        """Return the forecast seconds of one engine step.

        ``prefill_tokens`` are the computed tokens beyond the first of each sequence.
        """
        return (
            self.fixed
            + self.prefill * prefill_tokens
            + self.sequence * sequences
            + self.context * context_tokens
        )


class CostFit:
    """A least-squares fit of `StepCost` to the steps so far, with decaying weights and no negative cost.

    Attributes:
        steps: Number of observed steps.
        cost: The fitted cost of an engine step; None before 64 observed steps, 8 of them with prompt tokens.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._prompt_steps = 0
        self._squares = np.zeros((4, 4))
        self._products = np.zeros(4)
        self.cost: StepCost | None = None
        # Recent steps are collected in a list and added to the sums together, so that recording a step costs
        # one append.
        self._batch: list[tuple[float, float, float, float, float]] = []

    def observe(self, tokens: int, sequences: int, context_tokens: int, seconds: float) -> None:
        """Add to the fit an engine step that computed ``tokens`` positions of ``sequences`` in ``seconds``.

        Args:
            tokens: Positions computed, prompts and decodes.
            sequences: Sequences that computed at least one position.
            context_tokens: Tokens of KV cache held by running sequences.
            seconds: Duration of the step; zero and negative durations are ignored.
        """
        if sequences == 0 or seconds <= 0:
            return
        self.steps += 1
        self._prompt_steps += tokens > sequences
        self._batch.append((1.0, float(tokens - sequences), float(sequences), float(context_tokens), seconds))
        if len(self._batch) == _EVERY:
            self._add_batch()

    def _add_batch(self) -> None:
        rows = np.array(self._batch)
        self._batch.clear()
        steps, seconds = rows[:, :4], rows[:, 4]
        if self.cost is not None:
            forecast = steps @ np.array(astuple(self.cost))
            usual = seconds <= _OUTLIER * np.maximum(forecast, np.median(seconds))
        else:
            usual = seconds <= _OUTLIER * np.quantile(seconds, 0.9)
        steps, seconds = steps[usual], seconds[usual]
        self._squares = _KEEP * self._squares + steps.T @ steps
        self._products = _KEEP * self._products + steps.T @ seconds
        self.cost = self._solve()

    def _solve(self) -> StepCost | None:
        if self.steps < _STEPS or self._prompt_steps < _PROMPT_STEPS:
            return None
        scale = np.sqrt(np.maximum(np.diag(self._squares), 1e-300))
        squares, products = self._squares / np.outer(scale, scale), self._products / scale
        used = [0, 1, 2, 3]
        found = np.zeros(4)
        while used:  # Fit again without the most negative of the four costs, until no cost is negative.
            found[:] = 0
            found[used] = np.linalg.lstsq(squares[np.ix_(used, used)], products[used], rcond=1e-9)[0]
            least = min(used, key=lambda at: found[at])
            if found[least] >= 0:
                break
            used.remove(least)
        fixed, prefill, sequence, context = (found / scale).tolist()
        return StepCost(fixed, prefill, sequence, context)
