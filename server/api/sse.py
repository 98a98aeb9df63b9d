"""Server-sent events that watch their client: the generating half of a streamed answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tonnage.server.accounts import Outcome, Ticket
from tonnage.server.disconnect import ClientDisconnected, until_disconnect
from tonnage.server.errors import ApiError, envelope, from_exception, render, stopping


def outcome_of(error: ApiError) -> Outcome:
    """Refusals (the request's fault, or no room now) are ``rejected``; the engine's failures are ``error``."""
    return "rejected" if error.is_refusal else "error"


class EventStream(Response):
    """``data:`` events of ``chunks``, then ``[DONE]``.

    Nothing is sent before the first chunk, so that a refusal still gets its own status. A failure after it
    becomes an error event and the end. A client that hangs up closes ``chunks`` at once.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncGenerator[BaseModel, None], ticket: Ticket, to_json: Callable[[Any], str]
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._ticket = ticket
        self._json = to_json
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(scope, receive, send))
        except ClientDisconnected:
            self._ticket.finish("aborted")
        except asyncio.CancelledError:  # the server stops and has waited long enough
            await self._fail(stopping(), scope, receive, send)

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    if not self._started:
                        self._started = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await self._event(send, self._json(chunk))
        except Exception as exception:
            await self._fail(from_exception(exception), scope, receive, send)
        else:
            await self._end(send)

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        self._ticket.finish(outcome_of(error))
        if self._started:
            await self._event(send, json.dumps(envelope(error)))
            await self._end(send)
        else:
            await render(error)(scope, receive, send)

    async def _end(self, send: Send) -> None:
        await self._event(send, "[DONE]")
        await send({"type": "http.response.body", "body": b""})

    @staticmethod
    async def _event(send: Send, data: str) -> None:
        await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
