"""The chunks that a KV tier holds, in an order of eviction: LRU or ARC as in vLLM's CPU tier, or learned.

For the same calls in the same order, LRU and ARC decide as vLLM's CPUOffloadingManager does with these policies
(v1/kv_offload/cpu of vLLM 0.32); benchmarks/tier_replay.py drives both. ARC is by Megiddo and Modha (FAST
2003). In vLLM's version of ARC, storing a chunk does not count as a second access. A request counts as one
access to its chunks, when it ends. The learned order (`tonnage.cache.eviction.chunk_order`) also refuses new
chunks whose forecast reuse is below that of the chunk which would be evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Protocol

from tonnage.cache.eviction.chunk_order import LearnedChunkOrder

Key = int


@dataclass(slots=True, eq=False)
class ChunkUse:
    """The chunks of one request in prefix order, and what the request did with them in one store.

    Attributes:
        keys: Keys of the full chunks of the prompt.
        seen: Indices in ``keys`` of the chunks that the request loaded, stored or found in the store.
        inserted: Keys of the chunks that the request stored.
        reused: Keys of the chunks that the request loaded or found in the store.
        missed: Keys of the chunks that the store did not hold when the request asked to store them.
        declined: Whether the learned order has refused a chunk; no later chunk of the request is then stored.
    """

    keys: Sequence[Key]
    seen: set[int] = field(default_factory=set)
    inserted: set[Key] = field(default_factory=set)
    reused: set[Key] = field(default_factory=set)
    missed: set[Key] = field(default_factory=set)
    declined: bool = False


class Order(Protocol):
    """The interface of an order in which a KV tier's store evicts chunks.

    By default every chunk is stored, and a request counts as one access to its chunks, when it ends.
    """

    def __contains__(self, key: Key) -> bool: ...

    def __len__(self) -> int: ...

    def insert(self, key: Key) -> None:
        """Add to the eviction order a chunk that the store begins to hold."""

    def miss(self, keys: Sequence[Key]) -> None:
        """Record chunks that a request offers to the store and the store does not hold, in prefix order."""
        return

    def admits(self, keys: Sequence[Key], new: Sequence[Key]) -> bool:
        """Return whether to store the chunks ``new`` of a request whose chunks are ``keys``."""
        return True

    def load(self, keys: Sequence[Key]) -> None:
        """Record that a request loads the chunks ``keys`` from the store."""
        return

    def finish(self, keys: Sequence[Key], use: ChunkUse) -> None:
        """Record the end of a request that used the chunks ``keys``, in prefix order."""

    def evict(self, count: int, kept: set[Key], busy: dict[Key, int], own: Sequence[Key]) -> list[Key] | None:
        """Evict and return ``count`` chunks that are neither ``kept`` nor ``busy``.

        Returns None and removes no chunk if fewer can be evicted. ``own`` are the chunks of the request that
        needs the space.
        """


class LRUOrder(Order):
    """The LRU order of evicting a tier's chunks: the least recently used chunk first.

    A chunk's last use is never before that of the later chunks of the same prompt. As in vLLM, whose touch()
    skips chunks that are not stored, LRU does not learn from misses.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

    def insert(self, key: Key) -> None:
        """Add a chunk that the store begins to hold, as the most recently used one."""
        self._order[key] = None

    def finish(self, keys: Sequence[Key], use: ChunkUse) -> None:
        """Make the request's chunks the most recently used ones; its first chunk is evicted last of them."""
        for key in reversed(keys):
            if key in self._order:
                self._order.move_to_end(key)

    def evict(self, count: int, kept: set[Key], busy: dict[Key, int], own: Sequence[Key]) -> list[Key] | None:
        """Evict and return the ``count`` least recently used chunks that are neither ``kept`` nor ``busy``.

        Returns None and removes no chunk if fewer can be evicted.
        """
        found = list(islice(_free(self._order, kept, busy), count))
        if len(found) < count:
            return None
        for key in found:
            del self._order[key]
        return found


class ARCOrder(Order):
    """The order of evicting a tier's chunks by adaptive replacement (ARC).

    It has one list of chunks used once and one of chunks used again. The division of the space between both
    lists adapts to the misses.
    """

    def __init__(self, capacity: int) -> None:
        # `target` is the number of chunks to keep in the list `once`, of chunks used once.
        self.capacity, self.target = capacity, 0.0
        self.once: OrderedDict[Key, None] = OrderedDict()
        self.again: OrderedDict[Key, None] = OrderedDict()
        # Keys of the chunks that were evicted from the lists `once` and `again`.
        self.gone_once: OrderedDict[Key, None] = OrderedDict()
        self.gone_again: OrderedDict[Key, None] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self.once or key in self.again

    def __len__(self) -> int:
        return len(self.once) + len(self.again)

    def insert(self, key: Key) -> None:
        """Add a chunk that the store begins to hold, to the list of chunks used once."""
        self.once[key] = None
        self.gone_once.pop(key, None)
        self.gone_again.pop(key, None)

    def miss(self, keys: Sequence[Key]) -> None:
        """Give more space to the list (used once, or again) from which the missed chunks were evicted."""
        for key in reversed(keys):
            if key in self.gone_once:
                step = max(1, len(self.gone_again) / len(self.gone_once))
                self.target = min(self.target + step, self.capacity)
                self.gone_once.move_to_end(key)
            elif key in self.gone_again:
                step = max(1, len(self.gone_once) / len(self.gone_again))
                self.target = max(self.target - step, 0)
                self.gone_again.move_to_end(key)

    def finish(self, keys: Sequence[Key], use: ChunkUse) -> None:
        """Count the request as one access to the chunks that it reused."""
        for key in reversed(keys):
            if key in use.reused and key in self.once:
                del self.once[key]
                self.again[key] = None
            elif key in use.reused or key in use.inserted:
                for chunks in (self.once, self.again):
                    if key in chunks:
                        chunks.move_to_end(key)

    def evict(self, count: int, kept: set[Key], busy: dict[Key, int], own: Sequence[Key]) -> list[Key] | None:
        """Remove and return ``count`` chunks that are neither ``kept`` nor ``busy``.

        Returns None and removes no chunk if fewer can be evicted.
        """
        once, again = _free(self.once, kept, busy), _free(self.again, kept, busy)
        left, found = len(self.once), list[Key]()
        for _ in range(count):
            order = chain(once, again) if left >= int(self.target) else chain(again, once)
            key = next(order, None)
            if key is None:
                return None
            found.append(key)
            left -= key in self.once
        for key in found:
            if key in self.once:
                del self.once[key]
                self.gone_once[key] = None
            else:
                del self.again[key]
                self.gone_again[key] = None
        for ghost in (self.gone_once, self.gone_again):
            for _ in range(len(ghost) - self.capacity):
                ghost.popitem(last=False)
        return found


