"""Requests of clients that have disconnected do not wait for the rate limit of rejections."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response

from tonnage.server.http.disconnect import CLIENT_CLOSED_REQUEST
from tonnage.server.security.middleware import RequestId
from tonnage.server.security.rejection_limits import BURST


async def answered(app: RequestId, status: int, seconds: float) -> bool:
    """Return whether ``app`` sends a response with ``status`` within ``seconds``."""
    scope = {"type": "http", "path": "/", "headers": [], "status": status}

    async def ignore(*_: Any) -> Any:
        return None

    try:
        async with asyncio.timeout(seconds):
            await app(scope, ignore, ignore)
    except TimeoutError:
        return False
    return True


async def test_disconnected_client_neither_waits_for_nor_counts_towards_the_rate_limit_of_rejections() -> None:
    async def respond(scope: Any, receive: Any, send: Any) -> None:
        await Response(status_code=scope["status"])(scope, receive, send)

    app = RequestId(respond)
    for _ in range(4 * BURST):
        assert await answered(app, CLIENT_CLOSED_REQUEST, 1)
    for _ in range(BURST):
        assert await answered(app, 400, 1)
    for _ in range(BURST):  # the limit is reached, so each of these waits a little longer
        waiting = [asyncio.create_task(answered(app, 400, 0.001)) for _ in range(4)]
        assert not all(await asyncio.gather(*waiting))
        assert await answered(app, CLIENT_CLOSED_REQUEST, 1)
