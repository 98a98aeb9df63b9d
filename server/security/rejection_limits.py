"""Rate limits for rejected requests, which throttle clients that retry immediately."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Scope

# Rejecting a request takes about a millisecond of the single thread that serves all clients. One client's
# rejections may use a fifth of that. Without the limit, 64 clients that retried at once were rejected 617 times
# a second, and /health answered after 340 ms (benchmarks/abuse.py priority, load 5).
REJECTIONS_PER_SECOND = 200
BURST = 50  # rejections without delay after a quiet time, so that a few mistakes are answered at once
# Upper bound of a delay. With more clients than REJECTIONS_PER_SECOND x MAX_DELAY_SECONDS, the limit of
# connections applies.
MAX_DELAY_SECONDS = 5.0


class RejectionLimits:
    """Rate limits for rejected requests: one per tenant, and one shared by requests without a valid key."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}  # time of each client's next rejection

    async def wait(self, scope: Scope) -> None:
        """Wait until this request's rejection may be sent."""
        tenant = scope.get("tonnage.tenant")
        name = "" if tenant is None else tenant.name
        now = time.monotonic()
        due = max(self._due.get(name, 0.0), now - BURST / REJECTIONS_PER_SECOND)
        self._due[name] = min(due + 1 / REJECTIONS_PER_SECOND, now + MAX_DELAY_SECONDS)
        if due > now:
            await asyncio.sleep(due - now)
