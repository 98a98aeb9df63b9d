"""What a stream has to say while its client does not listen.

A stream that waits for its client would keep its sequences, and its place in the queue, for as long as the
client likes. So it goes on, and what is said meanwhile is kept, of all streams together within a bound.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from tonnage.planner.engines.runtime.api import OUTBOX_BYTES

# OUTBOX_BYTES is of all streams together. With events of 250 bytes, a token each, one slow client may be 67,000
# tokens behind and each of 512 may be 130, besides the 64 KiB of its connection.


class Outboxes:
    """Of one server. They hold OUTBOX_BYTES at most: who is furthest behind is cut off first."""

    def __init__(self) -> None:
        self.held = 0
        self.idle = asyncio.Event()  # set while none is behind
        self.idle.set()
        self._behind: set[Outbox] = set()

    @property
    def behind(self) -> int:
        """Streams whose clients have not been sent everything."""
        return len(self._behind)

    def hold(self, outbox: Outbox, size: int) -> None:
        """``outbox`` keeps ``size`` bytes more."""
        self._behind.add(outbox)
        self.idle.clear()
        self.held += size
        while self.held > OUTBOX_BYTES:
            max(self._behind, key=len).cut()

    def release(self, size: int) -> None:
        """So many were sent, or are of no use any more."""
        self.held -= size

    def end(self, outbox: Outbox) -> None:
        """Its client has got everything, or is gone."""
        self._behind.discard(outbox)
        if not self._behind:
            self.idle.set()


class Outbox:
    """Of one stream, in the order of ``put``. ``scope``: of its request; without our protocol below (an ASGI
    server of somebody else's) each event waits for the client."""

    def __init__(self, all_of_them: Outboxes, scope: Scope, send: Send) -> None:
        self._all = all_of_them
        self._connection: Any = scope.get("tonnage.connection")  # BoundedHttpProtocol
        self._send = send
        self._kept = bytearray()
        self._cut = False
        self._writer: asyncio.Task[None] | None = None  # while something is kept

    def __len__(self) -> int:
        """Bytes kept."""
        return len(self._kept)

    @property
    def behind(self) -> bool:
        """The client has not taken what was sent before: more is kept for it."""
        paused = self._connection is not None and self._connection.flow.write_paused
        return self._writer is not None or paused

    async def ready(self) -> None:
        """Return when the client has taken the answers to what it asked before on this connection."""
        if self._connection is not None:
            await self._connection.flow.drain()

    async def put(self, event: bytes) -> None:
        """Send ``event`` or keep it. For a client that is cut off this never returns: it is cancelled, as when
        the client hangs up."""
        if not self.behind:
            await self._send({"type": "http.response.body", "body": event, "more_body": True})
            return
        if not self._cut:
            self._kept += event
            if self._writer is None:
                self._writer = asyncio.create_task(self._write())
            self._all.hold(self, len(event))
        if self._cut:
            await asyncio.get_running_loop().create_future()

    async def flush(self) -> None:
        """Return when the client has been sent everything."""
        if self._writer is not None:
            await asyncio.wait((self._writer,))  # who waits may be cancelled, what is kept is still owed

    def cut(self) -> None:
        """Drop the client, and what is kept for it."""
        self._cut = True
        self._forget()
        self._connection.transport.abort()

    def close(self) -> None:
        """The stream has ended: what has not been sent is of no use any more."""
        if self._writer is not None:
            self._writer.cancel()
            self._writer = None
        self._forget()
        self._all.end(self)

    def _forget(self) -> None:
        self._all.release(len(self._kept))
        self._kept.clear()

    async def _write(self) -> None:
        while self._kept:
            await self._connection.flow.drain()
            # Whole events, as there are clients that take a chunk for one; at least a piece of a larger one.
            end = self._kept.rfind(b"\n\n", 0, HIGH_WATER_LIMIT) + 2
            piece = bytes(self._kept[: end if end > 1 else HIGH_WATER_LIMIT])
            del self._kept[: len(piece)]
            self._all.release(len(piece))
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        self._writer = None
        self._all.end(self)
