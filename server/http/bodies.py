"""Limit of the total size of request bodies, over all connections, while they arrive or wait to be parsed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from traceback import clear_frames
from typing import TypeVar, cast

from tonnage.server.errors import ApiError, ErrorCode
from tonnage.server.http.turns import Turns

# This many bytes at the beginning of each body are not counted, so that large bodies never cause the rejection
# of a small one. uvicorn buffers as many bytes per connection anyway (0.54, protocols/http/flow_control.py:
# HIGH_WATER_LIMIT).
FREE_BYTES = 65_536
# Number of bodies of the maximum size that may arrive at once. By default these are 24 MiB in total, which the
# plan for a CPU includes (planner/engines/runtime/api.py).
LARGEST_AT_ONCE = 3

Parsed = TypeVar("Parsed")


def completed(steps: Generator[None, None, Parsed]) -> Parsed:
    """Run the generator ``steps`` to its end without pauses, and return its value (the parsed body)."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(Parsed, end.value)


class BodyBytes:
    """Counter of the request body bytes that one server holds now, with the upper bound ``most``."""

    def __init__(self, limit: int) -> None:
        self.most = LARGEST_AT_ONCE * limit
        self.held = 0
        self._turn = Turns(1)

    def hold(self, before: int, after: int) -> None:
        """Count the growth of one request body from ``before`` to ``after`` bytes.

        Raises:
            ApiError: All bodies together would exceed the upper bound ``self.most`` (server_overloaded, a retry
                may succeed).
        """
        more = max(0, after - FREE_BYTES) - max(0, before - FREE_BYTES)
        if self.held + more > self.most:
            raise ApiError(
                ErrorCode.SERVER_OVERLOADED,
                f"the server holds {self.held} bytes of request bodies; at most {self.most} are allowed",
            )
        self.held += more

    def release(self, size: int) -> None:
        """Subtract a request body of ``size`` bytes that was parsed or discarded."""
        self.held -= max(0, size - FREE_BYTES)

    async def in_turn(self, size: int, steps: Generator[None, None, Parsed]) -> Parsed:
        """Run the steps that parse a body of ``size`` bytes; large bodies are parsed one at a time.

        After each step of a large body the event loop gets as much time as the step took. Other requests
        therefore wait for at most one step, however many bodies arrive at once. API keys take turns.

        Raises:
            ApiError: All bodies together would exceed the upper bound ``self.most``.
        """
        if size <= FREE_BYTES:
            return completed(steps)
        self.hold(0, size)
        try:
            async with self._turn:
                while True:
                    begun = time.perf_counter()
                    try:
                        next(steps)
                    except StopIteration as end:
                        return cast(Parsed, end.value)
                    except Exception as error:
                        # Free the memory of the failed parse now. The exception refers to stack frames and to
                        # records of invalid fields. Without this, only the garbage collector would free them.
                        clear_frames(error.__traceback__)
                        error.__context__ = None
                        raise
                    finally:
                        await asyncio.sleep(time.perf_counter() - begun)
        finally:
            self.release(size)
