"""The check of new requests against an empty pool, and their positions in vLLM's queue."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from tonnage.cache.admission import AdmissionRequest, Limits, Never, largest_prompt, refusal
from tonnage.cache.admission.types import AGEING_SECONDS
from tonnage.server.engines.errors import NeverFits
from tonnage.server.engines.request import GenerationRequest

# vLLM's priorities are integers, so positions are in milliseconds.
_PLACES_A_SECOND = 1000


class QueuePositions:
    """The admission check in front of vLLM's queue.

    vLLM schedules the n sequences of a request in the same step, before the first one has cached a block. Each
    sequence computes the prompt for itself, so forks share nothing, unlike in `tonnage.cache.admission`.

    Args:
        limits: limits of one engine core.
        clock: returns seconds.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self._clock = limits, clock
        self._refused: Counter[str] = Counter()
        self._missing: Counter[str] = Counter()  # blocks

    def position(self, priority: int) -> int:
        """Return vLLM's priority for a request that arrives now; the lowest runs first.

        The position is the arrival time minus a bonus for priority, as in `tonnage.cache.scheduler.queue`:
        arrival plus priority times AGEING_SECONDS. A waiting request is overtaken only by requests that arrive
        within a bounded time after it.
        """
        return round((self._clock() + priority * AGEING_SECONDS) * _PLACES_A_SECOND)

    def check(self, request: GenerationRequest, *, embeds: bool) -> None:
        """Raise `NeverFits`, with the numbers, for a request that an empty pool cannot hold."""
        prompt, output = len(request.prompt_token_ids), request.params.max_tokens
        if embeds:  # an embedding has no output: count the last prompt token as the one output token
            prompt, output = max(1, prompt - 1), 1
        never = self.rejection(AdmissionRequest(prompt, output, request.n))
        if never is not None:
            reason = str(never.reason)
            self._refused[reason] += 1
            self._missing[reason] += max(0, never.needed_blocks - never.usable_blocks)
            raise NeverFits(str(never), field="prompt")

    def rejection(self, request: AdmissionRequest) -> Never | None:
        """Return why an empty pool cannot hold the request, or None when it can."""
        # Forks cannot share a block of a one-token prompt, so all other tokens count for each fork.
        unshared = replace(request, prompt_tokens=1, max_tokens=request.total_tokens - 1)
        answer = refusal(unshared, self.limits)
        return answer and replace(answer, largest_prompt_tokens=self._largest_prompt(request))

    @property
    def refused(self) -> tuple[tuple[str, str, int], ...]:
        """Return ("never", reason, requests) for each reason of a rejection."""
        return tuple(("never", reason, count) for reason, count in self._refused.items())

    @property
    def refused_blocks(self) -> tuple[tuple[str, str, int], ...]:
        """Return ("never", reason, missing blocks) for each reason of a rejection."""
        return tuple(("never", reason, count) for reason, count in self._missing.items())

    def _largest_prompt(self, request: AdmissionRequest) -> int:
        """Return the largest prompt that fits if each of the n sequences has an equal part of the pool."""
        share = self.limits.usable_blocks // request.n
        if share == 0 or request.n > self.limits.max_num_seqs:
            return 0
        return largest_prompt(replace(request, n=1), replace(self.limits, usable_blocks=share))
