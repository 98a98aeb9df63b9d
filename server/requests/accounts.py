"""Counts of the API's requests: received = stop + length + aborted + rejected + error + in flight.

Each received request is either in flight or has exactly one of the five outcomes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tonnage.server.errors import ApiError, ErrorCode
from tonnage.server.requests.counts import Outcome, RequestCounts
from tonnage.server.requests.drain import DrainEstimate
from tonnage.server.requests.submission import Submission, TokenCounts
from tonnage.server.security.tenants import ANONYMOUS, Tenant


class Accounts(RequestCounts):
    """Counts and latencies of all requests of one app, and its requests in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = asyncio.Event()  # an event that is set while no request is in flight
        self.idle.set()
        # listeners called when a request goes to the engine
        self.on_submit: list[Callable[[Ticket], None]] = []
        # listeners called once for each request, when it has its outcome
        self.on_finish: list[Callable[[Ticket], None]] = []
        # the requests in flight, in order of arrival; the dict serves as an ordered set
        self._open: dict[Ticket, None] = {}
        self._reserved = 0  # upper bound of the tokens of all requests in flight, prompt and completion
        self._drain = DrainEstimate()

    def receive(self, endpoint: str = "", request_id: str = "", tenant: Tenant = ANONYMOUS) -> Ticket:
        """Count a new request and return its Ticket, on which an outcome must be recorded exactly once."""
        if not self.in_flight:
            # Restart the estimate of the drain time after an idle time, whose seconds without requests would
            # lower the measured rate.
            self._drain = DrainEstimate()
        self.received += 1
        self.in_flight += 1
        self.idle.clear()
        ticket = Ticket(self, endpoint, request_id, tenant)
        self._open[ticket] = None
        return ticket

    def oldest(self) -> tuple[float | None, float | None]:
        """Return the age in seconds of the oldest admitted (running) request and of the oldest waiting one.

        An age is None when there is no such request.
        """
        now = time.monotonic()
        found: dict[bool, float] = {}
        for ticket in self._open:
            found.setdefault(ticket.admitted, now - ticket._start)
            if len(found) == 2:
                break
        return found.get(True), found.get(False)

    def retry_after(self) -> float:
        """Return the estimated seconds, from 1 to 60, until all requests in flight have freed their tokens.

        The estimate uses the rate at which reservations were freed recently. Before two requests have ended, no
        rate is known and the result is 1, the smallest value of Retry-After.
        """
        seconds = self._drain.seconds(self._reserved, time.monotonic())
        return 1.0 if seconds is None else min(60.0, max(1.0, seconds))

    def check(self) -> None:
        """Raise AssertionError when a received request has been lost or was counted twice."""
        counted = sum(self.outcomes.values()) + self.in_flight
        if self.received != counted:
            raise AssertionError(
                f"{self.received} requests were received, but {counted} are in flight or have an outcome: "
                f"{self.outcomes}"
            )

    def _close(self, ticket: Ticket, outcome: Outcome) -> None:
        self.in_flight -= 1
        del self._open[ticket]
        if not self.in_flight:
            self.idle.set()
        self.outcomes[outcome] += 1
        if ticket.reserved:
            self._reserved -= ticket.reserved
            self._drain.ended(ticket.reserved, time.monotonic())
        if outcome in ("stop", "length"):
            self.completed(ticket.seconds)
        for listener in self.on_finish:
            listener(ticket)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Ticket:
    """The record of one request, from its arrival to its single outcome.

    ``submission`` and ``counts`` are set when the request goes to the engine, and ``error`` when it fails.
    """

    _accounts: Accounts
    endpoint: str
    request_id: str
    tenant: Tenant
    _start: float = field(default_factory=time.monotonic)
    arrived: float = field(default_factory=time.time)
    admitted: bool = False  # whether the engine has admitted at least one of the request's prompts
    first_token_seconds: float | None = None
    seconds: float = 0.0  # seconds from the arrival to the outcome
    outcome: Outcome | None = None
    error: ApiError | None = None
    submission: Submission | None = None
    counts: TokenCounts | None = None
    reserved: int = 0  # upper bound of the request's tokens, set when it goes to the engine

    def submitted(self) -> None:
        """Record that the request goes to the engine, and add its upper bound of tokens to the accounts."""
        if self.submission is not None:
            self.reserved = self.submission.most_tokens
            self._accounts._reserved += self.reserved
        for listener in self._accounts.on_submit:
            listener(self)

    def queued(self, seconds: float) -> None:
        """Record that the engine admitted a prompt after ``seconds`` in its queue."""
        self.admitted = True
        self._accounts.queue_wait.observe(seconds)

    def finish(self, outcome: Outcome) -> None:
        """Record the outcome of the request, unless it already has one."""
        if self.outcome is None:
            self.outcome = outcome
            self.seconds = time.monotonic() - self._start
            self._accounts._close(self, outcome)

    def fail(self, error: ApiError, outcome: Outcome) -> None:
        """Record ``outcome`` together with the error sent to the client, unless the request has an outcome."""
        if self.outcome is None:
            self.error = error
            self.finish(outcome)

    def timed_out(self, seconds: float | None) -> ApiError:
        """Return the error for the client whose request exceeded its time limit of ``seconds``.

        If the request has generated no token yet, the error suggests a retry, because the queue was the cause.
        """
        if self.first_token_seconds is None:
            return ApiError(
                ErrorCode.QUEUE_TIMEOUT,
                f"the request waited {seconds:g} s without its turn (request_timeout)",
                retry_after_seconds=self._accounts.retry_after(),
            )
        return ApiError(
            ErrorCode.REQUEST_TIMEOUT,
            f"the request did not end within {seconds:g} s (request_timeout); ask for fewer tokens",
        )

    def tokens(self, count: int, now: float, last: float | None) -> None:
        """Record the latency of a sequence's ``count`` new tokens in the histograms.

        The tokens arrived at ``now``. ``last`` is the arrival of the sequence's previous tokens, None for its
        first ones. Both are seconds of a monotonic clock.
        """
        if self.first_token_seconds is None:
            self.first_token_seconds = now - self._start
            self._accounts.time_to_first_token.observe(self.first_token_seconds)
        if last is not None and count:
            self._accounts.inter_token_latency.observe((now - last) / count, count)
