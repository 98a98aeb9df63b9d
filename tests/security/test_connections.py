"""What one connection may take: time and bytes of heads and trailers, and its place among the others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from resource import RLIM_INFINITY
from typing import Any

import pytest
from serving import PATIENCE
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tonnage.server.engines.fake import FakeEngine
from tonnage.server.http import protocol
from tonnage.server.http.protocol import (
    FREE_PIECES,
    MAX_CONNECTIONS,
    MAX_HEAD_BYTES,
    MAX_HEADER_FIELDS,
    MAX_PIPELINED,
    RESERVED_FILES,
    max_connections,
)

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
BODY = json.dumps({"model": "demo", "prompt": "hello", "max_tokens": 2}).encode()
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(BODY), BODY)
)


class Connection:
    """A bare socket, closed on the way out."""

    def __init__(self, url: str) -> None:
        self._host, self._port = url.removeprefix("http://").split(":")

    async def __aenter__(self) -> Connection:
        self.reader, self.writer = await asyncio.open_connection(self._host, int(self._port))
        return self

    async def __aexit__(self, *error: object) -> None:
        self.writer.close()

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer, which says its length."""
        async with asyncio.timeout(PATIENCE):
            head = await self.reader.readuntil(b"\r\n\r\n")
            (length,) = [
                int(line.partition(b":")[2])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length:")
            ]
            return int(head.split()[1]), await self.reader.readexactly(length)

    async def end(self) -> None:
        """Wait until the server has closed it; fails when that does not happen."""
        async with asyncio.timeout(PATIENCE):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(65536):
                    pass


@pytest.mark.parametrize(
    ("start", "piece"), [(b"GET /health HTTP/1.1\r\nX: ", b"x"), (b"", b"\r\n")], ids=["value", "blank lines"]
)
async def test_slow_request_head_on_keep_alive_connection_times_out(
    server, monkeypatch, start: bytes, piece: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.5)
    async with Connection(server.url) as slow:
        slow.send(HEALTH)
        assert (await slow.answer())[0] == 200

        slow.send(start)

        async def drip() -> None:
            while True:
                slow.send(piece)
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        await slow.end()
        dripping.cancel()


async def test_connection_whose_request_body_is_never_read_is_closed_after_a_time_limit(
    server, monkeypatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.5)
    async with Connection(server.url) as slow:
        slow.send(b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert (await slow.answer())[0] == 200

        async def drip() -> None:
            while True:
                slow.send(b" ")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        await slow.end()
        dripping.cancel()


FIELD = b"X-Trailer: a\r\n"
TOO_LONG = {
    "fields": (b"0\r\n" + FIELD * (MAX_HEAD_BYTES // len(FIELD) + 1)),
    "one value": b"0\r\nX: " + b"a" * MAX_HEAD_BYTES,
    "chunk extension": b"1;x=" + b"a" * MAX_HEAD_BYTES,
}


@pytest.mark.parametrize("around", TOO_LONG.values(), ids=TOO_LONG)
async def test_chunk_extensions_and_trailers_count_towards_the_body_limit(server, around: bytes) -> None:
    async with Connection(server.url) as sender:
        sender.send(CHUNKED)
        await server.until(lambda: server.state.accounts.received == 1)
        sender.send(around)
        status, body = await sender.answer()
        assert (status, json.loads(body)["error"]["code"]) == (431, "headers_too_large")
        await sender.end()
    await server.until(lambda: server.state.accounts.outcomes["aborted"] == 1)
    async with Connection(server.url) as sender:
        sender.send(CHUNKED + b"0\r\n" + FIELD * 8 + b"\r\n")
        assert (await sender.answer())[0] == 200


async def test_number_of_pipelined_requests_is_bounded(server) -> None:
    async with Connection(server.url) as sender:
        sender.send(HEALTH * 1000)
        for _ in range(1 + MAX_PIPELINED):
            assert (await sender.answer())[0] == 200
        async with asyncio.timeout(PATIENCE):
            with contextlib.suppress(ConnectionError):
                assert await sender.reader.read() == b""
    async with Connection(server.url) as sender:  # one after the other as many as it likes
        for _ in range(10 * MAX_PIPELINED):
            sender.send(HEALTH)
            assert (await sender.answer())[0] == 200


async def test_running_request_is_aborted_on_disconnect_even_if_another_is_pipelined_behind_it(
    run_server, small_plan
) -> None:
    engine = FakeEngine(small_plan(), token_rate=20)
    body = json.dumps({"model": "demo", "prompt": "hello", "max_tokens": 1000}).encode()
    async with run_server(engine) as server:
        async with Connection(server.url) as sender:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            sender.send(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body) + HEALTH)
            await server.until(lambda: engine.stats().running == 1)
            sender.writer.transport.abort()
        await server.until(lambda: server.state.accounts.outcomes["aborted"] == 1)
        assert engine.stats().running == 0


async def test_idle_connections_are_closed_to_make_room_for_new_ones(server, monkeypatch) -> None:
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 8)
    async with contextlib.AsyncExitStack() as stack:
        idle = [await stack.enter_async_context(Connection(server.url)) for _ in range(20)]
        assert (await server.http.get("/health")).status_code == 200
        for each in idle[:12]:
            await each.end()
        idle[-1].send(HEALTH)
        assert (await idle[-1].answer())[0] == 200


@pytest.mark.parametrize(
    ("files", "most"),
    [(1024, 1024 - RESERVED_FILES), (65536, MAX_CONNECTIONS), (RLIM_INFINITY, MAX_CONNECTIONS), (32, 1)],
)
def test_connection_limit_leaves_file_descriptors_for_other_uses(monkeypatch, files: int, most: int) -> None:
    monkeypatch.setattr(protocol.resource, "getrlimit", lambda _: (files, files))
    assert max_connections() == most


@pytest.mark.parametrize(
    ("soft", "hard", "raised"), [(1024, 4096, 2144), (64, 64, 64), (256, 1024, 1024), (4096, 4096, 4096)]
)
def test_soft_limit_of_open_files_is_raised_at_start(soft: int, hard: int, raised: int) -> None:
    code = "import resource; from tonnage.server.http.protocol import raise_file_limit; raise_file_limit(); "
    code += "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    done = subprocess.run(
        ["prlimit", f"--nofile={soft}:{hard}", sys.executable, "-c", code], capture_output=True, text=True
    )
    assert int(done.stdout) == raised, done.stderr


