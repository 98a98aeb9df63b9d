"""TLS handshakes, counted and limited in time from the moment a connection is accepted.

asyncio and uvloop create the protocol object of a TLS connection only after the handshake, for which a client
has 60 s. Connections that never send a handshake could use up all file descriptors without being counted. Here
every connection begins with `TlsHandshake`, and the HTTP protocol takes over when the handshake is complete.
OpenSSL's state for a connection (48 KiB) is allocated when the client sends its first bytes.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, cast

from tonnage.server.http.protocol import CLOSED_AT_ONCE, BoundedHttpProtocol, max_connections

# Time limit of a handshake, which takes two round trips. nginx's client_header_timeout of 60 s includes it.
# This limit is shorter, because a client without an API key can hold a connection here.
HANDSHAKE_SECONDS = 10.0


class Handshakes:
    """The TLS handshakes in progress; calling the object creates the protocol of a connection, for uvicorn.

    Args:
        context: TLS context with the server's certificate.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self.context = context
        self.waiting: dict[TlsHandshake, None] = {}  # handshakes in progress, in the order of acceptance

    def __call__(self, **arguments: Any) -> TlsHandshake:
        """Return the protocol of a new connection; uvicorn passes ``arguments`` for its HTTP protocol."""
        return TlsHandshake(self, lambda: BoundedHttpProtocol(**arguments), arguments["server_state"])

    def make_room(self, connections: int) -> None:
        """Close the oldest handshakes if there are too many connections.

        ``connections`` is the number of connections whose handshake is complete. The limit holds for these and
        the handshakes together.
        """
        if len(self.waiting) + connections <= max_connections():
            return
        for oldest in list(self.waiting)[: min(CLOSED_AT_ONCE, len(self.waiting) - 1)]:
            oldest.close()


class TlsHandshake(asyncio.Protocol):
    """The asyncio protocol of a connection until its TLS handshake is complete."""

    def __init__(self, handshakes: Handshakes, make: Callable[[], BoundedHttpProtocol], state: Any) -> None:
        self._handshakes, self._make, self._state = handshakes, make, state
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._early = bytearray()  # bytes received before the protocol that parses them (TLS or HTTP) took over
        self._ended = False  # whether the client has ended the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the handshake, and close older handshakes when there are too many connections."""
        self._transport = cast("asyncio.Transport", transport)
        self._handshakes.waiting[self] = None
        self._handshakes.make_room(len(self._state.connections))
        self._limit = asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, self.close)

    async def _shake_hands(self) -> None:
        loop, transport = asyncio.get_running_loop(), self._transport
        assert transport is not None
        work = loop.create_task(loop.start_tls(transport, self, self._handshakes.context, server_side=True))
        # When start_tls begins, it schedules calls by which asyncio's TLS protocol takes over the connection.
        # Two nested call_soon make `_pass_on` run directly after those calls.
        loop.call_soon(loop.call_soon, self._pass_on)
        try:
            encrypted = await work
        except (OSError, asyncio.CancelledError):  # SSLError and timeouts are OSErrors
            transport.abort()
            return
        finally:
            self._forget()
        if encrypted is None or encrypted.is_closing() or self._ended:
            transport.abort()
            return
        protocol = self._make()
        encrypted.set_protocol(protocol)
        protocol.connection_made(encrypted)
        if self._early:
            protocol.data_received(bytes(self._early))

    def _pass_on(self) -> None:
        """Give asyncio's TLS protocol the bytes that arrived before start_tls took over the connection."""
        early, self._early = self._early, bytearray()
        protocol: Any = None if self._transport is None else self._transport.get_protocol()
        if protocol is self or not early:
            return
        while early:
            buffer = protocol.get_buffer(len(early))
            count = min(len(buffer), len(early))
            buffer[:count] = early[:count]
            protocol.buffer_updated(count)
            del early[:count]

    def data_received(self, data: bytes) -> None:
        """Keep received bytes: those of the handshake for `_pass_on`, later ones for the HTTP protocol."""
        self._early += data
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._shake_hands())

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the handshakes in progress, because its client has closed it."""
        self._ended = True
        self._forget()

    def close(self) -> None:
        """Close the connection before its handshake is complete."""
        self._forget()
        if self._task is not None:
            self._task.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _forget(self) -> None:
        self._handshakes.waiting.pop(self, None)
        if self._limit is not None:
            self._limit.cancel()
