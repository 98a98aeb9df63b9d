"""Checks of new requests against an empty KV pool, and their positions in vLLM's queue."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from tonnage.cache.admission import AdmissionRequest, Limits, Never, largest_prompt, refusal
from tonnage.cache.admission.types import AGEING_SECONDS
from tonnage.server.engines.rejections import Rejections
from tonnage.server.engines.request import GenerationRequest

# A queue position is an arrival time in milliseconds, because vLLM's priorities are integers. So there are this
# many positions per second.
_PLACES_A_SECOND = 1000


class QueuePositions:
    """The admission check in front of vLLM's queue, which also assigns queue positions.

    vLLM schedules all n sequences of a request in one step, before the first sequence has cached a block. So
    each sequence computes the prompt for itself, and the sequences share no blocks, unlike in
    `tonnage.cache.admission`.

    Args:
        limits: limits of one engine core.
        clock: function that returns the time in seconds.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self._clock = limits, clock
        self.rejections = Rejections()

    def position(self, priority: int) -> int:
        """Return vLLM's priority for a request that arrives now; vLLM runs the lowest value first.

        It is the arrival time plus `priority` times AGEING_SECONDS, in milliseconds, as in
        `tonnage.cache.scheduler.queue`. A low `priority` moves a request forward. A waiting request is
        overtaken only by requests that arrive within a bounded time after it.
        """
        return round((self._clock() + priority * AGEING_SECONDS) * _PLACES_A_SECOND)

    def check(self, request: GenerationRequest, *, pools: bool) -> None:
        """Raise `NeverFits`, with the numbers of blocks, if an empty KV pool cannot hold the request.

        `pools` is True for a pooling request, which has no output tokens.
        """
        prompt, output = len(request.prompt_token_ids), request.params.max_tokens
        if pools:
            # A pooling request has no output, but AdmissionRequest needs at least one output token. Count the
            # last prompt token as output.
            prompt, output = max(1, prompt - 1), 1
        never = self.rejection(AdmissionRequest(prompt, output, request.n))
        if never is not None:
            self.rejections.reject(never)

    def rejection(self, request: AdmissionRequest) -> Never | None:
        """Return why an empty KV pool cannot hold the request, or None if it can."""
        # `refusal` assumes that the n sequences share the full blocks of the prompt, and counts these blocks
        # once. Here no block is shared, so pass a prompt of one token, which fills no block, and count all
        # other prompt tokens as output.
        unshared = replace(request, prompt_tokens=1, max_tokens=request.total_tokens - 1)
        answer = refusal(unshared, self.limits)
        return answer and replace(answer, largest_prompt_tokens=self._largest_prompt(request))

    def _largest_prompt(self, request: AdmissionRequest) -> int:
        """Return the longest prompt in tokens that fits if n sequences divide the KV pool equally."""
        share = self.limits.usable_blocks // request.n
        if share == 0 or request.n > self.limits.max_num_seqs:
            return 0
        return largest_prompt(replace(request, n=1), replace(self.limits, usable_blocks=share))
