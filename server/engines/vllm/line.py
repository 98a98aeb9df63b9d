"""Who waits in vLLM's line: what can never fit does not, and each has a place by arrival and priority."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from tonnage.cache.admission import AdmissionRequest, Limits, Never, largest_prompt, refusal
from tonnage.cache.admission.types import AGEING_SECONDS
from tonnage.server.engines.errors import NeverFits
from tonnage.server.engines.request import GenerationRequest

# Places are whole numbers, as vLLM's priorities are: milliseconds.
_PLACES_A_SECOND = 1000


class Line:
    """In front of one engine core with ``limits``. ``clock``: seconds.

    vLLM's n sequences of a request are scheduled in the same step, before the first has cached anything, so
    each computes the prompt for itself: unlike in ``tonnage.cache.admission`` nothing is shared by forks.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self._clock = limits, clock
        self._refused: Counter[str] = Counter()
        self._missing: Counter[str] = Counter()  # blocks

    def place(self, priority: int) -> int:
        """vLLM's priority of a request that comes now; lower is first.

        As in ``tonnage.cache.scheduler.queue``: arrival plus priority times AGEING_SECONDS, so that an entry
        is overtaken only by what arrives within a bounded time after it.
        """
        return round((self._clock() + priority * AGEING_SECONDS) * _PLACES_A_SECOND)

    def check(self, request: GenerationRequest, *, embeds: bool) -> None:
        """Raises NeverFits, with the numbers."""
        prompt, output = len(request.prompt_token_ids), request.params.max_tokens
        if embeds:  # nothing follows the prompt: its last token stands for the one that is asked for
            prompt, output = max(1, prompt - 1), 1
        never = self.never(AdmissionRequest(prompt, output, request.n))
        if never is not None:
            reason = str(never.reason)
            self._refused[reason] += 1
            self._missing[reason] += max(0, never.needed_blocks - never.usable_blocks)
            raise NeverFits(str(never), field="prompt")

    def never(self, request: AdmissionRequest) -> Never | None:
        """Why it does not fit an empty pool; None when it does."""
        # A prompt of one token has no full block that forks could share: the rest counts for each of them.
        unshared = replace(request, prompt_tokens=1, max_tokens=request.total_tokens - 1)
        answer = refusal(unshared, self.limits)
        return answer and replace(answer, largest_prompt_tokens=self._largest_prompt(request))

    @property
    def refused(self) -> tuple[tuple[str, str, int], ...]:
        """("never", reason, count) of all that were refused."""
        return tuple(("never", reason, count) for reason, count in self._refused.items())

    @property
    def refused_blocks(self) -> tuple[tuple[str, str, int], ...]:
        """("never", reason, blocks that were missing)."""
        return tuple(("never", reason, count) for reason, count in self._missing.items())

    def _largest_prompt(self, request: AdmissionRequest) -> int:
        """As if each of the n sequences had an equal part of the pool to itself."""
        share = self.limits.usable_blocks // request.n
        if share == 0 or request.n > self.limits.max_num_seqs:
            return 0
        return largest_prompt(replace(request, n=1), replace(self.limits, usable_blocks=share))
