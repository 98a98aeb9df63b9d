"""A client that hangs up ends its work at once, streamed or not.

Pure ASGI: the work races ``http.disconnect``. (Starlette's BaseHTTPMiddleware hides the disconnect, and a
response that only notices a failed ``send`` keeps computing while nothing is sent.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

Result = TypeVar("Result")


class ClientDisconnected(Exception):
    """The client closed the connection; nobody is left to answer."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run ``work``; when the client hangs up first, cancel it, wait for its clean-up, raise ClientDisconnected.

    ``receive`` is the ASGI receive of a request whose body has been read.
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
        task.exception()  # retrieved: a failure during clean-up is not reported a second time
