"""BlockPool: who holds which block. Three states, arrays of ints, no object per block.

Every block but the null block is in exactly one state:

- *used*: reference count > 0;
- *cached*: unreferenced, but its content is in the prefix index; in the LRU list, evictable;
- *free*: unreferenced and without content worth keeping; on the free stack, reused first (LIFO).

The LRU list is intrusive: ``next`` and ``prev`` are int32 arrays indexed by block id, and block 0, the null
block, is the list's sentinel. Each array is an ``array.array`` (scalar access costs a third of numpy's) seen
through a numpy view as well (batch access).
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from tonnage.cache.errors import CacheConfigError, InvariantViolation

Int32Array = npt.NDArray[np.int32]

NULL_BLOCK = 0


class BlockPool:
    """``num_blocks`` blocks, block 0 being the null block that nobody owns. Raises CacheConfigError below 2."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise CacheConfigError(
                f"{num_blocks} blocks leave none to use: block 0 is the null block",
                field="num_blocks",
                hint="at least 2; give the KV pool more memory",
            )
        self.num_blocks = num_blocks
        self.usable = num_blocks - 1
        self.cached = 0
        self._refs = array("i", bytes(4 * num_blocks))
        self._next = array("i", bytes(4 * num_blocks))
        self._prev = array("i", bytes(4 * num_blocks))
        self.refs: Int32Array = np.frombuffer(self._refs, dtype=np.int32)
        self._next_view: Int32Array = np.frombuffer(self._next, dtype=np.int32)
        self._prev_view: Int32Array = np.frombuffer(self._prev, dtype=np.int32)
        # The top of the stack is its end: a new pool hands out 1, 2, 3 ...
        self._stack: Int32Array = np.arange(num_blocks - 1, 0, -1, dtype=np.int32)
        self.free = self.usable

    @property
    def used(self) -> int:
        """Blocks with a reference."""
        return self.usable - self.free - self.cached

    @property
    def oldest(self) -> int:
        """The cached block to evict next; the null block when none is cached."""
        return self._next[NULL_BLOCK]

    @property
    def newest(self) -> int:
        """The cached block to evict last; the null block when none is cached."""
        return self._prev[NULL_BLOCK]

    def before(self, block: int) -> int:
        """The cached block to evict just before this one; the null block at the end."""
        return self._prev[block]

    def allocate(self, count: int) -> Int32Array:
        """Take ``count`` free blocks, reference count 1 each; int32 [count].

        Evict first where ``free < count``: taking more raises InvariantViolation.
        """
        top = self.free
        if count > top:
            raise InvariantViolation(f"{count} blocks wanted, {top} free", field="promise")
        ids = self._stack[top - count : top][::-1].copy()
        self.free = top - count
        self.refs[ids] = 1
        return ids

    def allocate_one(self) -> int:
        """As ``allocate(1)``, without an array."""
        if self.free == 0:
            raise InvariantViolation("1 block wanted, 0 free", field="promise")
        self.free -= 1
        block = int(self._stack[self.free])
        self._refs[block] = 1
        return block

    def references(self, block: int) -> int:
        """Reference count of one block."""
        return self._refs[block]

    def acquire(self, ids: Int32Array) -> None:
        """One more reference for each of the distinct blocks; cached ones leave the LRU list."""
        for block in ids[self.refs[ids] == 0].tolist():
            self._unlink(block)
        self.refs[ids] += 1

    def release(self, ids: Int32Array, keep: npt.NDArray[np.bool_]) -> None:
        """One reference less for each of the distinct blocks, in the order given.

        Those that nobody references any more become cached where ``keep``, the first one closest to
        eviction, and free elsewhere.
        """
        left = self.refs[ids] - 1
        if ids.size and int(left.min()) < 0:
            raise InvariantViolation("a block is released that nobody references", field="reference counts")
        self.refs[ids] = left
        gone = left == 0
        self._push_cached(ids[gone & keep])
        self._push_free(ids[gone & ~keep])

    def uncache(self, block: int) -> None:
        """Cached -> free: the prefix index has forgotten the block."""
        if self._refs[block]:
            raise InvariantViolation(f"block {block} is evicted while in use", field="reference counts")
        self._unlink(block)
        self._stack[self.free] = block
        self.free += 1

    def lru_order(self) -> list[int]:
        """Cached blocks, the next to evict first. O(cached): for checks."""
        order: list[int] = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK and len(order) <= self.num_blocks:
            order.append(block)
            block = self._next[block]
        return order

    def free_blocks(self) -> Int32Array:
        """Free blocks, the next to be handed out last. A copy: for checks."""
        return self._stack[: self.free].copy()

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.cached -= 1

    def _push_cached(self, ids: Int32Array) -> None:
        """Append at the recently used end; ids[-1] becomes the most recent."""
        if not ids.size:
            return
        newest = self._prev[NULL_BLOCK]
        self._next_view[ids[:-1]] = ids[1:]
        self._prev_view[ids[1:]] = ids[:-1]
        first, last = int(ids[0]), int(ids[-1])
        self._prev[first], self._next[newest] = newest, first
        self._next[last], self._prev[NULL_BLOCK] = NULL_BLOCK, last
        self.cached += ids.size

    def _push_free(self, ids: Int32Array) -> None:
        if not ids.size:
            return
        self._stack[self.free : self.free + ids.size] = ids
        self.free += ids.size