class LearnedOrder(LearnedChunkOrder[Key]):
    """The learned order of evicting a tier's chunks, adapted to the calls that a `ChunkStore` makes."""

    def miss(self, keys: Sequence[Key]) -> None:
        """Do nothing, because `finish` gets all chunks of the request, including the missed ones."""

    def load(self, keys: Sequence[Key]) -> None:
        """Protect loaded chunks from eviction until their request ends.

        A prompt longer than the tier thus keeps its beginning.
        """
        self.use(keys)

    def finish(self, keys: Sequence[Key], use: ChunkUse) -> None:  # type: ignore[override]
        """Record a request's end with all chunks of its prompt, including those the store does not hold."""
        super().finish(use.keys, use.reused)


_ORDERS: dict[str, Callable[[int], Order]] = {
    "lru": lambda capacity: LRUOrder(),
    "arc": ARCOrder,
    "learned": LearnedOrder,
}
POLICIES = tuple(_ORDERS)


class ChunkStore:
    """The chunks that one simulated KV tier holds, with their eviction order.

    A chunk in transfer is busy: it cannot be evicted. While it is being stored, it cannot be loaded either.
    """

    def __init__(self, capacity: int, policy: str = "lru") -> None:
        self.capacity = capacity
        self.order = _ORDERS[policy](capacity)
        # Chunk -> number of its loads in flight; -1 while the chunk is being stored.
        self._busy: dict[Key, int] = {}

        # Counts of chunks, except `refused`, which counts calls of `store` for which no space could be made.
        self.stored = self.evicted = self.refused = self.declined = 0

    def lookup(self, key: Key) -> bool:
        """Return whether the tier holds the chunk ``key`` and it can be loaded."""
        return key in self.order and self._busy.get(key, 0) >= 0

    def load(self, use: ChunkUse, start: int, end: int) -> None:
        """Begin to load a request's chunks [start, end) from the tier, which must hold them."""
        for place in range(start, end):
            key = use.keys[place]
            self._busy[key] = self._busy.get(key, 0) + 1
            use.seen.add(place)
            if key not in use.inserted:
                use.reused.add(key)
        self.order.load(use.keys[start:end])

    def loaded(self, use: ChunkUse, start: int, end: int) -> None:
        """Record that a request has loaded its chunks [start, end) from the tier."""
        for key in use.keys[start:end]:
            self._busy[key] -= 1
            if not self._busy[key]:
                del self._busy[key]

    def store(self, use: ChunkUse, start: int, end: int) -> list[Key] | None:
        """Begin to store a request's chunks [start, end) in the tier, except chunks that it holds already.

        Returns:
            Keys of the chunks to copy to the tier; None if so many are busy that no space can be made.
        """
        offered = use.keys[start:end]
        new = [key for key in offered if key not in self.order]
        misses = [key for key in new if key not in use.missed]
        self.order.miss(misses)
        use.missed.update(misses)
        for place in range(start, end):
            key = use.keys[place]
            if key not in self.order:
                use.seen.add(place)
            elif self._busy.get(key, 0) >= 0:
                use.seen.add(place)
                if key not in use.inserted:
                    use.reused.add(key)
        if new and (use.declined or not self.order.admits(use.keys, new)):
            use.declined = True
            self.declined += len(new)
            new = []
        if not new:
            return new
        over = len(new) + len(self.order) - self.capacity
        if over > 0:
            gone = self.order.evict(over, set(offered), self._busy, use.keys)
            if gone is None:
                self.refused += 1
                return None
            self.evicted += len(gone)
        for key in new:
            self.order.insert(key)
            self._busy[key] = -1
        use.inserted.update(new)
        self.stored += len(new)
        return new

    def written(self, keys: Iterable[Key]) -> None:
        """Record that chunks have been stored in the tier; they can be loaded from now on."""
        for key in keys:
            del self._busy[key]

    def finish(self, use: ChunkUse) -> None:
        """Record the end of a request; its use of chunks updates the eviction order."""
        self.order.finish([use.keys[place] for place in sorted(use.seen)], use)


def _free(order: OrderedDict[Key, None], kept: set[Key], busy: dict[Key, int]) -> Iterator[Key]:
    return (key for key in order if key not in kept and not busy.get(key, 0))
