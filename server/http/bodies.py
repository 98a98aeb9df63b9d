"""The bytes of request bodies that are held while they arrive, over all connections."""

from __future__ import annotations

from tonnage.server.errors import ApiError, ErrorCode

# The first bytes of a body count nothing, so that large bodies never keep a small one out. uvicorn buffers as
# much of a connection anyway (0.54, protocols/http/flow_control.py: HIGH_WATER_LIMIT).
FREE_BYTES = 65_536
# Bodies of the largest size that may arrive at once: 24 MiB by default, which fits into what a container of the
# smallest plans has beyond its plan (3 % of the 1.2 GiB of the demo model: 37 MiB).
LARGEST_AT_ONCE = 3


class BodyBytes:
    """How many are held, and the most of it."""

    def __init__(self, limit: int) -> None:
        self.most = LARGEST_AT_ONCE * limit
        self.held = 0

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
