"""Rate limits for rejected requests, which slow down clients that retry immediately."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Scope

# Rejecting a request takes about a millisecond of the thread that serves all clients. A client's rejections may
# use a fifth of that thread's time. Without the limit, 64 clients that retried immediately were rejected 617
# times a second in total, and /health answered only after 340 ms (benchmarks/abuse.py priority, load 5).
REJECTIONS_PER_SECOND = 200
# After a quiet time, this many rejections are sent without delay, so that a few mistakes are answered at once.
BURST = 50
# Upper bound of a rejection's delay. When more clients than REJECTIONS_PER_SECOND x MAX_DELAY_SECONDS wait for
# their rejection, the limit of connections takes effect instead.
MAX_DELAY_SECONDS = 5.0


class RejectionLimits:
    """Rate limits for rejected requests: one per tenant, and one shared by requests without a valid key."""

    def __init__(self) -> None:
        # tenant's name (empty without a valid key) -> monotonic time at which its next rejection may be sent
        self._due: dict[str, float] = {}

    async def wait(self, scope: Scope) -> None:
        """Wait until the rejection of this request may be sent under its tenant's rate limit."""
        tenant = scope.get("tonnage.tenant")
        name = "" if tenant is None else tenant.name
        now = time.monotonic()
        due = max(self._due.get(name, 0.0), now - BURST / REJECTIONS_PER_SECOND)
        self._due[name] = min(due + 1 / REJECTIONS_PER_SECOND, now + MAX_DELAY_SECONDS)
        if due > now:
            await asyncio.sleep(due - now)
