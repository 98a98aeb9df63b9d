"""Pacing of new requests, so that a burst does not delay the streams that are running.

The server works on a request for a third of a millisecond until it is queued (route, body, tokens, admission).
Without pacing, 512 simultaneous requests would all begin in one round of the event loop. Every running stream
and every /health probe would wait for them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

from tonnage.server.http.disconnect import wait_for_disconnect
from tonnage.server.http.half_closed import PROBED_SECONDS

# Number of requests started per round of the event loop. One start takes a third of a millisecond, so eight
# take less than 5 ms, which clients do not notice.
STARTS_PER_ROUND = 8
# When a round takes longer than this, fewer requests start in the next one. Prompts of a kilobyte take 2 ms
# each to encode. With eight of them per round, 5,000 connections delayed /health by 5 s (benchmarks/abuse.py
# resets).
_ROUND_SECONDS = 0.008


# Paths of the health probes of load balancers and Kubernetes. They are answered without pacing, because a probe
# costs the server almost no time.
_UNPACED = frozenset({"/health", "/ready", "/ping"})


class RequestPacing:
    """ASGI middleware that starts requests in order of arrival, a few in each round of the event loop.

    At most ``STARTS_PER_ROUND`` requests start in one round, and fewer while rounds are long. Health probes
    (/health, /ready, /ping) start without waiting. A request whose client disconnects before its turn never
    starts.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._starts = self._left = STARTS_PER_ROUND
        self._began = 0.0  # time at which the current round began, in seconds of the monotonic clock
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._counting = False  # whether a call of _next_round is scheduled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait until the request may start (in order of arrival), then call the wrapped app."""
        if scope["type"] == "http" and scope["path"] not in _UNPACED:
            if not self._counting:
                self._counting = True
                self._began = time.monotonic()
                asyncio.get_running_loop().call_soon(self._next_round)
            if self._left and not self._waiting:
                self._left -= 1
            else:
                turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiting.append(turn)
                await turn
            if await _is_gone(scope):
                await wait_for_disconnect(receive)
                return
        await self._app(scope, receive, send)

    def _next_round(self) -> None:
        now = time.monotonic()
        is_long = now - self._began > _ROUND_SECONDS
        self._starts = max(1, self._starts // 2) if is_long else min(STARTS_PER_ROUND, self._starts + 1)
        self._began, self._left = now, self._starts
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # the future is done if the stopping server has cancelled its request
                turn.set_result(None)
                self._left -= 1
        self._counting = self._left < self._starts
        if self._counting:
            asyncio.get_running_loop().call_soon(self._next_round)


async def _is_gone(scope: Scope) -> bool:
    """Return whether the client has closed the connection, so that no answer can reach it.

    A client that has closed only its sending half may have disconnected or may wait for its answer. The request
    then waits for the result of a probe (`tonnage.server.http.half_closed`).
    """
    # the BoundedHttpProtocol of the connection, or None with another HTTP protocol
    connection = scope.get("tonnage.connection")
    if connection is None:
        return False
    await asyncio.sleep(0)  # a FIN that arrived together with the request is read in the next round
    if connection.half_closed and not connection.transport.is_closing():
        await asyncio.sleep(PROBED_SECONDS)
    return bool(connection.transport.is_closing())
