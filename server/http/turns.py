"""A limit on how many requests do heavy work at once, such as parsing a large body or encoding a long text.

Waiting requests get their turns in rotation over their API keys, so a key with many requests delays a request
of another key by one turn only.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from contextvars import ContextVar

_KEY: ContextVar[str] = ContextVar("tonnage_key", default="")


def work_for(key: str) -> None:
    """Record that the calling task, and the tasks it starts, work on a request of the API key named ``key``."""
    _KEY.set(key)


class Turns:
    """An asynchronous context manager that at most ``places`` callers can be inside at the same time.

    API keys with waiting callers take turns in rotation. A free place goes to the next key's caller that has
    waited longest. Without API keys, callers get places in the order of their arrival.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def __aenter__(self) -> None:
        """Wait until one of the ``places`` is free, and take it."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(_KEY.get(), deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # this caller got a place, but its task was cancelled
                self._give()
            raise

    async def __aexit__(self, *_: object) -> None:
        """Give the caller's place to the next waiting caller, in rotation over the API keys."""
        self._give()

    def _give(self) -> None:
        while self._waiting:
            key, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[key] = turns
            if not turn.done():  # the future of a cancelled caller is done
                turn.set_result(None)
                return
        self._free += 1
