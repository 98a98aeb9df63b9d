"""The order in which a KV tier evicts chunks, by learned reuse, and the choice of the new chunks to store.

The tier's chunks are the blocks of an `EvictionOrder`, so a tier and a GPU pool learn by one mechanism. Three
rules apply to tiers only:

- Chunks that a request loaded or stored are not evicted to store other chunks of the same request. A prompt
  longer than the tier therefore keeps its beginning, which alone can be hit, instead of its end.
- Chunks of other running requests are evicted only when no chunks of ended requests are left. While LRU is in
  effect, they are evicted in LRU order with the chunks of ended requests.
- A new chunk is admitted if the tier has space, or if its forecast hit density is at least that of the chunk
  that would be evicted for it. The forecast is higher for a chunk that was offered before.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Generic, TypeVar

import numpy as np

from tonnage.cache.blocks.state import UInt64Array
from tonnage.cache.eviction.order import EvictionOrder

Key = TypeVar("Key", bound=Hashable)

# Number of chunks of one request that enter the learned order: 1,048,576 tokens in chunks of 16. Each later
# chunk is evicted independently of the others.
_LONGEST = 1 << 16


class LearnedChunkOrder(Generic[Key]):
    """The order in which a KV tier evicts the chunks of one KV cache group, by their reuse in earlier requests.

    Args:
        capacity: Chunks of the tier.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Remove all chunks from the eviction order, and forget what it has learned."""
        # The order counts lengths in chunks here, not in tokens, so its block size is 1.
        self._order = EvictionOrder(self.capacity + 1, 1, _LONGEST)
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._free = list(range(self.capacity, 0, -1))
        # Chunks of running requests, the chunk used longest ago first. They are not in the eviction order. Each
        # value is the value of `EvictionOrder.clock` when the chunk was last used.
        self._used: dict[Key, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._block_of

    def __len__(self) -> int:
        return len(self._block_of)

    @property
    def learned(self) -> bool:
        """Whether the tier evicts chunks in the learned order now, not by LRU."""
        return self._order.learned

    def insert(self, key: Key) -> None:
        """Add a chunk that a running request stores in the tier."""
        block = self._free.pop()
        self._block_of[key], self._key_of[block] = block, key
        self._used[key] = self._order.clock

    def use(self, keys: Iterable[Key]) -> None:
        """Protect chunks from eviction until their request ends; ignore keys that the tier does not hold."""
        held = [key for key in keys if key in self._block_of]
        self._order.take([self._block_of[key] for key in held if key not in self._used])
        for key in held:
            self._used.pop(key, None)
            self._used[key] = self._order.clock

    def remove(self, key: Key) -> None:
        """Remove a chunk that could not be stored in the tier."""
        block = self._block_of.pop(key)
        self._order.forget([block])
        self._order.take([block])
        del self._key_of[block]
        self._free.append(block)
        self._used.pop(key, None)

    def admits(self, keys: Sequence[Key], new: Sequence[Key]) -> bool:
        """Return whether to store a request's chunks ``new`` in the tier, by their forecast reuse.

        Args:
            keys: Chunks of the request's prompt, in prefix order.
            new: Chunks in ``keys`` that the tier does not hold.
        """
        return len(new) <= len(self._free) or self._order.is_worth_storing(_hashes(keys))

    def finish(self, keys: Sequence[Key], reused: Collection[Key]) -> None:
        """Record the end of a request and the chunks that it used, from which the order learns.

        Args:
            keys: Chunks that the request used, in prefix order, whether the tier holds them or not.
            reused: Chunks that the tier held before the request.
        """
        blocks = [self._block_of.get(key, 0) for key in keys]
        hashes, count = _hashes(keys[:_LONGEST]), min(len(keys), _LONGEST)
        hit = 0
        while hit < count and blocks[hit] and keys[hit] in reused:
            hit += 1
        # LRU is simulated in the space of the order's cached chunks and of the free chunks. LRU may also evict
        # chunks of running requests, so all chunks outside the order are passed as free.
        turn = self._order.start(hashes, blocks[:hit], count + 1, self.capacity - self._order.cached)
        held = [block for block in blocks if block]
        self._order.take(held)
        self._order.end(hashes, blocks[:count], count, count, turn)
        self._order.release(held[::-1])
        for key in keys:
            self._used.pop(key, None)

    def evict(
        self, count: int, kept: Collection[Key], busy: Mapping[Key, int], own: Sequence[Key] | None = None
    ) -> list[Key] | None:
        """Evict and return ``count`` chunks of the tier; return None and evict none if fewer may be evicted.

        Chunks that no running request uses go first, then the least recently used chunks of other running
        requests. While LRU is in effect, the oldest chunk of either kind goes first.

        Args:
            count: Number of chunks.
            kept: Chunks that must not be evicted.
            busy: Number of transfers by chunk; a chunk with a value other than 0 must not be evicted.
            own: Chunks of the request that needs the space, which must not be evicted. None: no chunk of a
                running request may be evicted.
        """
        self.use(key for key in kept if key not in self._used)
        self.use(key for key, loads in busy.items() if loads and key not in self._used)
        others: Iterator[Key] = iter(())
        if own is not None:
            # the request's chunks become the most recently used ones, its first chunk last
            self.use([key for key in reversed(own) if key in self._used])
            stay = {*own, *kept}
            others = (key for key in list(self._used) if key not in stay and not busy.get(key, 0))
        taken = list(islice(others, max(0, count - self._order.cached)))
        if self._order.cached + len(taken) < count:
            return None
        if not self.learned:
            while len(taken) < count and (key := next(others, None)) is not None:
                if self._used[key] > self._order.oldest:
                    break
                taken.append(key)
        gone = [self._key_of.pop(block) for block in self._order.pop(count - len(taken))]
        self._free += [self._block_of.pop(key) for key in gone]
        for key in taken:
            self.remove(key)
        return gone + taken


def _hashes(keys: Sequence[Hashable]) -> UInt64Array:
    """Return one 64-bit hash per chunk key (splitmix64's finalizer, Steele et al., OOPSLA 2014)."""
    value = np.array([hash(key) for key in keys], np.int64).view(np.uint64)
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
