"""KV events: what has entered and left the prefix cache, for routers that send a prompt where its prefix is.

The names and fields are those that vLLM publishes (vllm/distributed/kv_events.py, 0.32); hashes are the 64-bit
ones of `tonnage.cache.prefix.hashing`, unsigned, equal for equal prefixes while this process lives. One event
for a run of blocks of one sequence. Only whole nodes are told, not the sliding blocks that a node may lose
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tonnage.cache.blocks.state import ROOT, Core, columns


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that can be hit from now on, in chain order after ``parent_block_hash`` (None: the first)."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that cannot be hit any more."""

    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is cached any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
Subscriber = Callable[[Sequence[KVEvent]], None]


class EventLog:
    """Turns what the compiled loops have noted into events and hands them to subscribers."""

    def __init__(self, core: Core) -> None:
        self._core, self._counts = core, columns(core.pool)
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call ``subscriber`` with the events of each call of the manager that has any, in order."""
        self._subscribers.append(subscriber)

    def flush(self) -> None:
        """Tell what has happened since the last time: removals first, as blocks are removed to make room."""
        counts, core = self._counts, self._core
        removed, stored = int(counts.removed[0]), int(counts.stored[0])
        if not removed and not stored:
            return
        counts.removed[0] = counts.stored[0] = 0
        events: list[KVEvent] = []
        if removed:
            events.append(BlockRemoved(tuple(core.removed[:removed].tolist())))
        run: list[int] = []
        for node in core.stored[:stored].tolist():
            if run and int(core.parent[node]) != run[-1]:
                events.append(self._stored(run))
                run = []
            run.append(node)
        if run:
            events.append(self._stored(run))
        self.tell(events)

    def tell(self, events: Sequence[KVEvent]) -> None:
        """Hand events to every subscriber."""
        for subscriber in self._subscribers:
            subscriber(events)

    def _stored(self, nodes: list[int]) -> BlockStored:
        core = self._core
        parent = int(core.parent[nodes[0]])
        return BlockStored(
            block_hashes=tuple(core.node_hash[nodes].tolist()),
            parent_block_hash=None if parent == ROOT else int(core.node_hash[parent]),
            token_ids=tuple(core.node_tokens[nodes].ravel().tolist()),
            block_size=core.node_tokens.shape[1],
        )
