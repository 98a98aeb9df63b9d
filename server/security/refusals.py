"""How fast refusals go out: who asks again at once, whatever he is told, waits for his turn."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Scope

# A request that is refused costs about a millisecond of the one thread that serves everybody: a caller's
# refusals may take a fifth of it. Sixty-four clients that never wait were refused 617 times a second, and
# /health answered after 340 ms (benchmarks/abuse.py priority, load 5).
A_SECOND = 200
AT_ONCE = 50  # whoever was not refused for a while, so that a burst of mistakes waits for nothing
# No answer waits longer; with more clients than A_SECOND x LONGEST_SECONDS the connections are what is bounded.
LONGEST_SECONDS = 5.0


class Refusals:
    """Of one server; each tenant, and all who have no valid key together, have a pace of their own."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}  # when the next one of a caller is, had it never been late

    async def wait(self, scope: Scope) -> None:
        """Until this request's refusal is due."""
        tenant = scope.get("tonnage.tenant")
        name = "" if tenant is None else tenant.name
        now = time.monotonic()
        due = max(self._due.get(name, 0.0), now - AT_ONCE / A_SECOND)
        self._due[name] = min(due + 1 / A_SECOND, now + LONGEST_SECONDS)
        if due > now:
            await asyncio.sleep(due - now)
