"""Server-sent events that watch their client: the generating half of a streamed answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tonnage.server.errors import ApiError, envelope, from_exception, render, stopping
from tonnage.server.http.disconnect import ClientDisconnected, until_disconnect
from tonnage.server.http.outbox import Outbox, Outboxes
from tonnage.server.requests.accounts import Ticket
from tonnage.server.requests.counts import Outcome

_DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"


def outcome_of(error: ApiError) -> Outcome:
    """Refusals (the request's fault, or no room now) are ``rejected``; the engine's failures are ``error``;
    what ran into its time limit is ``aborted``."""
    if error.is_timeout:
        return "aborted"
    return "rejected" if error.is_refusal else "error"


def error_event(error: ApiError) -> bytes:
    """The event of completions and chat: OpenAI's error envelope."""
    return b"data: " + json.dumps(envelope(error)).encode() + b"\n\n"


# The OpenAPI document of a route that answers with JSON, or with events when asked to.
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


class EventStream(Response):
    """The events of ``events`` (whole: ``data: ...`` and a blank line), then ``[DONE]``.

    Nothing is sent before the first event, so that a refusal still gets its own status; but after
    ``keep_alive`` seconds of silence (also before it) a comment goes out, or proxies hang up on a request that
    waits. A failure after the start becomes an error event and the end. A client that hangs up closes
    ``events`` at once; one that does not read holds nothing up, ``events`` run to their end (``outboxes``).
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        ticket: Ticket,
        *,
        outboxes: Outboxes,
        headers: dict[str, str],
        keep_alive: float,
        timeout: float | None = None,
        on_error: Callable[[ApiError], bytes] = error_event,
        last: bytes = _DONE,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"} | headers)
        del self.headers["content-length"]
        self._events = events
        self._ticket = ticket
        self._outboxes = outboxes
        self._keep_alive = keep_alive
        self._timeout = timeout
        self._on_error = on_error
        self._last = last
        self._started = False
        self._generated = False
        self._ended = False  # nothing more comes but the last event
        self._sent = 0  # messages; a timer that finds it unchanged has seen silence

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outbox = Outbox(self._outboxes, scope, scope.get("tonnage.send", send))
        timer = asyncio.create_task(self._comments(outbox, send))
        try:
            await until_disconnect(receive, self._send_all(outbox, scope, receive, send))
        except ClientDisconnected:
            self._ticket.finish("aborted")
        except asyncio.CancelledError:  # the server stops and has waited long enough
            if self._generated:
                await self._finish(outbox, send)
            else:
                await self._fail(stopping(), outbox, scope, receive, send)
        finally:
            timer.cancel()
            outbox.close()

    async def _send_all(self, outbox: Outbox, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout), aclosing(self._events) as events:
                await outbox.ready()
                async for event in events:
                    if not self._started:
                        await self._start(send)
                    self._sent += 1
                    await outbox.put(event)
        except TimeoutError:
            await self._fail(self._ticket.timed_out(self._timeout), outbox, scope, receive, send)
        except Exception as exception:
            await self._fail(from_exception(exception), outbox, scope, receive, send)
        else:
            self._generated = True
            await self._finish(outbox, send)

    async def _finish(self, outbox: Outbox, send: Send) -> None:
        self._ended = True
        await outbox.flush()
        await send({"type": "http.response.body", "body": self._last, "more_body": False})

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    async def _comments(self, outbox: Outbox, send: Send) -> None:
        while not self._ended:
            before = self._sent
            await asyncio.sleep(self._keep_alive)
            if self._sent == before and not self._ended and not outbox.behind:
                if not self._started:
                    await self._start(send)
                await outbox.put(_COMMENT)

    async def _fail(self, error: ApiError, outbox: Outbox, scope: Scope, receive: Receive, send: Send) -> None:
        self._ended = True
        self._ticket.fail(error, outcome_of(error))
        await outbox.flush()
        if self._started:
            body = self._on_error(error) + self._last
            await send({"type": "http.response.body", "body": body, "more_body": False})
        else:
            await render(error)(scope, receive, send)
