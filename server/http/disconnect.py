"""Cancellation of a request's work when its client disconnects, streamed or not.

The work races ASGI's ``http.disconnect``. Starlette's BaseHTTPMiddleware hides that message. A response that
notices only a failed ``send`` would keep computing while nothing is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

Result = TypeVar("Result")


class ClientDisconnected(Exception):
    """Error that the client closed the connection before its answer was complete."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run ``work`` until it ends or the client disconnects.

    Args:
        receive: The ASGI receive of a request whose body has been read.
        work: The coroutine; on a disconnect it is cancelled and its clean-up awaited.

    Raises:
        ClientDisconnected: The client disconnected first.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        await _cancel(task)
        await _cancel(watch)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Task[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # retrieve it, so that asyncio does not report a failed clean-up again
