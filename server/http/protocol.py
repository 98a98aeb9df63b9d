"""uvicorn's HTTP protocol with limits on a request's head, and errors in the envelope of all others.

uvicorn (0.54, protocols/http/httptools_impl.py) bounds neither the bytes nor the time of a head, and answers
bytes that are not HTTP with text/plain.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tonnage.server.errors import ApiError, ErrorCode, envelope, headers

MAX_HEAD_BYTES = 65_536  # h11's default (max_incomplete_event_size), which uvicorn's other protocol has
HEAD_SECONDS = 20.0  # nginx's client_header_timeout is 60, gunicorn's worker timeout 30: a slow line still fits


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    _head_bytes = 0
    _in_head = True
    _refused = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self._refused:
            self._refuse(
                ApiError(
                    ErrorCode.HEADERS_TOO_LARGE, f"the request's headers are larger than {MAX_HEAD_BYTES} bytes"
                )
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._stop_timer()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._refuse(
                ApiError(
                    ErrorCode.HEADERS_TOO_LARGE, f"the request's headers are larger than {MAX_HEAD_BYTES} bytes"
                )
            )
            return
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(ErrorCode.MALFORMED_HTTP, "the bytes received are not an HTTP/1.1 request"))

    def _head_is_late(self) -> None:
        if self._in_head and self.transport is not None and not self.transport.is_closing():
            self.transport.close()  # nothing is owed to a connection that never asked

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, error: ApiError) -> None:
        if self._refused:
            return
        self._refused = True
        body = json.dumps(envelope(error)).encode()
        fields = headers(error) | {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        lines = b"".join(f"{name}: {value}\r\n".encode() for name, value in fields.items())
        self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + body)
        self.transport.close()