def test_start_with_too_low_a_limit_of_open_files_is_rejected_naming_the_limit() -> None:
    command = ["prlimit", "--nofile=40:40", sys.executable, "-m", "tonnage.server.cli", "serve", "demo"]
    done = subprocess.run([*command, "--port", "0"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert "the process may open 40 files; the server needs at least 64 (ulimit -n 2144" in done.stderr
    assert "Traceback" not in done.stderr


async def test_new_connection_is_rejected_when_all_connections_are_busy(
    run_server, small_plan, monkeypatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 2)
    engine = FakeEngine(small_plan(), token_rate=20)
    body: dict[str, Any] = {"model": "demo", "prompt": "hello", "max_tokens": 1000, "ignore_eos": True}
    async with run_server(engine) as server:
        asked = [asyncio.create_task(server.http.post("/v1/completions", json=body)) for _ in range(2)]
        await server.until(lambda: engine.stats().running == 2)
        async with Connection(server.url) as third:
            status, told = await third.answer()
            assert (status, json.loads(told)["error"]["code"]) == (503, "server_overloaded")
        assert engine.stats().running == 2
        for task in asked:
            task.cancel()
        await server.until(lambda: server.state.accounts.outcomes["aborted"] == 2)
        assert (await server.http.get("/health")).status_code == 200


@pytest.mark.parametrize("count", [MAX_HEADER_FIELDS, MAX_HEADER_FIELDS + 1])
async def test_number_of_header_fields_is_limited(run_server, small_plan, count: int) -> None:
    fields = b"".join(b"a%d:\r\n" % at for at in range(count - 1))
    async with run_server(FakeEngine(small_plan())) as server, Connection(server.url) as connection:
        connection.send(b"GET /health HTTP/1.1\r\nHost: x\r\n" + fields + b"\r\n")
        status, answer = await connection.answer()
    if count > MAX_HEADER_FIELDS:
        assert status == 431
        assert b"more than 100 header fields" in answer
    else:
        assert status == 200, answer


async def test_request_body_in_chunks_of_one_byte_is_joined_into_few_pieces(
    run_server, small_plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[int] = []

    def on_body(self: HttpToolsProtocol, body: bytes) -> None:
        pieces.append(len(body))
        passed(self, body)

    passed = HttpToolsProtocol.on_body
    monkeypatch.setattr(HttpToolsProtocol, "on_body", on_body)
    body = json.dumps({"model": "demo", "prompt": "a" * 1000, "max_tokens": 2}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    async with run_server(FakeEngine(small_plan())) as server, Connection(server.url) as connection:
        # two requests, so that the pieces of one body never reach the other
        connection.send((head + chunks + b"0\r\n\r\n") * 2)
        for _ in range(2):
            status, answer = await connection.answer()
            assert status == 200, answer
    assert sum(pieces) == 2 * len(body)
    assert len(pieces) < 20


async def test_body_of_many_small_chunks_is_rejected(run_server, small_plan) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with run_server(FakeEngine(small_plan())) as server, Connection(server.url) as connection:
        connection.send(head + b"1\r\n \r\n" * (FREE_PIECES + 1))
        status, answer = await connection.answer()
    assert status == 400
    assert b"fewer than 16 bytes" in answer
