"""Detection of whether a client that closed its sending half still waits for its answer.

A FIN arrives both from a client that disconnects and from a client that only ends its sending. The server
learns the difference when it writes: the host of a disconnected client answers with a reset, and the next write
fails. The server therefore sends the first bytes of a slow answer early, one at a time. These bytes are the
start that all answers share, or leading zeros of the next chunk's size (RFC 9112, 7.1: chunk-size is 1*HEXDIG).
An interim ``100 Continue`` would work too, but HTTP/1.0 has none, and Go's client accepts only five of them.

RFC 9112 says that a half-closed connection does not imply that the client wants no answer
(github.com/httpwg/http-core/issues/22). uvicorn, nginx (unless proxy_ignore_client_abort is set) and Go's
net/http nevertheless treat the FIN as a disconnect.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

START = b"HTTP/1.1 "  # uvicorn's STATUS_LINE begins with these bytes for every status

# Delay before the first probe byte; it doubles for each further byte. Most answers are sent before the first
# byte is due. A disconnected client is detected by the second byte, 0.15 s after the FIN (later on a connection
# with a long round trip).
FIRST_SECONDS = 0.05
# Seconds after the FIN within which the probe detects a disconnected client. The probe sends its second byte
# after 3 x FIRST_SECONDS, and the rest of the time is for the reset that follows the second byte.
PROBED_SECONDS = 4 * FIRST_SECONDS


class HalfClosed:
    """Probe that detects whether the client of a half-closed connection has disconnected.

    The probe writes the nine bytes of ``START``, the beginning of every answer, one at a time, the last after
    26 s. Later the events and keep-alive comments of a stream act as the probe.
    """

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow
        self._left = len(START)
        self._begun: _StartedTransport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, cycle: RequestResponseCycle) -> None:
        """Start to probe the connection of a client whose request still waits for its answer.

        ``cycle`` is uvicorn's object for that request, whose answer comes next on the connection.
        """
        self._cycle = cycle
        self._begun = None
        if self._timer is None:
            self._probe_in(FIRST_SECONDS)

    def stop(self) -> None:
        """Stop probing the client, because its connection is closed."""
        if self._timer is not None:
            self._timer.cancel()

    def _probe_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._probe, 2 * seconds)

    def _probe(self, seconds: float) -> None:
        if self._transport.is_closing():
            return
        cycle = self._cycle
        if self._flow.write_paused:
            pass  # data already waits to be sent; the attempt to send it serves as the probe
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
    """A transport that skips the first bytes of an answer, which were already sent to probe the connection.

    The class implements only the methods that uvicorn's request cycle calls.
    """

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
