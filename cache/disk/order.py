"""The learned order in which a tier evicts its blocks, with a fallback where it fails.

`tonnage.cache.eviction.chunk_order` decides, as inside vLLM and in a replay. It sees a block when it is
written, and a request when it ends. All other blocks of a folder are *old*: those of other
namespaces, and those from before the start that no request has used since. They are evicted first, the least
recently used one before the others. While there are old blocks, every block is written.
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
    """The blocks of a tier in order of eviction. The caller serializes all calls.

    An exception in the learned order fails no request: afterwards `failed` is true, every block is admitted,
    and `victim` returns None, so that the caller evicts the least recently used block.

    Args:
        capacity: Blocks that the tier holds, of a folder those of the own namespace.
        old: Ids of the blocks that are there before the first request, the least recently used first.
    """

    def __init__(self, capacity: int, old: Iterable[bytes] = ()) -> None:
        self.failed = False
        self._capacity = capacity
        self._order: LearnedChunkOrder[bytes] = LearnedChunkOrder(capacity)
        self._old = OrderedDict.fromkeys(old)

    @property
    def full(self) -> bool:
        """Return whether a block must be evicted before another is inserted."""
        return not self.failed and not self._old and len(self._order) >= self._capacity

    def admits(self, prefix: Sequence[bytes], new: Sequence[bytes]) -> bool:
        """Return whether the blocks ``new`` of a request are worth their bytes.

        Args:
            prefix: Ids of the request's blocks, from the first on.
            new: Ids of those among them that the tier does not hold.
        """
        return bool(self._old) or self._ask(lambda order: order.admits(prefix, new), True)

    def insert(self, block: bytes) -> None:
        """Add a block that is about to be written. It stays until the request that computed it ends."""
        if block in self._order:
            return
        if len(self._order) < self._capacity:
            self._ask(lambda order: order.insert(block), None)
            self._old.pop(block, None)
        else:  # a file that vanished still has its place
            self._old[block] = None

    def remove(self, block: bytes) -> None:
        """Remove a block that was not written."""
        if block in self._old:
            del self._old[block]
        elif block in self._order:
            self._ask(lambda order: order.remove(block), None)

    def finish(self, blocks: Sequence[bytes], held: Iterable[bytes], reused: set[bytes]) -> None:
        """Note the end of a request.

        Args:
            blocks: Ids of the blocks that the request used, from its first on.
            held: Those among them that the tier holds.
            reused: Those that the request did not compute.
        """
        new = {block for block in held if block in self._old}
        for block in new:
            self.insert(block)
        self._ask(lambda order: order.finish(blocks, reused - new), None)

    def victim(self) -> bytes | None:
        """Remove and return the next block to evict; None if running requests have written all blocks."""
        if self._old:
            return self._old.popitem(last=False)[0]
        found = self._ask(lambda order: order.evict(1, (), {}), None)
        return None if found is None else found[0]

    def put_back(self, block: bytes) -> None:
        """Add a block again that could not be removed, behind the other old ones."""
        self._old[block] = None

    def _ask(self, call: Callable[[LearnedChunkOrder[bytes]], Answer], default: Answer) -> Answer:
        """Return what a call of the learned order returns; ``default`` after an exception in it."""
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
    """Compile the learned order, or read its machine code from disk, before a request waits for it."""
    order = LearnedBlocks(2)
    for block in (b"a", b"b", b"c"):
        if order.full:
            order.victim()
        order.insert(block)
        order.remove(block)
        order.insert(block)
        order.finish([block], [block], set())
        order.admits([block], [b"d"])
