"""GET requests in floods: paced like other requests, computed once, and bounded where clients do not read."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

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


async def test_request_for_a_documentation_file_is_rejected_while_too_many_files_are_being_sent(
    tmp_path: Path,
) -> None:
    """The kernel can hold a whole file of the documentation, so clients that do not read are made here."""
    path, sending, read = tmp_path / "script.js", asyncio.Semaphore(2), asyncio.Event()
    path.write_bytes(b"x" * 1_000_000)

    async def ask() -> int:
        """Return the status of the answer, once its client has read it."""
        statuses = []

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            elif statuses == [200]:
                await read.wait()

        scope = {"type": "http", "method": "GET", "path": "/docs/script.js", "headers": []}
        await docs._CountedFile(path, sending)(scope, asyncio.Event().wait, send)
        return statuses[0]

    unread = [asyncio.create_task(ask()) for _ in range(2)]
    while not sending.locked():  # noqa: ASYNC110  (there is no event to wait for)
        await asyncio.sleep(0.01)
    assert await ask() == 503
    read.set()
    assert await asyncio.gather(*unread) == [200, 200]
    assert await ask() == 200


async def test_request_of_a_disconnected_client_never_starts() -> None:
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


async def test_health_probe_is_not_delayed_by_waiting_requests() -> None:
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
