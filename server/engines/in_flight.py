"""The count of an engine's unfinished requests, which the engine waits for when it drains."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from tonnage.server.engines.errors import QueueFull


class RequestsInFlight:
    """The number of an engine's unfinished requests, and whether the engine accepts further ones.

    Attributes:
        draining: Whether the engine accepts no more requests, because it is about to stop.
        count: Number of accepted requests that have not ended.
    """

    def __init__(self) -> None:
        self.draining = False
        self.count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def check(self, ready: bool) -> None:
        """Raise QueueFull if the engine drains or is not ready, so that it accepts no request now."""
        if self.draining or not ready:
            raise QueueFull("the server is draining" if self.draining else "the engine is not ready")

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Count one more request as unfinished until the ``with`` block ends."""
        self.count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.count -= 1
            if not self.count:
                self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Accept no more requests, and wait at most ``seconds`` until all accepted requests have ended."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
