"""New requests begin a few at a time, so that a burst of them does not hold up the streams that run.

A request costs a third of a millisecond until it is in the queue (route, body, tokens, admission). When 512
clients come in the same moment, one round of the event loop would begin all of them, and every running stream
and every probe of /health would wait for that.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

BEGIN_A_ROUND = 8  # times a third of a millisecond: below the 5 ms that nobody notices


class Turns:
    """ASGI: POST requests begin in the order of arrival, at most ``BEGIN_A_ROUND`` in one round of the loop."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._left = BEGIN_A_ROUND
        self._line: deque[asyncio.Future[None]] = deque()
        self._counting = False  # the end of this round is noticed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            if not self._counting:
                self._counting = True
                asyncio.get_running_loop().call_soon(self._next_round)
            if self._left and not self._line:
                self._left -= 1
            else:
                turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._line.append(turn)
                await turn
        await self._app(scope, receive, send)

    def _next_round(self) -> None:
        self._left = BEGIN_A_ROUND
        while self._left and self._line:
            turn = self._line.popleft()
            if not turn.done():  # cancelled: the server stops
                turn.set_result(None)
                self._left -= 1
        self._counting = self._left < BEGIN_A_ROUND
        if self._counting:
            asyncio.get_running_loop().call_soon(self._next_round)
