"""A client that has closed its half of the connection: it sends nothing more, and may well wait for its answer.

A client that is gone looks the same (one FIN) until something is written to it: then its host answers with a
reset, and the next write fails. So an answer that takes long begins early, byte by byte: with what every answer
starts with, or with zeros before the size of the next chunk (RFC 9112, 7.1: chunk-size is 1*HEXDIG). An interim
``100 Continue`` would ask as well, but HTTP/1.0 has none, and Go's client takes five of them.

RFC 9112 says that a half-closed connection does not imply a client that wants no answer any more
(github.com/httpwg/http-core/issues/22). uvicorn, nginx (unless proxy_ignore_client_abort is set) and Go's
net/http take the FIN for a hang-up, which saves the question.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

START = b"HTTP/1.1 "  # of uvicorn's STATUS_LINE, whatever the status

# Until the first byte; then twice as long each time. Most answers need none, and a client that is gone is found
# out by the second one, 0.15 s after it left (longer where the way to it and back takes longer).
FIRST_SECONDS = 0.05


class HalfClosed:
    """Finds out whether the client is still there; START gives it nine bytes, the last after 26 s. (Later a
    stream's own events and comments tell.)"""

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow
        self._left = len(START)
        self._begun: _Begun | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, cycle: RequestResponseCycle) -> None:
        """The answer that is being made is that of ``cycle``."""
        self._cycle = cycle
        self._begun = None
        if self._timer is None:
            self._ask_in(FIRST_SECONDS)

    def stop(self) -> None:
        """The connection is lost."""
        if self._timer is not None:
            self._timer.cancel()

    def _ask_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._ask, 2 * seconds)

    def _ask(self, seconds: float) -> None:
        if self._transport.is_closing():
            return
        cycle = self._cycle
        if self._flow.write_paused:
            pass  # what waits to be sent asks
        elif not cycle.response_started:
            if self._begun is None:
                cycle.transport = self._begun = _Begun(self._transport)
            self._begun.write_ahead()
        elif cycle.chunked_encoding and not cycle.response_complete:
            self._transport.write(b"0")
        self._left -= 1
        if self._left:
            self._ask_in(seconds)


class _Begun(asyncio.Transport):
    """The transport of an answer whose first bytes are out already; what uvicorn's cycle uses of one."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._out = 0

    def write_ahead(self) -> None:
        self._transport.write(START[self._out : self._out + 1])
        self._out += 1

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data[self._out :])
        self._out = 0

    def close(self) -> None:
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()
