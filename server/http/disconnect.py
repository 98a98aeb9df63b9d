"""Cancellation of a request's work when its client disconnects, for streamed and other answers.

The work runs beside a task that waits for ASGI's ``http.disconnect``. Starlette's BaseHTTPMiddleware is not
used, because it hides that message. A failed ``send`` would reveal a disconnect too late: nothing is sent while
the engine computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

Result = TypeVar("Result")

# nginx's status for a client that closed the connection. No client receives it; the access log shows it.
CLIENT_CLOSED_REQUEST = 499


class ClientDisconnected(Exception):
    """Error raised when a client closes its connection before its answer is complete."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run ``work`` and return its result, unless the client disconnects first.

    Args:
        receive: The ASGI receive of a request whose body has been read.
        work: The coroutine; on a disconnect it is cancelled, and its clean-up is awaited.

    Raises:
        ClientDisconnected: The client disconnected before ``work`` ended.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        await _cancel(task)
        await _cancel(watch)


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has disconnected; ``receive`` is the ASGI receive of its request."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Task[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # the exception is read, so that asyncio does not report it as never retrieved
