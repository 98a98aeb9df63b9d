"""Total size of the request bodies that arrive or wait to be parsed, over all connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from traceback import clear_frames
from typing import TypeVar

from tonnage.server.errors import ApiError, ErrorCode

# The first bytes of a body are not counted, so that large bodies never keep out a small one. uvicorn buffers as
# much per connection anyway (0.54, protocols/http/flow_control.py: HIGH_WATER_LIMIT).
FREE_BYTES = 65_536
# Number of bodies of the largest size that may arrive at once. The default is 24 MiB in total, which a plan for
# a CPU includes (planner/engines/runtime/api.py).
LARGEST_AT_ONCE = 3

Parsed = TypeVar("Parsed")


class BodyBytes:
    """Bytes of request bodies held by one server, with their upper bound ``most``."""

    def __init__(self, limit: int) -> None:
        self.most = LARGEST_AT_ONCE * limit
        self.held = 0
        self._turn = asyncio.Lock()

    def hold(self, before: int, after: int) -> None:
        """Count the growth of one body from ``before`` to ``after`` bytes.

        Raises:
            ApiError: All bodies together would exceed the bound (server_overloaded, a retry may succeed).
        """
        more = max(0, after - FREE_BYTES) - max(0, before - FREE_BYTES)
        if self.held + more > self.most:
            raise ApiError(
                ErrorCode.SERVER_OVERLOADED,
                f"{self.held} bytes of request bodies are arriving, of at most {self.most}",
            )
        self.held += more

    def release(self, size: int) -> None:
        """Stop counting a body of ``size`` bytes that was read or given up."""
        self.held -= max(0, size - FREE_BYTES)

    async def in_turn(self, size: int, parse: Callable[[], Parsed]) -> Parsed:
        """Call ``parse`` for a body of ``size`` bytes, large bodies one at a time.

        After each large body the event loop gets as much time as the parsing took. Other requests therefore
        wait for at most one large body, however many arrive at once.

        Raises:
            ApiError: All bodies together would exceed the bound.
        """
        if size <= FREE_BYTES:
            return parse()
        self.hold(0, size)
        try:
            async with self._turn:
                begun = time.perf_counter()
                try:
                    return parse()
                except Exception as error:
                    # The error refers to the frames in which it is reported and logged. Without this, their
                    # values and pydantic's records of invalid fields would wait for the garbage collector.
                    clear_frames(error.__traceback__)
                    error.__context__ = None
                    raise
                finally:
                    await asyncio.sleep(time.perf_counter() - begun)
        finally:
            self.release(size)
