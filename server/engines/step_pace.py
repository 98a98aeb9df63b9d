"""Shorter prompt chunks while a request of another API key generates, on devices with long steps.

A running request gets a token in every step, so it pauses as long as a step takes. On a GPU a step with
max_num_batched_tokens tokens takes some ten milliseconds. On two CPU cores, prompts of 6,000 tokens paused
another key's request for 2.5 s in the hf engine and 4 s in vLLM (benchmarks/abuse.py long_prompts).
"""

from __future__ import annotations

# Intended duration of a step, in seconds. A much shorter step would read all weights for few tokens.
STEP_SECONDS = 0.25
# Number of prompt tokens that every step may compute. Before the first measurement, a step may not compute
# more. A token takes 1 ms with vLLM on two cores with AVX-512, and 4 ms in the hf engine on two cores without
# AVX-512. So 32 tokens take at most 0.13 s. With 256 tokens in the first step, a burst of prompts paused the
# stream of another key for 2.3 s on the cores without AVX-512. The API process and the clients used the same
# two cores (benchmarks/abuse.py resets).
LEAST_TOKENS = 32
# Steps with fewer prompt tokens than this are not measured, because their time per token is too inaccurate. A
# step that has all prompt tokens that its budget permits is always measured.
MEASURED_TOKENS = 256


class StepPace:
    """The token budget of a step, derived from the measured time per prompt token of recent steps.

    Args:
        most: Upper bound of the budget in tokens, max_num_batched_tokens.
        least: Prompt tokens that every step may compute.
    """

    def __init__(self, most: int, least: int = LEAST_TOKENS) -> None:
        self._most, self._least = most, max(least, LEAST_TOKENS)
        self._seconds = 0.0  # measured seconds per prompt token

    def took(self, prompt_tokens: int, seconds: float) -> None:
        """Record that an engine step with ``prompt_tokens`` prompt tokens took ``seconds``.

        A step with few prompt tokens is ignored. It spends most of its time on work that does not depend on the
        number of tokens, such as reading the weights. So the time per prompt token would seem too long, and
        later steps would be allowed too few prompt tokens.
        """
        if prompt_tokens >= min(MEASURED_TOKENS, self._prompt_tokens()):
            self._seconds = seconds / prompt_tokens

    def budget(self, decodes: int) -> int:
        """Return the token budget of an engine step in which ``decodes`` sequences compute one token each."""
        return min(self._most, decodes + self._prompt_tokens())

    def _prompt_tokens(self) -> int:
        """Return how many prompt tokens an engine step may compute."""
        possible = int(STEP_SECONDS / self._seconds) if self._seconds else 0
        return max(self._least, possible)
