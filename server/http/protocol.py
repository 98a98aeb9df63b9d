"""uvicorn's HTTP protocol with limits on connections, heads and trailers, and with errors in OpenAI's format.

uvicorn (0.54, protocols/http/httptools_impl.py) limits neither size nor duration of heads and trailers. It has
no limit of connections, and waits forever for a client that does not read. Its answer to bytes that are not
HTTP is text/plain.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import resource
import time
from collections import deque
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tonnage.planner.errors import DeploymentError
from tonnage.server.errors import ApiError, ErrorCode, envelope, headers
from tonnage.server.http.half_closed import HalfClosed
from tonnage.server.http.receiving import UNPACED_BYTES, pacing_of

# Limit of a request's head in bytes: the default of h11 (max_incomplete_event_size), the parser of uvicorn's
# other HTTP implementation.
MAX_HEAD_BYTES = 65_536
# Limit of a request's header fields: the default of gunicorn (limit_request_fields) and of Apache
# (LimitRequestFields). uvicorn has no limit: 48 clients whose heads of 64 KB had 7,000 fields delayed /health
# by 0.5 s, and took 450 MiB (benchmarks/abuse.py fields).
MAX_HEADER_FIELDS = 100
# After its first FREE_PIECES pieces (chunks, reads), a body must have at least PIECE_BYTES per piece on
# average. Without this limit, one read from a socket can hold 40,000 chunks of one byte.
FREE_PIECES, PIECE_BYTES = 4096, 16
# Time limit for a request's head, enough for a slow connection. nginx's client_header_timeout is 60 s, and
# gunicorn's worker timeout 30 s.
HEAD_SECONDS = 20.0
WRITE_SECONDS = 60.0  # time limit in seconds for a client that reads nothing; the same as nginx's send_timeout

# Limit of connections: four times the queue's default of 512 sequences. The other connections are for rejected
# requests, health probes and idle clients. uvicorn's backlog is 2,048, too.
MAX_CONNECTIONS = 2048
# Number of idle connections closed at once when there are too many. Searching 2,048 connections for the longest
# idle takes a millisecond. One search for each of 4,000 simultaneous connections delayed /health by 14 s
# (benchmarks/abuse.py connections, load 12).
CLOSED_AT_ONCE = 64
# Number of file descriptors that connections must leave unused. With the hf engine the server itself has 46
# files open (/proc/PID/fd of the API process); 32 of them are listening sockets (commands/serve.py). Another 50
# are for an engine that starts while another one ends, for logs, and for connections that are being closed.
RESERVED_FILES = 96
# Fewest file descriptors with which the server starts: 46 of its own, and those of a starting engine.
FEWEST_FILES = 64

# Number of requests that a connection may send before the first is answered. Further requests are not read, and
# the connection is closed after the last answer. uvicorn has no limit: 128 KB with 4,738 heads blocked the
# event loop for 124 ms (11 ms with 16 heads), and the pipeline could grow without end.
MAX_PIPELINED = 16


# Number of half-closed connections that are kept open for their answers. Above it, a FIN from a client counts
# as a disconnect, as in nginx and Go. Without a limit, 5,000 clients that disconnected were all probed, which
# paused a stream for 1.3 s and left 46 MB of the heap in use (benchmarks/abuse.py resets).
MOST_HALF_CLOSED = 64
_half_closed: set[asyncio.Protocol] = set()


def max_connections() -> int:
    """Return the maximum number of connections: MAX_CONNECTIONS, or fewer when the process may open few files.

    Without a free file descriptor the server could accept no connection at all.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, files - RESERVED_FILES))


def raise_file_limit() -> None:
    """Raise the process's soft limit of open files for MAX_CONNECTIONS connections, as far as its hard limit.

    Shells and containers often give 1,024; vLLM raises the limit too (utils/system_utils.py, set_ulimit).

    Raises:
        DeploymentError: the hard limit is too low for the server itself.
    """
    wanted = MAX_CONNECTIONS + RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if possible < FEWEST_FILES:
        raise DeploymentError(
            f"the process may open {hard} files; the server needs at least {FEWEST_FILES}",
            hint=f"ulimit -n {wanted} allows {MAX_CONNECTIONS:,} connections",
        )
    if soft != resource.RLIM_INFINITY and soft < possible:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))


