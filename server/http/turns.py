"""Turns at work that few requests may do at once, such as parsing a large body or encoding a long text.

API keys take turns, so a key with many requests delays a request of another key by one turn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from contextvars import ContextVar

_KEY: ContextVar[str] = ContextVar("tonnage_key", default="")


def work_for(key: str) -> None:
    """Note the name of the API key whose request the calling task, and each task that it starts, serves."""
    _KEY.set(key)


class Turns:
    """An asynchronous context manager, in which at most ``places`` callers are at the same time.

    The waiting keys form a circle. When a place is free, the next key of the circle gets it, and of this key's
    callers the one that waited longest. Without API keys, callers get places in the order of their arrival.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def __aenter__(self) -> None:
        """Wait until a place is free, and take it."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(_KEY.get(), deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the place was given to this caller, which no longer wants it
                self._give()
            raise

    async def __aexit__(self, *_: object) -> None:
        """Give the caller's place to the next one."""
        self._give()

    def _give(self) -> None:
        while self._waiting:
            key, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[key] = turns
            if not turn.done():  # else its caller was cancelled
                turn.set_result(None)
                return
        self._free += 1
