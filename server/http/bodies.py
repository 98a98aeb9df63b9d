"""The bytes of request bodies that are held while they arrive and wait to be parsed, over all connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from traceback import clear_frames
from typing import TypeVar

from tonnage.server.errors import ApiError, ErrorCode

# The first bytes of a body count nothing, so that large bodies never keep a small one out. uvicorn buffers as
# much of a connection anyway (0.54, protocols/http/flow_control.py: HIGH_WATER_LIMIT).
FREE_BYTES = 65_536
# Bodies of the largest size that may arrive at once: 24 MiB by default, which a plan for a CPU counts
# (planner/engines/runtime/api.py).
LARGEST_AT_ONCE = 3

Parsed = TypeVar("Parsed")


class BodyBytes:
    """How many are held, and the most of it."""

    def __init__(self, limit: int) -> None:
        self.most = LARGEST_AT_ONCE * limit
        self.held = 0
        self._turn = asyncio.Lock()

    def hold(self, before: int, after: int) -> None:
        """A body has grown. Raises ApiError (not now) when all together would be too large."""
        more = max(0, after - FREE_BYTES) - max(0, before - FREE_BYTES)
        if self.held + more > self.most:
            raise ApiError(
                ErrorCode.SERVER_OVERLOADED,
                f"{self.held} bytes of request bodies are arriving, of at most {self.most}",
            )
        self.held += more

    def release(self, size: int) -> None:
        """A body of ``size`` was read, or is given up."""
        self.held -= max(0, size - FREE_BYTES)

    async def in_turn(self, size: int, parse: Callable[[], Parsed]) -> Parsed:
        """``parse()``, of a body of ``size``. Large ones go one after the other and leave the event loop as
        much time as they took: however many arrive at once, others wait for one of them. Raises ApiError as
        ``hold``."""
        if size <= FREE_BYTES:
            return parse()
        self.hold(0, size)
        try:
            async with self._turn:
                begun = time.perf_counter()
                try:
                    return parse()
                except Exception as error:
                    # It is told and logged in frames that it refers to: what they hold, and what pydantic found
                    # wrong, would wait for the garbage collector.
                    clear_frames(error.__traceback__)
                    error.__context__ = None
                    raise
                finally:
                    await asyncio.sleep(time.perf_counter() - begun)
        finally:
            self.release(size)
