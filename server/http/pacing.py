"""Pacing of new requests, so that a burst does not delay the streams that are running.

The server works on a request for a third of a millisecond until it is queued (route, body, tokens, admission).
Without pacing, 512 simultaneous requests would all begin in one round of the event loop. Every running stream
and every /health probe would wait for them.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

# One start takes a third of a millisecond, so eight take less than 5 ms, which clients do not notice.
STARTS_PER_ROUND = 8


class RequestPacing:
    """ASGI middleware that starts POST requests in order of arrival.

    At most ``STARTS_PER_ROUND`` requests start in one round of the event loop.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._left = STARTS_PER_ROUND
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._counting = False  # whether a call of _next_round is scheduled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the wrapped app; a POST request first waits for its turn."""
        if scope["type"] == "http" and scope["method"] == "POST":
            if not self._counting:
                self._counting = True
                asyncio.get_running_loop().call_soon(self._next_round)
            if self._left and not self._waiting:
                self._left -= 1
            else:
                turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiting.append(turn)
                await turn
        await self._app(scope, receive, send)

    def _next_round(self) -> None:
        self._left = STARTS_PER_ROUND
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # the future is done when its request was cancelled, because the server stops
                turn.set_result(None)
                self._left -= 1
        self._counting = self._left < STARTS_PER_ROUND
        if self._counting:
            asyncio.get_running_loop().call_soon(self._next_round)
