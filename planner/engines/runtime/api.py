"""Memory that serving needs with every engine: grammars, and the API process's buffers for requests in flight.

The buffers are the request bodies that arrive at once (server/http/bodies.py, at the default maximum size) and
the output that clients have not read yet (server/http/outbox.py).
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

# Upper bound in bytes of the server's memory for clients and grammars; it is the same for every engine.
LIMIT_BYTES = API_LIMIT_BYTES + GRAMMAR_LIMIT_BYTES


def framework(
    processes: int, vocab_size: int, interval: tuple[float, float], terms: str, source: str
) -> Estimate:
    """Estimate the memory of an inference server's processes, including client buffers and grammars.

    Args:
        processes: Bytes of all processes except the grammar compiler and the tokenizers.
        vocab_size: Tokens of the vocabulary.
        interval: (low, high) factors. The idle server's estimated memory, times each factor, bounds its real
            memory.
        terms: Names of the parts of ``processes``, to be printed in the estimate's formula.
        source: Where ``processes`` and ``interval`` were measured or stated, to be printed with the estimate.
    """
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
