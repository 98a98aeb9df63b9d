"""The methods of admission that the block manager and the scheduler call, as typing protocols.

`tonnage.cache.admission.controller.Admission` is the implementation, with every admission mode. Block manager
and scheduler depend on these protocols only, so both can be read without the modes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tonnage.cache.admission.snapshot import RunningSnapshot
from tonnage.cache.admission.types import AdmissionMode, AdmissionRequest, Decision, Head
from tonnage.cache.blocks.state import Int64Array


class StepObserver(Protocol):
    """A learner of the cost of engine steps, for the admission mode ``auto``."""

    def stepped(self, tokens: int, sequences: int, context_tokens: int, seconds: float, in_system: int) -> None:
        """Record a finished engine step (`tonnage.cache.admission.auto.Auto.stepped`)."""

    def recomputed(self, tokens: int) -> None:
        """Add ``tokens`` to the count of tokens that preempted requests compute again."""


class AdmissionControl(Protocol):
    """The interface that decides which requests of a block manager start, grow and are preempted."""

    # -- requests that start -------------------------------------------------------------------------------

    def decide_early(self, request: AdmissionRequest, head: Head | None = None) -> Decision | None:
        """Return the admission decision on ``request``, or None if it depends on the request's prefix hit.

        After None, the caller looks up the prefix cache and calls `decide`. ``head`` is the start forecast of
        the first waiting request, if ``request`` would start before that request.
        """

    def decide(self, request: AdmissionRequest, row: int, hit: int, head: Head | None = None) -> Decision:
        """Return whether ``request`` may start, given its cached prefix.

        ``row`` is the row of the block tables that holds the ``hit`` cached blocks of the request's prompt.
        """

    def start_of(self, request: AdmissionRequest) -> Head:
        """Forecast when ``request``, the first in the queue, has the KV blocks that it waits for."""

    def ended(self, output_tokens: int, tenant: str = "", prompt_tokens: int = 1, max_tokens: int = 1) -> None:
        """Record the output length of a sequence that finished and was not cancelled."""

    # -- sequences that grow -------------------------------------------------------------------------------

    def grant(self, batch: Int64Array, ends: Int64Array) -> Int64Array:
        """Return the length in tokens to which each sequence of ``batch`` may be extended, at most ``ends``."""

    def victim(self, snapshot: RunningSnapshot) -> int:
        """Return the index in ``snapshot`` of the request to preempt when no sequence can continue."""

    # -- the rule in effect --------------------------------------------------------------------------------

    @property
    def mode(self) -> AdmissionMode:
        """The admission mode in effect now, which decides how the scheduler preempts."""

    @property
    def lookahead(self) -> int:
        """Number of requests behind the first in the queue that may try to start before it."""

    @property
    def auto(self) -> StepObserver | None:
        """The object that learns the cost of engine steps, or None if the admission mode does not need it."""

    def choose(self, in_system: int) -> None:
        """Choose the admission rule in effect; ``in_system`` is the number of running and waiting requests."""

    # -- several API keys ----------------------------------------------------------------------------------

    @property
    def several_keys(self) -> bool:
        """Whether several API keys share the engine, so that the scheduler divides it among them."""

    def ranking(self) -> Callable[[AdmissionRequest], tuple[int, float]]:
        """Return a function that maps a waiting request to its sort key; the lowest sort key starts first.

        The order divides the engine fairly among several API keys.
        """
