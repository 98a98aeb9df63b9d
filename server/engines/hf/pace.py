"""Shorter prompt chunks while another key's stream runs, on devices where a full step takes long.

A stream gets a token in every step, so it pauses as long as a step takes. On a GPU a full step takes some ten
milliseconds. On two CPU cores, prompts of 6,000 tokens paused another key's stream for 2.5 s
(benchmarks/abuse.py long_prompts).
"""

from __future__ import annotations

# Aim for the duration of a step, in seconds. A clearly shorter step would read the weights for few tokens.
STEP_SECONDS = 0.4
# Prompt tokens that a step always may compute, and tokens from which a step tells what a prompt token costs.
LEAST_TOKENS = 64


class StepPace:
    """The token budget of steps, from what prompt tokens took in the last ones.

    Args:
        most: Upper bound of the budget in tokens, max_num_batched_tokens.
        least: Prompt tokens that every step may compute.
    """

    def __init__(self, most: int, least: int = LEAST_TOKENS) -> None:
        self._most, self._least = most, max(least, LEAST_TOKENS)
        self._seconds = 0.0  # of one prompt token

    def took(self, prompt_tokens: int, seconds: float) -> None:
        """Record the duration of a step with so many prompt tokens."""
        if prompt_tokens >= LEAST_TOKENS:
            self._seconds = seconds / prompt_tokens

    def budget(self, decodes: int) -> int:
        """Return the token budget of a step in which ``decodes`` sequences compute one token each."""
        if not self._seconds:
            return self._most
        prompts = max(self._least, int(STEP_SECONDS / self._seconds))
        return min(self._most, decodes + prompts)
