"""KV events: blocks that entered or left the prefix cache, for prefix-aware routers.

Names and fields equal vLLM's (vllm/distributed/kv_events.py, 0.32). Hashes are the unsigned 64-bit hashes of
`tonnage.cache.prefix.hashing`, equal for equal prefixes within one process. One event covers a run of blocks of
one sequence. An event means that a block can be hit or no longer be hit in full-attention groups.
Sliding-window blocks that are evicted separately cause no event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tonnage.cache.blocks.state import ROOT, Core, Int32Array, columns


@dataclass(frozen=True, slots=True)
class BlockStored:
    """The KV event that consecutive blocks of a prefix have entered the prefix cache, in prefix order.

    ``parent_block_hash`` is the hash of the block before them, None at the start of a prompt.
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The KV event that blocks have left the prefix cache and can no longer be hit."""

    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The KV event that the prefix cache has been emptied."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
Subscriber = Callable[[Sequence[KVEvent]], None]


class EventLog:
    """A converter of recorded changes of the prefix cache into KV events for subscribers."""

    def __init__(self, core: Core) -> None:
        self._core, self._counts = core, columns(core.pool)
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call ``subscriber`` with the KV events of each block-manager call that causes any, in order."""
        self._subscribers.append(subscriber)

    def flush(self) -> None:
        """Send the KV events recorded since the last call to the subscribers.

        Removals come first, since blocks are removed to free space.
        """
        counts, core = self._counts, self._core
        removed, stored = int(counts.removed[0]), int(counts.stored[0])
        if not removed and not stored:
            return
        counts.removed[0] = counts.stored[0] = 0
        events: list[KVEvent] = []
        if removed:
            events.append(BlockRemoved(tuple(core.removed[:removed].tolist())))
        if stored:
            nodes = core.stored[:stored]
            starts = 1 + np.flatnonzero(core.parent[nodes[1:]] != nodes[:-1])
            events += map(self._stored, np.split(nodes, starts))
        self._tell(events)

    def cleared(self) -> None:
        """Send subscribers one KV event that the prefix cache is empty, instead of one per evicted block."""
        self._counts.removed[0] = 0
        self._tell([AllBlocksCleared()])

    def _tell(self, events: Sequence[KVEvent]) -> None:
        """Send the KV events ``events`` to every subscriber."""
        for subscriber in self._subscribers:
            subscriber(events)

    def _stored(self, nodes: Int32Array) -> BlockStored:
        core = self._core
        parent = int(core.parent[nodes[0]])
        return BlockStored(
            block_hashes=tuple(core.node_hash[nodes].tolist()),
            parent_block_hash=None if parent == ROOT else int(core.node_hash[parent]),
            token_ids=tuple(core.node_tokens[nodes].ravel().tolist()),
            block_size=core.node_tokens.shape[1],
        )
