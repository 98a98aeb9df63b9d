"""Reservations for an engine that counts its own blocks: what is reserved for whom, and who waits in line.

For vLLM, whose scheduler reports a usage ratio and admits whatever it is given (a request above its pool
waits there for ever and holds up all others). Only what :func:`tonnage.cache.admission.decide` admits is
handed on, first come first served, so that vLLM never has to preempt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from tonnage.cache.admission import (
    AdmissionRequest,
    Admit,
    Limits,
    Never,
    ReservedTotals,
    Wait,
    decide,
    largest_prompt,
)
from tonnage.cache.admission.types import AGEING_SECONDS
from tonnage.server.engines.errors import NeverFits


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: AdmissionRequest
    place: float
    turn: asyncio.Future[None]


class ReservationLedger:
    """One line of waiting requests and the reservations of the running ones. One event loop, no locks.

    vLLM's n sequences of a request are scheduled in the same step, before the first has cached anything, so
    each computes the prompt for itself: unlike in :mod:`tonnage.cache.admission` nothing is shared by forks.

    The order is that of :mod:`tonnage.cache.scheduler.queue`: arrival plus priority times AGEING_SECONDS, so
    that an entry is overtaken only by what arrives within a bounded time after it. ``clock``: seconds.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._held: dict[str, tuple[int, int]] = {}  # request id -> reserved blocks, sequences
        self._line: dict[str, _Waiting] = {}  # in the order of arrival
        self._counts: dict[tuple[str, str], int] = {}
        self._refused: dict[tuple[str, str], int] = {}
        self.idle = asyncio.Event()  # set while nobody runs or waits
        self.idle.set()

    @property
    def reserved(self) -> int:
        """Blocks reserved to the running requests; at most the usable blocks."""
        return sum(blocks for blocks, _ in self._held.values())

    @property
    def running(self) -> int:
        """Admitted requests that have not left."""
        return len(self._held)

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._line)

    @property
    def counts(self) -> tuple[tuple[str, str, int], ...]:
        """(outcome, reason, count) of all decisions."""
        return tuple((outcome, reason, count) for (outcome, reason), count in self._counts.items())

    @property
    def refused_blocks(self) -> tuple[tuple[str, str, int], ...]:
        """(outcome, reason, blocks that were missing) of all that did not fit at once."""
        return tuple((outcome, reason, blocks) for (outcome, reason), blocks in self._refused.items())

    async def enter(self, request_id: str, request: AdmissionRequest, priority: int = 0) -> None:
        """Return once the reservation of ``request`` is held; waits in line as long as that takes.

        In line a lower ``priority`` is first, one step of it worth AGEING_SECONDS; among equals who came first.

        Raises NeverFits, with the numbers, before anything changes. Cancelling leaves the line.
        """
        answer = self._decide(request)
        if isinstance(answer, Never):
            self._count("never", answer.reason, answer.needed_blocks - answer.usable_blocks)
            raise NeverFits(str(answer), field="prompt")
        self.idle.clear()
        first, place = self._first(), self._clock() + priority * AGEING_SECONDS
        if isinstance(answer, Admit) and (first is None or place < self._line[first].place):
            self._hold(request_id, request, answer)
            return
        if isinstance(answer, Admit) and first is not None:  # it would fit, but others come first
            answer = self._decide(self._line[first].request)
        if isinstance(answer, Wait):
            self._count("wait", answer.reason, answer.blocks_short)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line[request_id] = _Waiting(request, place, turn)
        try:
            await turn
        except asyncio.CancelledError:
            self.leave(request_id)  # in line, or its turn came in the same moment
            raise

    def leave(self, request_id: str) -> None:
        """Give reservation (or place in line) back and let the next ones in; unknown ids are ignored."""
        self._held.pop(request_id, None)
        self._line.pop(request_id, None)
        while (first := self._first()) is not None:
            waiting = self._line[first]
            if waiting.turn.done():  # cancelled in this round of the loop: it takes no turn any more
                del self._line[first]
                continue
            answer = self._decide(waiting.request)
            if not isinstance(answer, Admit):
                return  # held up by those that run, so not idle
            del self._line[first]
            self._hold(first, waiting.request, answer)
            waiting.turn.set_result(None)
        if not self._held:
            self.idle.set()

    def fail(self, error: Exception) -> None:
        """Send everybody in line away with ``error``."""
        for waiting in self._line.values():
            if not waiting.turn.done():  # cancelled in this round of the loop: it needs no answer
                waiting.turn.set_exception(error)
        self._line.clear()
        if not self._held:
            self.idle.set()

    def _first(self) -> str | None:
        """Whose turn is next; None: nobody waits."""
        return min(self._line, key=lambda name: self._line[name].place, default=None)

    def _hold(self, request_id: str, request: AdmissionRequest, answer: Admit) -> None:
        self._held[request_id] = (answer.blocks, request.n)
        self._count("admit", "fits")

    def _count(self, outcome: str, reason: str, missing_blocks: int = 0) -> None:
        key = (outcome, str(reason))
        self._counts[key] = self._counts.get(key, 0) + 1
        if missing_blocks > 0:
            self._refused[key] = self._refused.get(key, 0) + missing_blocks

    def _decide(self, request: AdmissionRequest) -> Admit | Wait | Never:
        running = sum(sequences for _, sequences in self._held.values())
        # A prompt of one token has no full block that forks could share: the rest counts for each of them.
        unshared = replace(request, prompt_tokens=1, max_tokens=request.total_tokens - 1)
        answer = decide(unshared, ReservedTotals(self.reserved, running), self._limits)
        if not isinstance(answer, Never):
            return answer
        return replace(answer, largest_prompt_tokens=self._largest_prompt(request))

    def _largest_prompt(self, request: AdmissionRequest) -> int:
        """As if each of the n sequences had an equal part of the pool to itself."""
        share = self._limits.usable_blocks // request.n
        if share == 0 or request.n > self._limits.max_num_seqs:
            return 0
        return largest_prompt(replace(request, n=1), replace(self._limits, usable_blocks=share))
