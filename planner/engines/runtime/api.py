"""Memory that the API process holds only while clients send and wait, whatever the engine: limits it keeps to.

Of all request bodies that arrive at once (server/http/bodies.py, with its default size of a body), and of all
that is kept for clients who do not read (server/http/outbox.py).
"""

from __future__ import annotations

from tonnage.planner.units import MiB

BODIES_BYTES = 3 * 8 * MiB
OUTBOX_BYTES = 16 * MiB
API_LIMIT_BYTES = BODIES_BYTES + OUTBOX_BYTES
