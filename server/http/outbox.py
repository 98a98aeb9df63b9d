"""What a stream has to say while its client does not listen.

A stream that waits for its client would keep its sequences, and its place in the queue, for as long as the
client likes, and what the engine says meanwhile would pile up as objects. So it goes on and keeps whole events.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from starlette.types import Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

# Of all streams together: as much as eight request bodies of the largest size (max_request_body_bytes). With
# events of 250 bytes, a token each, one slow client may be 260,000 tokens behind and each of 512 may be 500.
OUTBOX_BYTES = 64 * 2**20


class Outboxes:
    """Of one server: each stream that is behind has an equal share of OUTBOX_BYTES."""

    def __init__(self) -> None:
        self.behind = 0
        self.idle = asyncio.Event()  # set while none is behind
        self.idle.set()

    def begin(self) -> None:
        """A stream is behind from now on."""
        self.behind += 1
        self.idle.clear()

    def end(self) -> None:
        """Its client has got everything, or is gone."""
        self.behind -= 1
        if not self.behind:
            self.idle.set()

    @property
    def share(self) -> int:
        """Bytes that one stream may be behind now."""
        return OUTBOX_BYTES // max(1, self.behind)


class Outbox:
    """Of one stream, in the order of ``put``. ``scope``: of its request; without our protocol below (an ASGI
    server of somebody else's) each event waits for the client."""

    def __init__(self, all_of_them: Outboxes, scope: Scope, send: Send) -> None:
        self._all = all_of_them
        self._connection: Any = scope.get("tonnage.connection")  # BoundedHttpProtocol
        self._send = send
        self._events: deque[bytes] = deque()
        self._size = 0
        self._writer: asyncio.Task[None] | None = None  # while the client is behind

    async def put(self, event: bytes) -> None:
        """Send ``event`` or keep it. A client that is behind by more than its share is cut off: this then never
        returns, it is cancelled as when the client hangs up."""
        connection = self._connection
        if self._writer is None and (connection is None or not connection.flow.write_paused):
            await self._send({"type": "http.response.body", "body": event, "more_body": True})
            return
        self._events.append(event)
        self._size += len(event)
        if self._writer is None:
            self._all.begin()
            self._writer = asyncio.create_task(self._write())
        if self._size > self._all.share:
            connection.transport.abort()
            await asyncio.get_running_loop().create_future()

    async def flush(self) -> None:
        """Return when the client has been sent everything."""
        if self._writer is not None:
            await asyncio.wait((self._writer,))  # who waits may be cancelled, what is kept is still owed

    def close(self) -> None:
        """Forget what has not been sent."""
        if self._writer is not None:
            self._writer.cancel()
            self._end()

    async def _write(self) -> None:
        try:
            while self._events:
                await self._connection.flow.drain()
                taken, size = [], 0
                while self._events and size < HIGH_WATER_LIMIT:
                    taken.append(self._events.popleft())
                    size += len(taken[-1])
                self._size -= size
                await self._send({"type": "http.response.body", "body": b"".join(taken), "more_body": True})
        finally:
            self._end()

    def _end(self) -> None:
        if self._writer is not None:
            self._writer = None
            self._all.end()
