"""A client may close its half of the connection after its request: it is answered as long as it is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import h11
import pytest
from serving import PATIENCE

from tonnage.server.engines.fake import FakeEngine
from tonnage.server.http import half_closed, protocol

STORY: dict[str, Any] = {"model": "demo", "prompt": "hello", "max_tokens": 12, "seed": 1, "ignore_eos": True}


def request(body: dict[str, Any] | None = None, version: str = "1.1") -> bytes:
    if body is None:
        return b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def ask(url: str, data: bytes) -> bytes:
    """Send ``data``, close the sending half, and return everything until the server closes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    writer.write_eof()
    async with asyncio.timeout(PATIENCE):
        answer = await reader.read()
    writer.close()
    return answer


def parsed(answer: bytes) -> Iterator[h11.Event]:
    """Yield the events of one response from a strict HTTP parser; no data may follow the response."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(answer)
    client.receive_data(b"")
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        assert not isinstance(event, h11.NEED_DATA)
        yield event
    assert client.trailing_data[0] == b""


def said(answer: bytes) -> str:
    """Return the text of a completion, streamed or whole."""
    body = b"".join(bytes(event.data) for event in parsed(answer) if isinstance(event, h11.Data))
    documents = [body] if body.startswith(b"{") else body.split(b"\n\n")
    found = [json.loads(each.removeprefix(b"data: ")) for each in documents if b"{" in each]
    return "".join(each["choices"][0]["text"] for each in found)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_client_that_closes_its_sending_half_gets_its_response(
    run_server, small_plan, monkeypatch, stream: bool, version: str
) -> None:
    monkeypatch.setattr(half_closed, "FIRST_SECONDS", 0.001)
    engine = FakeEngine(small_plan(), token_rate=20)
    async with run_server(engine) as server:
        wanted = (await server.complete(**STORY)).json()["choices"][0]["text"]
        answer = await ask(server.url, request(STORY | {"stream": stream}, version))
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert said(answer) == wanted
        assert server.state.accounts.outcomes["length"] == 2


async def test_client_that_closes_its_sending_half_with_the_request_gets_its_response_at_once(server) -> None:
    answer = await ask(server.url, request())
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b'{"status":"ok"}')
    answer = await ask(server.url, request(STORY | {"max_tokens": -1}))
    assert answer.startswith(b"HTTP/1.1 400 ")


async def test_all_pipelined_requests_before_a_half_close_are_answered(
    run_server, small_plan, monkeypatch
) -> None:
    monkeypatch.setattr(half_closed, "FIRST_SECONDS", 0.001)
    async with run_server(FakeEngine(small_plan(), token_rate=20)) as server:
        wanted = (await server.complete(**STORY)).json()["choices"][0]["text"]
        answer = await ask(server.url, request(STORY) + request() + request(STORY))
        first, health, last = (b"HTTP/1.1 " + each for each in answer.split(b"HTTP/1.1 ")[1:])
        assert said(first) == said(last) == wanted
        assert health.endswith(b'{"status":"ok"}')


async def test_half_close_before_the_end_of_a_request_closes_the_connection(run_server, small_plan) -> None:
    async with run_server(FakeEngine(small_plan())) as server:
        assert await ask(server.url, request(STORY)[:-5]) == b""
        # The end came before the request's turn, so the request never started.
        await server.until(lambda: server.state.accounts.in_flight == 0)
        assert server.state.accounts.outcomes["aborted"] == server.state.accounts.received


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("half", [False, True], ids=["at once", "half first"])
async def test_kv_blocks_of_a_disconnected_client_are_freed(
    run_server, small_plan, stream: bool, half: bool
) -> None:
    """Without a reset: by a FIN, as an ordinary close sends it. At 20 tokens a second 1,000 take 50 s."""
    engine = FakeEngine(small_plan(1024, max_num_seqs=1), token_rate=20)
    async with run_server(engine) as server:
        host, port = server.url.removeprefix("http://").split(":")
        writers = []
        for number in range(2):  # one runs, one waits in the queue
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(request(STORY | {"max_tokens": 1000, "stream": stream}))
            writers.append(writer)
            await server.until(lambda: server.state.accounts.received == number + 1)  # noqa: B023
        await server.until(lambda: (engine.stats().running, engine.stats().waiting) == (1, 1))
        for writer in writers:
            if half:
                writer.write_eof()
                await asyncio.sleep(0.1)
            writer.close()
        await server.until(lambda: server.state.accounts.outcomes["aborted"] == 2)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.pool.used, stats.pool.reserved) == (0, 0, 0, 0)
        assert stats.generation_tokens < 500


async def test_half_closed_connections_beyond_the_limit_count_as_disconnected(
    run_server, small_plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MOST_HALF_CLOSED", 2)
    async with run_server(FakeEngine(small_plan(1024), token_rate=20)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        opened = []
        for number in range(4):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(request(STORY | {"max_tokens": 20, "stream": False}))
            await server.until(lambda number=number: server.state.accounts.received == number + 1)
            writer.write_eof()
            opened.append((reader, writer))
        answers = [await reader.read(-1) for reader, _ in opened]
        assert [b" 200 " in answer for answer in answers] == [True, True, False, False]
        await server.until(lambda: server.state.accounts.outcomes["aborted"] == 2)
        assert (await server.complete(max_tokens=1)).status_code == 200
        for _, writer in opened:
            writer.close()
        await server.until(lambda: not protocol._half_closed)
