"""Clients that do not read: their computation ends, and the bytes kept for them are bounded."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from typing import Any

import pytest
from serving import PATIENCE

from tonnage.server.engines.fake import FakeEngine
from tonnage.server.http import outbox, protocol
from tonnage.server.http.protocol import BoundedHttpProtocol

SMALL = 4096  # bytes; the kernel doubles it. What does not fit in the sockets waits in the server

# 2,000 events of some 200 bytes: far more than the sockets and the transport hold.
STORY: dict[str, Any] = {
    "model": "demo", "prompt": "hello", "n": 4, "max_tokens": 500, "seed": 1, "ignore_eos": True,
    "stream": True,
}  # fmt: skip


@pytest.fixture
def connections(monkeypatch) -> list[BoundedHttpProtocol]:
    """Return the list of the server's connections; each gets a small send buffer in the kernel."""
    made: list[BoundedHttpProtocol] = []
    original = BoundedHttpProtocol.connection_made

    def connection_made(self: BoundedHttpProtocol, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
        made.append(self)
        original(self, transport)

    monkeypatch.setattr(BoundedHttpProtocol, "connection_made", connection_made)
    return made


class Reader:
    """Sends a request and reads nothing until it is told to."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._address = host, int(port)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        self._socket.setblocking(False)
        self._connected = False

    async def send(self, path: str, body: dict[str, Any] | None = None, *, close: bool = True) -> None:
        loop = asyncio.get_running_loop()
        if not self._connected:
            await loop.sock_connect(self._socket, self._address)
            self._connected = True
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{'POST' if data else 'GET'} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
        if close:
            head += "Connection: close\r\n"
        await loop.sock_sendall(self._socket, head.encode() + b"\r\n" + data)

    async def read(self) -> bytes:
        """All that comes until the server closes, or cuts the connection."""
        loop, parts = asyncio.get_running_loop(), []
        async with asyncio.timeout(PATIENCE):
            try:
                while part := await loop.sock_recv(self._socket, 65536):
                    parts.append(part)
            except ConnectionError:
                pass
        self._socket.close()
        return b"".join(parts)


def said(stream: bytes) -> Counter[tuple[int, str, str | None]]:
    """Return the chunks of all choices, with each choice's finish reason."""
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: {")]
    choices = [event["choices"][0] for event in events]
    return Counter((choice["index"], choice["text"], choice["finish_reason"]) for choice in choices)


async def test_kv_blocks_of_a_slow_readers_sequence_are_freed_when_generation_ends(
    run_server, small_plan, connections
) -> None:
    async with run_server(FakeEngine(small_plan()), max_num_queued_reqs=4) as server:
        reader = Reader(server.url)
        await reader.send("/v1/completions", STORY)
        await server.until(lambda: server.state.accounts.outcomes["length"] == 1)
        assert connections[0].flow.write_paused
        answer = await server.complete(max_tokens=2, n=4, ignore_eos=True)
        assert answer.status_code == 200
        late = await reader.read()
        assert b"data: [DONE]" in late
        at_once = await server.complete(**STORY)
        assert said(late) == said(at_once.content)  # and whole
        assert server.state.outboxes.behind == 0


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", STORY), ("/openapi.json", None)], ids=["stream", "whole"]
)
async def test_client_that_reads_nothing_is_disconnected_after_a_time_limit(
    run_server, small_plan, connections, monkeypatch, path: str, body: dict[str, Any] | None
) -> None:
    monkeypatch.setattr(protocol, "WRITE_SECONDS", 0.5)
    async with run_server(FakeEngine(small_plan())) as server:
        reader = Reader(server.url)
        await reader.send(path, body)
        await server.until(lambda: bool(connections))
        await server.until(lambda: connections[0] not in connections[0].connections)
        text = await reader.read()
        assert text.startswith(b"HTTP/1.1 200")
        assert not text.endswith((b"}", b"0\r\n\r\n"))
        await server.until(lambda: server.state.outboxes.behind == 0)


async def test_pipelined_stream_starts_after_the_previous_response_was_read(
    run_server, small_plan, connections
) -> None:
    engine = FakeEngine(small_plan())
    async with run_server(engine) as server:
        reader = Reader(server.url)
        answered = 0
        while not (connections and connections[0].flow.write_paused):
            await reader.send("/openapi.json", close=False)
            await server.until(lambda: bool(connections))
            counts = connections[0].server_state
            await server.until(lambda: counts.total_requests > answered)  # noqa: B023
            answered = counts.total_requests
        await reader.send("/v1/completions", STORY)
        await server.until(lambda: server.state.accounts.received == 1)
        await asyncio.sleep(0.2)  # 40 times what it takes otherwise
        assert not engine.stats().admissions
        assert b"data: [DONE]" in await reader.read()


async def test_bytes_buffered_for_all_slow_readers_together_are_bounded(
    run_server, small_plan, connections, monkeypatch
) -> None:
    monkeypatch.setattr(outbox, "OUTBOX_BYTES", 150_000)
    engine = FakeEngine(small_plan())
    async with run_server(engine) as server:
        reader, glutton = Reader(server.url), Reader(server.url)
        await reader.send("/v1/completions", STORY | {"n": 1})
        await server.until(lambda: server.state.accounts.outcomes["length"] == 1)
        assert 0 < server.state.outboxes.held < 100_000
        await glutton.send("/v1/completions", STORY)
        await server.until(lambda: server.state.accounts.outcomes["aborted"] == 1)
        assert (engine.stats().running, engine.stats().pool.used) == (0, 0)
        assert b"[DONE]" not in await glutton.read()
        assert b"[DONE]" in await reader.read()  # a client that is not the furthest behind loses nothing
        assert (server.state.outboxes.held, server.state.outboxes.behind) == (0, 0)
        assert (await server.complete(max_tokens=2)).status_code == 200


async def test_slow_readers_are_disconnected_when_buffers_are_full(
    run_server, small_plan, connections, monkeypatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 2)
    async with run_server(FakeEngine(small_plan())) as server:
        readers = [Reader(server.url) for _ in range(2)]
        for number, reader in enumerate(readers, 1):
            await reader.send("/v1/completions", STORY)
            await server.until(lambda: server.state.accounts.outcomes["length"] == number)  # noqa: B023
        assert (await server.http.get("/health")).status_code == 200
        assert b"[DONE]" not in await readers[0].read()  # the one that has waited longest
        assert b"[DONE]" in await readers[1].read()
