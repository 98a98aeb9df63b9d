"""uvicorn's HTTP protocol with limits on a connection and on what stands around a body; errors in the envelope
of all others.

uvicorn (0.54, protocols/http/httptools_impl.py) bounds neither the bytes nor the time of heads and trailers,
nor the number of connections, nor the time of a client that does not read; and it answers bytes that are not
HTTP with text/plain.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import resource
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tonnage.server.errors import ApiError, ErrorCode, envelope, headers
from tonnage.server.http.half_closed import HalfClosed

MAX_HEAD_BYTES = 65_536  # h11's default (max_incomplete_event_size), which uvicorn's other protocol has
HEAD_SECONDS = 20.0  # nginx's client_header_timeout is 60, gunicorn's worker timeout 30: a slow line still fits
WRITE_SECONDS = 60.0  # nginx's send_timeout: how long a client may take nothing of what it asked for

# Four times the queue's default of 512 sequences: those that wait, and as many again to be told that it is full
# or to ask how the server does. uvicorn's own backlog has 2,048 too.
MAX_CONNECTIONS = 2048
# Places made at once when there are more. Looking for those that have waited longest takes a millisecond with
# 2,048; done for each of 4,000 connections that came together it held up /health for 14 s (benchmarks/abuse.py
# connections, load 12).
ROOM = 64
# Of the limit of open files. With the hf engine 18 are open (/proc/PID/fd of the API process): the rest is for
# an engine that starts beside one that ends, for logs, and for connections that are closed but not yet gone.
KEPT_FILES = 64
# Requests sent before the answer to the first; the connection is closed after them. uvicorn takes all it reads:
# 128 KB with 4,738 heads stood the event loop still for 124 ms (11 ms with 16) and the line had no end.
MAX_PIPELINED = 16


def max_connections() -> int:
    """MAX_CONNECTIONS, or what the limit of open files leaves: without one nobody is accepted at all."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, files - KEPT_FILES))


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection.

    A head has HEAD_SECONDS from its first byte, the first one from the connection. MAX_HEAD_BYTES is the limit
    of a head, of trailers, and of anything else between two pieces of a body.
    """

    _around = 0  # bytes received since the last piece of a body, or end of a head or message
    _trailers = 0  # bytes of this message's trailer fields
    _in_head = True
    _refused = False
    _since = 0.0  # when it began to wait for a request, or for its client to read
    _late: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _half_closed: HalfClosed | None = None
    _answering: RequestResponseCycle

    @property
    def working(self) -> bool:
        """A whole request came in, and its answer has not been written yet."""
        if self.pipeline:
            return True
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._since = time.monotonic()
        self._late = self.loop.call_later(HEAD_SECONDS, self._head_is_late)
        if len(self.connections) > max_connections():
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_late()
        self._stop_stalled()
        if self._half_closed is not None:
            self._half_closed.stop()
        super().connection_lost(exc)

    # -- what a client sends -----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._around += len(data)
        super().data_received(data)
        if max(self._around, self._trailers) > MAX_HEAD_BYTES:
            self._refuse(_too_large())
        answered = self.cycle is None or self.cycle.response_complete
        if self._late is None and answered and not self._refused and self in self.connections:
            # The next head has begun, or this is what was left of a body that nobody reads.
            self._late = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn closes
        """Whether it stays open: nothing more comes, but a whole request waits for its answer.
        TLS has no half (asyncio and uvloop close it anyway)."""
        owed = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        if not owed or self.transport.is_closing() or self.scheme == "https":
            return False
        self.cycle.keep_alive = False
        if self._half_closed is None:
            self._half_closed = HalfClosed(self.transport, self.flow)
            self._half_closed.watch(self._answering)
        return True

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        if self._half_closed is not None:
            self._half_closed.watch(cycle)
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["tonnage.connection"] = self  # type: ignore[typeddict-unknown-key]  # http/outbox.py
        self._in_head = True
        self._trailers = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)
        else:  # a trailer: nothing here asks for one, and the headers have been acted on
            self._trailers += len(name) + len(value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._around = 0
        self._stop_late()
        if not self.flow.write_paused:
            self._stop_stalled()  # a new answer is about to be written: what is unsent says no more
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MAX_HEAD_BYTES:
            self._refuse(_too_large())
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._around = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._around = 0
        if not self._refused and self._trailers <= MAX_HEAD_BYTES:
            super().on_message_complete()
            if len(self.pipeline) >= MAX_PIPELINED:
                self.cycle.keep_alive = False
                self._refused = True

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(ErrorCode.MALFORMED_HTTP, "the bytes received are not an HTTP/1.1 request"))

    def _head_is_late(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            self.transport.close()  # nothing is owed to a connection that never asked

    def _stop_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    # -- how many there are ------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """In the place of one that has waited longest for a request, or for its client to read, with room for a
        few more; refused if all work."""
        others = [
            each for each in self.connections if isinstance(each, BoundedHttpProtocol) and each is not self
        ]
        waiting = [each for each in others if not each.working]
        waiting = waiting or [each for each in others if each.flow.write_paused]
        if waiting:
            room = min(ROOM, max(1, max_connections() // 32))
            for longest in heapq.nsmallest(room, waiting, key=lambda each: each._since):
                self.connections.discard(longest)
                longest.transport.abort()
        else:
            limit = max_connections()
            self._refuse(
                ApiError(ErrorCode.SERVER_OVERLOADED, f"all {limit} connections of the server are in use")
            )

    # -- what a client reads -----------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._since = time.monotonic()
        self._watch_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stalled()

    def on_response_complete(self) -> None:
        self._since = time.monotonic()
        super().on_response_complete()
        self._watch_sending()  # also what is left of an answer goes within a time, or close() waits for ever

    def _watch_sending(self) -> None:
        self._stop_stalled()
        unsent = self.transport.get_write_buffer_size()
        if unsent:
            self._stalled = self.loop.call_later(WRITE_SECONDS, self._still_unsent, unsent)

    def _still_unsent(self, before: int) -> None:
        """Drop a client that took nothing; what is computed for it ends, as when it hangs up."""
        self._stalled = None
        if self.transport.get_write_buffer_size() < before:
            self._watch_sending()
        else:
            self.transport.abort()

    def _stop_stalled(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    # ----------------------------------------------------------------------------------------------------

    def _refuse(self, error: ApiError) -> None:
        """The last answer on this connection; none in the middle of another one."""
        if self._refused:
            return
        self._refused = True
        self._stop_late()
        begun = self.cycle is not None and self.cycle.response_started
        if not begun or (self._in_head and self.cycle.response_complete):
            body = json.dumps(envelope(error)).encode()
            fields = headers(error) | {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
            }
            lines = b"".join(f"{name}: {value}\r\n".encode() for name, value in fields.items())
            self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + body)
        self.transport.close()
        self._watch_sending()


def _too_large() -> ApiError:
    return ApiError(
        ErrorCode.HEADERS_TOO_LARGE, f"the request's headers or trailers are larger than {MAX_HEAD_BYTES} bytes"
    )