class _ParsingEnds(Exception):
    """Exception for httptools' callbacks: the request is rejected, and its further bytes are not parsed."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One HTTP/1.1 connection, with limits on the time and bytes of heads, trailers and unread answers.

    A head may take HEAD_SECONDS from its first byte; for the first head the time starts with the connection.
    MAX_HEAD_BYTES limits a head, the trailers, and any other bytes between two pieces of a body.
    """

    # number of bytes received since the last piece of a body, or since the end of a head or message
    _around = 0
    _fields = 0  # number of fields of the current head
    _pieces = _body_bytes = 0  # number of pieces, and bytes, of the current body
    _trailers = 0  # number of bytes in the current message's trailer fields
    _in_head = True
    _refused = False
    _since = 0.0  # monotonic time since which the connection waits for a request, or for its client to read
    _late: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _half_closed: HalfClosed | None = None
    _body: list[bytes]  # pieces of a body that uvicorn has not received yet
    _unparsed: deque[bytes]  # bytes of reads that wait for their turn
    _answering: RequestResponseCycle | None = None  # the request whose answer is being written

    @property
    def working(self) -> bool:
        """Whether a complete request has arrived and its answer is not yet written."""
        if self.pipeline:
            return True
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    @property
    def half_closed(self) -> bool:
        """Whether the client has ended its sending, and may still wait for an answer."""
        return self._half_closed is not None

    def connection_made(self, transport: Any) -> None:
        """Start the time limit of the first head; close other connections when there are too many."""
        super().connection_made(transport)
        self._body, self._unparsed = [], deque()
        self._since = time.monotonic()
        self._late = self.loop.call_later(HEAD_SECONDS, self._head_is_late)
        if len(self.connections) > max_connections():
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers of the connection."""
        self._stop_late()
        self._stop_stalled()
        if self._half_closed is not None:
            self._half_closed.stop()
            self._half_closed = None
            _half_closed.discard(self)
        super().connection_lost(exc)
        # uvicorn reports the disconnect only to the connection's newest request. An earlier request whose
        # answer is being written would continue, and wait for its disconnect forever.
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        # Requests and the connection refer to each other. Without these lines only the garbage collector would
        # free them, so a flood of connections would stay in memory after its end.
        self._answering = self.cycle = self.scope = None  # type: ignore[assignment]  # typed without None
        self.pipeline.clear()
        self._body.clear()
        self._unparsed.clear()

    # -- receiving ---------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse received bytes at once if they are few; otherwise queue them for parsing (`ReceivePacing`).

        While bytes of this connection wait in the queue, no more are read from its client.
        """
        if self._refused:
            return
        if not self._unparsed and len(data) <= UNPACED_BYTES:
            self._parse(data)
            return
        self._unparsed.append(data)
        self.transport.pause_reading()
        pacing_of(self.server_state, self.loop).add(self)

    def parse_next(self) -> None:
        """Parse the oldest received bytes that wait; if none wait any more, resume reading from the client."""
        if not self._unparsed:  # the connection has ended, which discards its received bytes
            return
        self._parse(self._unparsed.popleft())
        if not self._unparsed and not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        """Parse received bytes, and enforce the size limit on bytes outside of request bodies."""
        if self._refused:
            return
        self._around += len(data)
        super().data_received(data)
        self._pass_body()
        if max(self._around, self._trailers) > MAX_HEAD_BYTES:
            self._refuse(_too_large())
        answered = self.cycle is None or self.cycle.response_complete
        if self._late is None and answered and not self._refused and self in self.connections:
            # The bytes begin the head of the next request, or belong to a request body that is no longer read.
            # In both cases the time limit for a head starts now.
            self._late = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn closes the connection
        """Return whether to keep a half-closed connection, because a complete request waits for its answer.

        TLS has no half-closed state: asyncio and uvloop close such a connection.
        """
        while self._unparsed:
            self._parse(self._unparsed.popleft())
        waiting = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        if not waiting or self.transport.is_closing() or self.scheme == "https":
            return False
        self.cycle.keep_alive = False
        if self._half_closed is None:
            if len(_half_closed) >= MOST_HALF_CLOSED:
                return False
            _half_closed.add(self)
            self._half_closed = HalfClosed(self.transport, self.flow)
            assert self._answering is not None  # _start_asgi_task set it when the unanswered request began
            self._half_closed.watch(self._answering)
        return True

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        if self._half_closed is not None:
            self._half_closed.watch(cycle)
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        """Begin a request; its ASGI scope gets a reference to this connection, which `Outbox` uses."""
        super().on_message_begin()
        self.scope["tonnage.connection"] = self  # type: ignore[typeddict-unknown-key]  # http/outbox.py
        self._in_head = True
        self._fields = self._trailers = self._pieces = self._body_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Pass a header to uvicorn, unless there are too many; a trailer is only counted."""
        if self._in_head:
            self._fields += 1
            if self._fields > MAX_HEADER_FIELDS:
                self._refuse(_too_large(f"the request has more than {MAX_HEADER_FIELDS} header fields"))
                raise _ParsingEnds
            super().on_header(name, value)
        # No endpoint uses trailers. They come after the body, when the headers have already been processed.
        else:
            self._trailers += len(name) + len(value)

    def on_headers_complete(self) -> None:
        """Enforce the size limit of the request's head, then start the request."""
        self._in_head = False
        self._around = 0
        self._stop_late()
        if not self.flow.write_paused:
            # A new answer begins, so unsent bytes of the earlier answer no longer show that the client stalled.
            self._stop_stalled()
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MAX_HEAD_BYTES:
            self._refuse(_too_large())
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body, and pass all pieces to uvicorn together when the received bytes are parsed.

        uvicorn copies the whole body for each piece that it gets. With pieces of one byte, 32 clients that sent
        30 KB each delayed /health by 1.2 s (benchmarks/abuse.py chunks).
        """
        self._around = 0
        if self._refused:
            return
        self._pieces, self._body_bytes = self._pieces + 1, self._body_bytes + len(body)
        if self._pieces > FREE_PIECES and self._body_bytes < self._pieces * PIECE_BYTES:
            message = f"the body's chunks have fewer than {PIECE_BYTES} bytes on average; send larger ones"
            self._refuse(ApiError(ErrorCode.MALFORMED_HTTP, message))
            raise _ParsingEnds
        self._body.append(body)

    def _pass_body(self) -> None:
        """Pass the kept pieces of the body to uvicorn as one, unless the request is rejected."""
        if self._body and not self._refused:
            super().on_body(b"".join(self._body))
        self._body.clear()

    def on_message_complete(self) -> None:
        """End the request; read no more from a connection with MAX_PIPELINED unanswered requests."""
        self._around = 0
        self._pass_body()
        if not self._refused and self._trailers <= MAX_HEAD_BYTES:
            super().on_message_complete()
            if len(self.pipeline) >= MAX_PIPELINED:
                self.cycle.keep_alive = False
                self._refused = True

    def send_400_response(self, msg: str) -> None:
        """Reject bytes that are not HTTP with an error in OpenAI's format."""
        self._refuse(ApiError(ErrorCode.MALFORMED_HTTP, "the bytes received are not an HTTP/1.1 request"))

    def _head_is_late(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            self.transport.close()  # no answer is sent, because the client never sent a complete head

    def _stop_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    # -- limit of connections ----------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Close the connections that have waited longest for a request, to make room for this new one.

        If none waits for a request, close those that have waited longest for their client to read. If every
        connection has a request in progress, reject this new connection instead.
        """
        others = [
            each for each in self.connections if isinstance(each, BoundedHttpProtocol) and each is not self
        ]
        waiting = [each for each in others if not each.working]
        waiting = waiting or [each for each in others if each.flow.write_paused]
        if waiting:
            count = min(CLOSED_AT_ONCE, max(1, max_connections() // 32))
            for longest in heapq.nsmallest(count, waiting, key=lambda each: each._since):
                self.connections.discard(longest)
                longest.transport.abort()
        else:
            limit = max_connections()
            self._refuse(
                ApiError(ErrorCode.SERVER_OVERLOADED, f"all {limit} connections of the server are in use")
            )

    # -- sending -----------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Start the time limit for a client that does not read its answer."""
        super().pause_writing()
        self._since = time.monotonic()
        self._watch_sending()

    def resume_writing(self) -> None:
        """Stop the time limit of a client that reads again."""
        super().resume_writing()
        self._stop_stalled()

    def on_response_complete(self) -> None:
        """Mark the connection as waiting for its next request.

        A client that does not read the rest of its answer is disconnected after WRITE_SECONDS.
        """
        self._since = time.monotonic()
        super().on_response_complete()
        # without a time limit, close() would wait forever for a client that does not read
        self._watch_sending()

    def _watch_sending(self) -> None:
        self._stop_stalled()
        unsent = self.transport.get_write_buffer_size()
        if unsent:
            self._stalled = self.loop.call_later(WRITE_SECONDS, self._still_unsent, unsent)

    def _still_unsent(self, before: int) -> None:
        """Disconnect a client that has read nothing since the last check, when ``before`` bytes were unsent.

        The server then cancels the client's request, as after every disconnect.
        """
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
        """Send ``error`` as the last answer of this connection and close it.

        When another answer has already begun, the connection is closed without the error.
        """
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


def _too_large(
    message: str = f"the request's headers or trailers are larger than {MAX_HEAD_BYTES} bytes",
) -> ApiError:
    return ApiError(ErrorCode.HEADERS_TOO_LARGE, message)
