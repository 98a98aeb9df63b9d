"""GET requests in floods: paced like other requests, computed once, and bounded where clients do not read."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest
from fastapi import FastAPI

from tonnage.server.api import docs
from tonnage.server.http import pacing


async def test_openapi_document_is_serialised_once(server, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await server.http.get("/openapi.json")
    assert first.headers["content-type"] == "application/json"
    assert first.json()["info"]["title"] == "Tonnage"

    def again(self: FastAPI) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(FastAPI, "openapi", again)
    assert (await server.http.get("/openapi.json")).content == first.content


async def test_files_beyond_the_limit_are_refused_until_others_are_read(
    server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docs, "MOST_FILES", 2)
    opened = []
    for _ in range(2):  # two clients that do not read
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(server.url).port, limit=2**10)
        writer.write(b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readline()
        opened.append(writer)
    refused = await server.http.get("/docs/swagger-ui.css")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_overloaded")
    for writer in opened:
        writer.close()
    for _ in range(200):
        answer = await server.http.get("/docs/swagger-ui.css")
        if answer.status_code == 200:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("never served again")


async def test_request_whose_client_is_gone_before_its_turn_never_starts() -> None:
    started = []

    class Connection:
        half_closed = False

        class transport:
            closed = False

            @classmethod
            def is_closing(cls) -> bool:
                return cls.closed

    async def app(scope, receive, send) -> None:
        started.append(scope["path"])

    paced = pacing.RequestPacing(app)
    scopes = [
        {"type": "http", "method": "GET", "path": str(at), "tonnage.connection": Connection} for at in range(40)
    ]

    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    tasks = [asyncio.create_task(paced(scope, gone, None)) for scope in scopes]
    await asyncio.sleep(0)
    Connection.transport.closed = True
    await asyncio.gather(*tasks)
    assert len(started) <= 2 * pacing.STARTS_PER_ROUND


async def test_probes_pass_waiting_requests() -> None:
    order = []

    async def app(scope, receive, send) -> None:
        order.append(scope["path"])
        time.sleep(0.02)  # noqa: ASYNC251 -- a request that takes long in one piece

    paced = pacing.RequestPacing(app)
    paths = [*(f"/memory?{at}" for at in range(40)), "/health"]
    await asyncio.gather(
        *(paced({"type": "http", "method": "GET", "path": path}, None, None) for path in paths)
    )
    assert order.index("/health") <= pacing.STARTS_PER_ROUND
