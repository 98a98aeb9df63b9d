"""Fair shares: how many sequences and blocks each API key may use while requests of other keys wait.

A server with several keys gives each of them a share of the sequences (``max_num_seqs``, also called seats) and
of the blocks, in proportion to the keys' weights. The shares have three effects. Our engines' scheduler and our
scheduler for vLLM apply them with the functions of this module:

- Waiting requests of keys within their share start before those of keys above it. Among keys of equal priority,
  the key that holds least relative to its weight goes first (dominant resource fairness: Ghodsi et al., NSDI
  2011).
- A key above its share leaves a small reserve of seats and blocks free. A short request of another key thus
  starts at once, although no running request is ever preempted for it.
- The token budget of a step is divided among the keys whose prompts are computed in it
  (`tonnage.cache.scheduler.chunks.divided`).

A key whose requests run alone may use everything except the reserve. With fewer than two keys nothing changes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from tonnage.cache.admission.types import AdmissionRequest, Limits

# An API key above its share leaves 1 / RESERVED_PART of ``max_num_seqs`` (at least one) and of the blocks free.
# That suffices for a few short requests of other keys (the cases ``queue`` and ``deaf`` of
# benchmarks/abuse.py). A key whose requests run alone cannot use this reserve either.
RESERVED_PART = 32
_LAST = (sys.maxsize, 0.0)  # sort key of waiting requests whose API key is above its share of the engine


@dataclass(slots=True)
class KeyUse:
    """The number of sequences and KV blocks that the running requests of one API key hold.

    Attributes:
        sequences: Sequences that run or will be forked.
        blocks: Blocks reserved for these sequences.
        weight: Weight of the key.
    """

    sequences: int = 0
    blocks: int = 0
    weight: float = 1.0


Uses = dict[str, KeyUse]  # API key's name -> what the key's running requests hold


def add_use(uses: Uses, request: AdmissionRequest, sequences: int, blocks: int) -> None:
    """Add a running request's sequences and KV blocks to the totals of its API key."""
    use = uses.setdefault(request.tenant, KeyUse(weight=request.weight))
    use.sequences += sequences
    use.blocks += blocks


class Shares:
    """The division of one engine's concurrent sequences and KV blocks among its API keys.

    Args:
        keys: Number of API keys whose requests may arrive.
        limits: Sizes of the block pool and of a step.
    """

    def __init__(self, keys: int, limits: Limits) -> None:
        self.several = keys > 1
        self._keys, self._limits = keys, limits
        self._seats = max(1, limits.max_num_seqs // RESERVED_PART)
        self._blocks = limits.usable_blocks // RESERVED_PART

    def within(self, uses: Mapping[str, KeyUse], request: AdmissionRequest, blocks: int) -> bool:
        """Return whether the request's API key stays within its share of sequences and KV blocks if it starts.

        A key without a running request is within its share. The engine is divided among the keys with running
        requests. While requests of a further key may arrive, one more share is set aside for it.

        Args:
            uses: Sequences and blocks of each key with running requests.
            request: The request that may start.
            blocks: Blocks to reserve for it.
        """
        own = uses.get(request.tenant)
        if not self.several or own is None or not own.sequences:
            return True
        present = [use.weight for use in uses.values() if use.sequences]
        further = 1.0 if self._keys > len(present) else 0.0
        share = own.weight / (sum(present) + further)
        return (
            own.sequences + request.n <= share * self._limits.max_num_seqs
            and own.blocks + blocks <= share * self._limits.usable_blocks
        )

    def rank(self, uses: Mapping[str, KeyUse], request: AdmissionRequest, blocks: int) -> tuple[int, float]:
        """Return the sort key of a waiting request: a lower one starts first, equal ones in queue order.

        Requests whose API key is above its share of the engine come last and keep the queue's order.

        Args:
            uses: Sequences and KV blocks of each API key with running requests.
            request: The waiting request.
            blocks: KV blocks to reserve for it.
        """
        if not self.within(uses, request, blocks):
            return _LAST
        own = uses.get(request.tenant, KeyUse(weight=request.weight))
        seats, blocks = self._limits.max_num_seqs, max(1, self._limits.usable_blocks)
        return request.priority, max(own.sequences / seats, own.blocks / blocks) / own.weight

    def kept(self, uses: Mapping[str, KeyUse], request: AdmissionRequest, blocks: int) -> tuple[int, int]:
        """Return how many sequences and KV blocks must stay free for other API keys when ``request`` starts.

        Both numbers are 0 if the request's key is within its share, or if no other request runs.
        """
        if not any(use.sequences for use in uses.values()) or self.within(uses, request, blocks):
            return 0, 0
        return self._seats, self._blocks
