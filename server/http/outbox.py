"""Buffers for streamed events that their clients have not read yet.

A stream that waited for a slow client would hold its sequences and its place in the queue for as long as the
client likes. Instead the stream continues, and its unread events are kept within a limit for all streams
together.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from tonnage.planner.engines.runtime.api import OUTBOX_BYTES

# OUTBOX_BYTES is the limit over all streams. With events of 250 bytes, one per token, a single slow client may
# be 67,000 tokens behind, or each of 512 clients 130 tokens, besides the 64 KiB of its connection.


class Outboxes:
    """The outboxes of one server, which drop the slowest client when they exceed OUTBOX_BYTES."""

    def __init__(self) -> None:
        self.held = 0
        self.idle = asyncio.Event()  # set while no client is behind
        self.idle.set()
        self._behind: set[Outbox] = set()

    @property
    def behind(self) -> int:
        """Number of streams whose clients have not been sent everything."""
        return len(self._behind)

    def hold(self, outbox: Outbox, size: int) -> None:
        """Add ``size`` bytes of ``outbox`` to the total."""
        self._behind.add(outbox)
        self.idle.clear()
        self.held += size
        while self.held > OUTBOX_BYTES:
            max(self._behind, key=len).cut()

    def release(self, size: int) -> None:
        """Subtract ``size`` bytes that were sent or discarded from the total."""
        self.held -= size

    def end(self, outbox: Outbox) -> None:
        """Remove an outbox whose client has received everything or disconnected."""
        self._behind.discard(outbox)
        if not self._behind:
            self.idle.set()


class Outbox:
    """Buffer of one stream, which sends events in the order of ``put``.

    It works with connections of ``BoundedHttpProtocol``. Behind another ASGI server, each event waits for the
    client.

    Args:
        outboxes: The server's outboxes, which hold the total.
        scope: The ASGI scope of the request.
        send: The ASGI send of the request.
    """

    def __init__(self, outboxes: Outboxes, scope: Scope, send: Send) -> None:
        self._all = outboxes
        self._connection: Any = scope.get("tonnage.connection")  # BoundedHttpProtocol
        self._send = send
        self._kept = bytearray()
        self._cut = False
        self._writer: asyncio.Task[None] | None = None  # runs while the buffer holds bytes

    def __len__(self) -> int:
        """Return the bytes in the buffer."""
        return len(self._kept)

    @property
    def behind(self) -> bool:
        """Whether the client has not yet read what was sent, so that further events are buffered."""
        paused = self._connection is not None and self._connection.flow.write_paused
        return self._writer is not None or paused

    async def ready(self) -> None:
        """Wait until the client has read its earlier answers on this connection."""
        if self._connection is not None:
            await self._connection.flow.drain()

    async def put(self, event: bytes) -> None:
        """Send ``event``, or buffer it when the client is behind.

        For a dropped client the call never returns; it is cancelled, as after a disconnect.
        """
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
        """Wait until everything has been sent to the client."""
        if self._writer is not None:
            await asyncio.wait((self._writer,))  # a cancelled caller must not cancel the writer

    def cut(self) -> None:
        """Abort the connection and discard the buffered events."""
        self._cut = True
        self._forget()
        self._connection.transport.abort()

    def close(self) -> None:
        """End the stream and discard the events that were not sent."""
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
            # Send complete events, because some clients treat a chunk as one event; a larger event is sent in
            # pieces.
            end = self._kept.rfind(b"\n\n", 0, HIGH_WATER_LIMIT) + 2
            piece = bytes(self._kept[: end if end > 1 else HIGH_WATER_LIMIT])
            del self._kept[: len(piece)]
            self._all.release(len(piece))
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        self._writer = None
        self._all.end(self)
