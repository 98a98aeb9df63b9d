"""What serving takes whatever the engine: grammars, and what the API process holds while clients send and wait.

Of all request bodies that arrive at once (server/http/bodies.py, with its default size of a body), and of all
that is kept for clients who do not read (server/http/outbox.py).
"""

from __future__ import annotations

from tonnage.planner.engines.runtime.estimate import Estimate
from tonnage.planner.engines.runtime.grammars import (
    GRAMMAR_LIMIT_BYTES,
    GRAMMAR_PROCESS_BYTES,
    GRAMMAR_TOKEN_BYTES,
)
from tonnage.planner.units import MiB

BODIES_BYTES = 3 * 8 * MiB
OUTBOX_BYTES = 16 * MiB
API_LIMIT_BYTES = BODIES_BYTES + OUTBOX_BYTES

# What the server may hold for clients and for grammars, whatever the engine.
LIMIT_BYTES = API_LIMIT_BYTES + GRAMMAR_LIMIT_BYTES


def framework(
    processes: int, vocab_size: int, interval: tuple[float, float], terms: str, source: str
) -> Estimate:
    """``processes``: bytes of all but the one that tries grammars and their tokenizer; ``terms`` says of what.
    ``interval`` is that of what is held at rest, as shares of it."""
    resting = processes + GRAMMAR_PROCESS_BYTES + vocab_size * GRAMMAR_TOKEN_BYTES
    return Estimate(
        resting + LIMIT_BYTES,
        int(resting * interval[0]),
        int(resting * interval[1]) + LIMIT_BYTES,
        f"vocabulary {vocab_size:,}: {terms} + tokenizer of grammars {GRAMMAR_TOKEN_BYTES} each "
        f"+ process that tries them {GRAMMAR_PROCESS_BYTES:,} + grammars at most {GRAMMAR_LIMIT_BYTES:,} "
        f"+ bodies and unread streams at most {API_LIMIT_BYTES:,}",
        f"{source}; limits of the server",
    )
