"""Server-sent events (SSE): streamed answers that end when the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tonnage.server.errors import ApiError, from_exception, render, stopping
from tonnage.server.http.disconnect import ClientDisconnected, until_disconnect
from tonnage.server.http.outbox import Outbox, Outboxes
from tonnage.server.requests.accounts import Ticket
from tonnage.server.requests.counts import Outcome

_COMMENT = b": keep-alive\n\n"


def outcome_of(error: ApiError) -> Outcome:
    """Return the outcome under which the metrics count a failed request.

    A rejection (invalid request, or overload) is ``rejected``, a failure of the engine ``error``, and a request
    over its time limit ``aborted``.
    """
    if error.is_timeout:
        return "aborted"
    return "rejected" if error.is_refusal else "error"


def event(fields: dict[str, Any]) -> bytes:
    """Return one server-sent event with ``fields`` as its data; their member ``type`` is the event's type."""
    return f"event: {fields['type']}\ndata: {json.dumps(fields)}\n\n".encode()


# Entry of the OpenAPI document for a route that returns JSON or, on request, events.
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


class EventStream(Response):
    """A streamed response: the events of an iterator, then the event that ends the stream (``[DONE]``).

    Nothing is sent before the first event, so that a rejected request still gets an error status such as 429.
    After ``keep_alive`` seconds without an event a comment is sent, even before the first event; proxies would
    otherwise close a connection that waits. A failure after the start becomes an error event, which ends the
    stream.

    When the client disconnects, the iterator is closed at once. When the client does not read, the iterator
    still runs to its end, and ``outboxes`` (the server's send buffers) keeps the unread events.
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
        timeout: float | None,
        on_error: Callable[[ApiError], bytes],
        last: bytes,
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
        # whether all events are sent except the one that ends the stream
        self._ended = False

        # number of events sent; if it stays the same for keep_alive seconds, a comment is sent
        self._sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream as an ASGI response, and record exactly one outcome for its request."""
        outbox = Outbox(self._outboxes, scope, scope.get("tonnage.send", send))
        timer = asyncio.create_task(self._comments(outbox, send))
        try:
            await until_disconnect(receive, self._send_all(outbox, scope, receive, send))
        except ClientDisconnected:
            self._ticket.finish("aborted")
        # The server cancels handlers when it stops and the time limit for draining is over.
        except asyncio.CancelledError:
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
