"""The eviction order of a KV tier's blocks, learned from their reuse, with LRU as fallback after an error.

`tonnage.cache.eviction.chunk_order` decides, as it does inside vLLM and in a replay. It learns of a block when
the block is written, and of a request when the request ends. All other blocks of a folder are *old*: blocks of
other namespaces, and blocks from before the start that no request has used since. Old blocks are evicted first,
in LRU order. While old blocks exist, every new block is written.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from tonnage.cache.eviction.chunk_order import LearnedChunkOrder

Answer = TypeVar("Answer")
log = logging.getLogger("tonnage.cache")


class LearnedBlocks:
    """The KV blocks of a cache tier in order of eviction. The caller serializes all calls.

    An exception in the learned order fails no request: afterwards `failed` is true, every block is admitted,
    and `victim` returns None, so that the caller evicts the least recently used block.

    Args:
        capacity: Upper bound of the number of blocks in the tier. In a folder, only the blocks of this server's
            namespace count.
        old: Ids of the blocks that the tier holds before the first request, the least recently used first.
    """

    def __init__(self, capacity: int, old: Iterable[bytes] = ()) -> None:
        self.failed = False
        self._capacity = capacity
        self._order: LearnedChunkOrder[bytes] = LearnedChunkOrder(capacity)
        self._old = OrderedDict.fromkeys(old)

    @property
    def full(self) -> bool:
        """Return whether the tier is full, so that a KV block must be evicted before another is inserted."""
        return not self.failed and not self._old and len(self._order) >= self._capacity

    def admits(self, prefix: Sequence[bytes], new: Sequence[bytes]) -> bool:
        """Return whether to store a request's KV blocks ``new`` in the tier, by their forecast reuse.

        Args:
            prefix: Ids of the request's blocks in prefix order, from the first on.
            new: Ids of the blocks in ``prefix`` that the tier does not hold.
        """
        return bool(self._old) or self._ask(lambda order: order.admits(prefix, new), True)

    def insert(self, block: bytes) -> None:
        """Add a KV block that is about to be written. It is not evicted before its request has ended."""
        if block in self._order:
            return
        if len(self._order) < self._capacity:
            self._ask(lambda order: order.insert(block), None)
            self._old.pop(block, None)
        else:  # the order is full, because it still counts a block whose file has vanished
            self._old[block] = None

    def remove(self, block: bytes) -> None:
        """Remove from the eviction order a KV block whose write to the tier has failed."""
        if block in self._old:
            del self._old[block]
        elif block in self._order:
            self._ask(lambda order: order.remove(block), None)

    def finish(self, blocks: Sequence[bytes], held: Iterable[bytes], reused: set[bytes]) -> None:
        """Record which KV blocks a request that ended has used; the eviction order learns from it.

        Args:
            blocks: Ids of the blocks that the request used, in prefix order.
            held: Ids of the blocks in ``blocks`` that the tier holds.
            reused: Ids of the blocks in ``blocks`` that the request did not compute.
        """
        new = {block for block in held if block in self._old}
        for block in new:
            self.insert(block)
        self._ask(lambda order: order.finish(blocks, reused - new), None)

    def victim(self) -> bytes | None:
        """Remove and return the id of the next block to evict; None if running requests wrote all blocks."""
        if self._old:
            return self._old.popitem(last=False)[0]
        found = self._ask(lambda order: order.evict(1, (), {}), None)
        return None if found is None else found[0]

    def put_back(self, block: bytes) -> None:
        """Add an evicted block again as the last old block to evict, because its file could not be deleted."""
        self._old[block] = None

    def _ask(self, call: Callable[[LearnedChunkOrder[bytes]], Answer], default: Answer) -> Answer:
        """Return the result of ``call`` on the learned eviction order, or ``default`` if it raises."""
        if self.failed:
            return default
        try:
            return call(self._order)
        except Exception:
            log.exception(
                "the learned eviction of a KV tier is off; the least recently used blocks are evicted"
            )
            self.failed = True
            return default


def compile_order() -> None:
    """Compile the code of the learned eviction order, or read it from disk, before a request waits for it."""
    order = LearnedBlocks(2)
    for block in (b"a", b"b", b"c"):
        if order.full:
            order.victim()
        order.insert(block)
        order.remove(block)
        order.insert(block)
        order.finish([block], [block], set())
        order.admits([block], [b"d"])
