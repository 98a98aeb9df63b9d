"""Connections whose client has closed its sending half: detects whether the client still waits for its answer.

A disconnected client looks the same (one FIN) until the server writes to it: its host then answers with a
reset, and the next write fails. A slow answer is therefore begun early, byte by byte. The bytes are the start
that all answers share, or zeros before the size of the next chunk (RFC 9112, 7.1: chunk-size is 1*HEXDIG). An
interim ``100 Continue`` would work too, but HTTP/1.0 has none, and Go's client accepts only five of them.

RFC 9112 says that a half-closed connection does not imply that the client wants no answer
(github.com/httpwg/http-core/issues/22). uvicorn, nginx (unless proxy_ignore_client_abort is set) and Go's
net/http treat the FIN as a disconnect, which avoids the problem.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

START = b"HTTP/1.1 "  # the start of uvicorn's STATUS_LINE for every status

# Delay before the first byte; it doubles for each further byte. Most answers need no such byte. A disconnected
# client is detected by the second one, 0.15 s after the FIN (later on a connection with a long round trip).
FIRST_SECONDS = 0.05


class HalfClosed:
    """Probe of a half-closed connection: writes the nine bytes of ``START`` one at a time, the last after 26 s.

    Later, a stream's own events and keep-alive comments are the probe.
    """

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow
        self._left = len(START)
        self._begun: _StartedTransport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, cycle: RequestResponseCycle) -> None:
        """Start probing the client; ``cycle`` is the request whose answer comes next on the connection."""
        self._cycle = cycle
        self._begun = None
        if self._timer is None:
            self._probe_in(FIRST_SECONDS)

    def stop(self) -> None:
        """Stop probing, because the connection is lost."""
        if self._timer is not None:
            self._timer.cancel()

    def _probe_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._probe, 2 * seconds)

    def _probe(self, seconds: float) -> None:
        if self._transport.is_closing():
            return
        cycle = self._cycle
        if self._flow.write_paused:
            pass  # the data that waits to be sent is the probe
        elif not cycle.response_started:
            if self._begun is None:
                cycle.transport = self._begun = _StartedTransport(self._transport)
            self._begun.write_ahead()
        elif cycle.chunked_encoding and not cycle.response_complete:
            self._transport.write(b"0")
        self._left -= 1
        if self._left:
            self._probe_in(seconds)


class _StartedTransport(asyncio.Transport):
    """The transport of an answer whose first bytes are sent, with the methods that uvicorn's cycle uses."""

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
