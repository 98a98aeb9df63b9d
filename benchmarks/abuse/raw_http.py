"""HTTP over bare sockets, without checks on the client's side."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

HOST = "127.0.0.1"
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = "/v1/messages"
MODEL = "demo"

_CODE = re.compile(rb'"code": ?"(\w+)"')
_ERROR = re.compile(rb'^data: \{"(?:error|type": ?"error)"', re.MULTILINE)
_KEPT = 65_536  # bytes of an answer that are kept: its first part and its end


@dataclass(frozen=True, slots=True)
class Address:
    """A port of HOST, and the file of the server's certificate if it serves over TLS."""

    port: int
    certificate: str | None = None


def request(path: str, key: str, body: bytes | dict[str, Any] | None = None, extra: str = "") -> bytes:
    """Return the bytes of a request: a POST with a body, or a GET on a keep-alive connection.

    ``extra`` is further header lines, each with its line end.
    """
    if isinstance(body, dict):
        body = json.dumps({"model": MODEL} | body).encode()
    method = "GET" if body is None else "POST"
    head = f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {key}\r\n{extra}"
    if body is not None:
        head += f"Connection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + (body or b"")


@contextlib.asynccontextmanager
async def connection(address: Address) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection and reset it at the end, even within a request."""
    trust = address.certificate and ssl.create_default_context(cafile=address.certificate)
    reader, writer = await asyncio.open_connection(HOST, address.port, ssl=trust or None)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer(reader: asyncio.StreamReader) -> str:
    """Return the answer in short: the status, and the code of an error, also of an error within a stream."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        status = head.split(None, 2)[1].decode()
        begun = last = b""
        while part := await reader.read(_KEPT):
            begun = begun or part
            last = (last + part)[-_KEPT:]
    except (asyncio.IncompleteReadError, ConnectionError):
        return "closed"
    if status != "200":
        code = _CODE.search(begun)
        return f"{status} {code[1].decode()}" if code else status
    if b"data: " not in begun:
        return status
    error = _ERROR.search(last)
    if error is not None:
        code = _CODE.search(last, error.start())
        return f"200, then {code[1].decode() if code else 'an error'}"
    return status if b"[DONE]" in last or b"response.completed" in last else "200, cut off"


async def ask(address: Address, path: str, key: str, body: bytes | dict[str, Any]) -> str:
    """Send one request on a new connection and return the answer in short."""
    try:
        async with connection(address) as (reader, writer):
            writer.write(request(path, key, body))  # asyncio sends the rest while the answer is read
            return await answer(reader)
    except OSError as error:
        return type(error).__name__


async def get(address: Address, path: str, key: str, seconds: float = 10) -> Any:
    """Return the JSON of a page, or None without a timely answer of status 200."""
    try:
        async with asyncio.timeout(seconds), connection(address) as (reader, writer):
            writer.write(request(path, key, extra="Connection: close\r\n"))
            head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
            return json.loads(body) if head.startswith(b"HTTP/1.1 200") else None
    except (OSError, TimeoutError, ValueError):
        return None
