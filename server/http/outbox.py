"""Buffers for streamed events that their clients have not read yet.

If the engine's stream waited for a slow client, it would hold its sequences and its place in the queue until
the client has read. Instead the stream continues, and its unread events are buffered. One limit applies to the
buffers of all streams together.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from starlette.types import Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from tonnage.planner.engines.runtime.api import OUTBOX_BYTES
from tonnage.server.errors import ApiError, ErrorCode

# OUTBOX_BYTES is the limit over all streams. With events of 250 bytes, one per token, a single slow client may
# have 67,000 unread tokens, or 512 clients 130 tokens each. In addition, each connection buffers 64 KiB.


class Buffer(Protocol):
    """Interface of a buffer of an answer's bytes that the client has not received; ``len`` is their number."""

    def __len__(self) -> int:
        """Return the number of bytes of the answer in this buffer."""

    def cut(self) -> None:
        """Discard the answer in this buffer and release its bytes."""


class Outboxes:
    """The buffers (outboxes) of all answers of one server, both streamed and unstreamed.

    When all buffers together exceed OUTBOX_BYTES, the largest is discarded, and its client gets an error or is
    disconnected.
    """

    def __init__(self) -> None:
        self.held = 0
        self.idle = asyncio.Event()  # an event that is set while no answer has unsent bytes
        self.idle.set()
        self._behind: set[Buffer] = set()

    @property
    def behind(self) -> int:
        """Number of answers with bytes that are not yet sent to their clients."""
        return len(self._behind)

    def hold(self, outbox: Buffer, size: int) -> None:
        """Count ``size`` more bytes in ``outbox``; if all buffers exceed the limit, discard the largest."""
        self._behind.add(outbox)
        self.idle.clear()
        self.held += size
        while self.held > OUTBOX_BYTES:
            max(self._behind, key=len).cut()

    def release(self, size: int) -> None:
        """Subtract ``size`` unsent bytes from the total of all buffers, because they were sent or discarded."""
        self.held -= size

    def end(self, outbox: Buffer) -> None:
        """Stop counting ``outbox``, which has sent all its events or whose client has disconnected."""
        self._behind.discard(outbox)
        if not self._behind:
            self.idle.set()


class HeldAnswer:
    """Counter of an unstreamed answer's bytes, which count towards the limit of all answers' buffers."""

    def __init__(self, outboxes: Outboxes) -> None:
        self._outboxes = outboxes
        self._size = 0
        self.is_cut = False

    def __len__(self) -> int:
        return self._size

    def hold(self, size: int) -> None:
        """Count ``size`` more bytes of this answer.

        Raises:
            ApiError: This answer was the largest when all buffers together exceeded their limit.
        """
        if size and not self.is_cut:
            self._size += size
            self._outboxes.hold(self, size)
        if self.is_cut:
            raise ApiError(
                ErrorCode.SERVER_OVERLOADED,
                f"the answers that are not sent yet exceed {OUTBOX_BYTES} bytes, and this one is the largest; "
                "send stream: true, or ask for fewer logprobs and token ids",
            )

    def cut(self) -> None:
        """Mark the answer as discarded, and release its bytes."""
        self.is_cut = True
        self.close()

    def close(self) -> None:
        """Subtract this answer's bytes from the total of all buffers."""
        self._outboxes.release(self._size)
        self._size = 0
        self._outboxes.end(self)


class Outbox:
    """Buffer of one stream's events, which sends them in the order of ``put``.

    It buffers only on connections of ``BoundedHttpProtocol``. With another ASGI server, each event waits until
    the client can receive it.

    Args:
        outboxes: The server's outboxes, which count the bytes of all streams.
        scope: The ASGI scope of the request.
        send: The ASGI send of the request.
    """

    def __init__(self, outboxes: Outboxes, scope: Scope, send: Send) -> None:
        self._all = outboxes
        # the BoundedHttpProtocol of this connection, or None
        self._connection: Any = scope.get("tonnage.connection")
        self._send = send
        self._kept = bytearray()
        self._cut = False
        # the task that sends buffered events; None while the buffer is empty
        self._writer: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Return the number of unsent bytes in this stream's buffer."""
        return len(self._kept)

    @property
    def behind(self) -> bool:
        """Whether events must be buffered, because the client has not yet read the earlier ones."""
        paused = self._connection is not None and self._connection.flow.write_paused
        return self._writer is not None or paused

    async def ready(self) -> None:
        """Wait until the client has read the earlier answers of the connection (HTTP pipelining)."""
        if self._connection is not None:
            await self._connection.flow.drain()

    async def put(self, event: bytes) -> None:
        """Send ``event``, or buffer it when the client has not yet read earlier events.

        If the client was disconnected because it read too slowly, the call waits until its task is cancelled,
        as happens after every disconnect.
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
        """Wait until all buffered events have been sent to the client."""
        if self._writer is not None:
            # Unlike `await self._writer`, asyncio.wait does not cancel the writer when this task is cancelled.
            await asyncio.wait((self._writer,))

    def cut(self) -> None:
        """Disconnect the client and discard the buffered events."""
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
            # Send only whole events, because some clients parse each HTTP chunk as one event. Only an event
            # larger than HIGH_WATER_LIMIT is split.
            end = self._kept.rfind(b"\n\n", 0, HIGH_WATER_LIMIT) + 2
            piece = bytes(self._kept[: end if end > 1 else HIGH_WATER_LIMIT])
            del self._kept[: len(piece)]
            self._all.release(len(piece))
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        self._writer = None
        self._all.end(self)
