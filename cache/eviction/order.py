"""The eviction order of the cached blocks of a pool that is managed elsewhere, such as vLLM's.

The pool's owner reports when a request begins and ends, and which blocks are released, reused and handed out.
The owner keeps reference counts, block tables and index. This module keeps the other inputs of eviction:
classes and ages of released blocks, and the parent of each block. With the parents, a prefix stays cached at
least as long as its continuations.

**Nodes** are created from a request's full blocks when it ends, and found by hash. Two requests that compute
the same tokens at the same time leave two blocks. The second block is a *spare*: it is evicted before all other
blocks, and its release counts as a release of the first.

**Arrays** have the same names and meaning as in `tonnage.cache.blocks.state.Core`. ``refs`` is 0 for the blocks
in this eviction order and 1 for all others. Other groups of the same pool (`follow`) have nodes of their own,
in the class of the first group's block at the same position. Blocks of windowed groups have no nodes: each may
be evicted separately.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tonnage.cache.blocks.memory import resident
from tonnage.cache.blocks.pool import enlist, unlink
from tonnage.cache.blocks.state import (
    BY_RESET,
    CLASS_MASK,
    CLOCK_MASK,
    FOR_PREFILL,
    NULL_BLOCK,
    ONE_CHILD,
    POOL,
    ROOT,
    Int32Array,
    UInt64Array,
    columns,
    records,
)
from tonnage.cache.compiled import compiled, inlined, inner
from tonnage.cache.eviction.choice import OLDEST, YOUNGEST, age_level, age_of, choose_list, leave_parent, unhash
from tonnage.cache.eviction.model import CLASSES, ENTRY, LEARNED, OrderArrays, history_buckets, new_model
from tonnage.cache.eviction.reuse import choose_rule, observe_end, observe_start, worth_of_new

SPARE = CLASSES  # index of the extra eviction list for blocks whose content another block has too


class EvictionOrder:
    """The eviction order of the cached blocks of a pool that another manager owns.

    Args:
        num_blocks: Blocks of the pool; ids are 1 to num_blocks - 1. At first no block is in the order.
        block_size: Tokens per block.
        max_blocks: Upper bound of the blocks of one request in one group.
        learning: False: the block released first is evicted first, unless a cached block continues it.
    """

    def __init__(self, num_blocks: int, block_size: int, max_blocks: int, *, learning: bool = True) -> None:
        self.arrays = _new_arrays(num_blocks, block_size, learning)
        self._hashes, self._table = np.zeros(max_blocks, np.uint64), np.zeros(max_blocks, np.int32)
        self._classes = np.zeros(max_blocks, np.int32)
        # number of used entries of `_classes`, one for each block of the last request that ended
        self._ended = 0
        self._out = np.zeros(num_blocks, np.int32)
        self._counts, self._model = columns(self.arrays.pool), columns(self.arrays.model)

    # -- requests ------------------------------------------------------------------------------------------

    def start(self, hashes: UInt64Array, hit: Sequence[int], tokens: int, free: int) -> int:
        """Record the start of a request and return its conversation turn, which `end` needs.

        Args:
            hashes: Hashes of the prompt's full blocks.
            hit: Cached blocks that the request will reuse, before `take` is called for them.
            tokens: Length of the prompt in tokens.
            free: Number of the pool's blocks without content.
        """
        self._counts.free[0] = free
        count = min(self._enter(hashes, hit), len(hit))
        return int(_start(self.arrays, self._hashes, self._table, count, tokens))

    def end(self, hashes: UInt64Array, blocks: Sequence[int], prompt: int, tokens: int, turn: int) -> None:
        """Record the end of a request, before its blocks are released.

        Args:
            hashes: Hashes of the request's full blocks.
            blocks: The request's full blocks with content, in order; 0 at positions without a block.
            prompt: Length of the prompt in tokens.
            tokens: Length of prompt and output in tokens.
            turn: The result of `start`.
        """
        self._ended = min(self._enter(hashes, blocks), len(blocks))
        _publish(self.arrays, self._hashes, self._table, self._ended, np.uint64(0))
        _end(self.arrays, self._hashes, self._table, self._ended, prompt, tokens, turn, self._classes)

    def follow(
        self, hashes: UInt64Array, blocks: Sequence[int], block_size: int, key: int, *, full: bool
    ) -> None:
        """Record a request's blocks in another KV cache group; `end` must have been called for it just before.

        ``key`` is a number unique to the group, which enters the hashes; ``full`` says that the group is full
        attention.
        """
        self._enter(hashes, blocks)
        count = min(len(blocks), len(self._table), len(hashes) if full else len(blocks))
        if full:
            _publish(self.arrays, self._hashes, self._table, count, np.uint64(key))
        if self._ended:
            _follow(self.arrays, self._table, count, block_size, self._ended, self._classes)

    def is_worth_storing(self, hashes: UInt64Array) -> bool:
        """Return whether a prompt's new blocks have at least the forecast reuse of the next block to evict.

        The method is for stores that need not store every block. ``hashes`` are the hashes of the prompt's full
        blocks. The result is True while LRU is in effect, and if no block can be evicted.
        """
        count = self._enter(hashes, ())
        return bool(_is_worth_storing(self.arrays, self._hashes[:count]))

    # -- blocks --------------------------------------------------------------------------------------------

    def release(self, blocks: Sequence[int]) -> None:
        """Add to the eviction order the blocks that no request references any more.

        A request's last block must come first in ``blocks``.
        """
        _release(self.arrays, np.array(blocks, np.int32))

    def take(self, blocks: Sequence[int]) -> None:
        """Remove from the eviction order the blocks that requests reference again; ignore other blocks."""
        _take(self.arrays, np.array(blocks, np.int32))

    def pop(self, count: int) -> list[int]:
        """Evict ``count`` cached blocks and return their ids. Raises ValueError if fewer can be evicted."""
        if count > self.cached:
            raise ValueError(f"cannot evict {count} blocks, because only {self.cached} are cached")
        return self._popped(count, FOR_PREFILL)

    def forget(self, blocks: Sequence[int]) -> None:
        """Record that blocks have lost their content, although this object did not evict them.

        If a request uses such a block, the caller must not pass the block to `end`. It must still pass the
        block to `release`, because cached blocks may continue it.
        """
        _forget(self.arrays, np.array(blocks, np.int32))

    def reset(self) -> list[int]:
        """Evict all cached blocks and return their ids in order of eviction."""
        return self._popped(self.cached, BY_RESET)

    # -- what may be read ----------------------------------------------------------------------------------

    @property
    def cached(self) -> int:
        """Number of cached blocks that no request references, all of which are in the eviction order."""
        return int(self._counts.cached[0])

    @property
    def clock(self) -> int:
        """Number of blocks released to the eviction order so far, which serves as its clock."""
        return int(self._counts.clock[0])

    @property
    def oldest(self) -> int:
        """Value of `clock` when LRU's next victim was released; the present `clock` if no block is cached."""
        return int(_oldest(self.arrays))

    @property
    def evicted(self) -> int:
        """Number of blocks evicted so far whose content no other block had."""
        return int(self._counts.evicted[0, :BY_RESET].sum())

    @property
    def learned(self) -> bool:
        """Whether cached blocks are evicted in the learned order now, not by LRU."""
        return bool(self._model.rule[0] == LEARNED)

    def blocks(self) -> list[int]:
        """Return the ids of the cached blocks: duplicates first, then by time of release; O(pool)."""
        here = np.flatnonzero(self.arrays.refs == 0)
        age = (int(self._counts.clock[0]) - self.arrays.stamp[here]) & CLOCK_MASK
        spare = self.arrays.kind[here] & CLASS_MASK == SPARE
        found: list[int] = here[np.lexsort((-age, ~spare))].tolist()
        return found

    def _popped(self, count: int, cause: int) -> list[int]:
        _pop(self.arrays, count, cause, self._out)
        found: list[int] = self._out[:count].tolist()
        return found

    def _enter(self, hashes: UInt64Array, blocks: Sequence[int]) -> int:
        count, held = min(len(hashes), len(self._hashes)), min(len(blocks), len(self._table))
        self._hashes[:count], self._table[:held] = hashes[:count], blocks[:held]
        return count


def _new_arrays(num_blocks: int, block_size: int, learning: bool) -> OrderArrays:
    """Return the arrays of an eviction order that contains no blocks."""
    model, history = new_model(num_blocks, learning)
    pool = np.zeros(1, POOL)
    pool["num_blocks"], pool["block_size"] = num_blocks, block_size
    table = resident(8, num_blocks + SPARE + 1, dtype=np.int32)
    refs, stamp, node_of, parent, kind, chain = table[:6, :num_blocks]
    refs[:] = 1
    table[6:, num_blocks:] = np.arange(num_blocks, num_blocks + SPARE + 1)
    return OrderArrays(
        pool=records(pool), refs=refs, next=table[6], prev=table[7], stamp=stamp, node_of=node_of,
        parent=parent, kind=kind, chain=chain, node_hash=resident(num_blocks, dtype=np.uint64),
        heads=resident(1 << (num_blocks - 1).bit_length(), dtype=np.int32),
        history=records(np.zeros(history, ENTRY)),
        history_heads=resident(history_buckets(history), dtype=np.int32), model=records(model),
    )  # fmt: skip


@compiled
def _start(core: OrderArrays, hashes: UInt64Array, table: Int32Array, hit: int, tokens: int) -> int:
    turn = observe_start(core, hashes, table, min(tokens, hashes.size * core.pool[0].block_size), hit)
    choose_rule(core)
    return turn


@compiled
def _end(
    core: OrderArrays, hashes: UInt64Array, table: Int32Array, count: int, prompt: int, tokens: int, turn: int,
    classes: Int32Array,
) -> None:  # fmt: skip
    observe_end(core, hashes, table, count, prompt, tokens, turn)
    for at in range(count):
        classes[at] = core.kind[table[at]] & CLASS_MASK


@compiled
def _follow(
    core: OrderArrays, table: Int32Array, count: int, block_size: int, ended: int, classes: Int32Array
) -> None:
    for at in range(count):
        if table[at] != NULL_BLOCK:
            place = min(((at + 1) * block_size - 1) // core.pool[0].block_size, ended - 1)
            core.kind[table[at]] = (core.kind[table[at]] & ~CLASS_MASK) | classes[place]


@compiled
def _is_worth_storing(core: OrderArrays, hashes: UInt64Array) -> bool:
    if core.model[0].rule != LEARNED or core.pool[0].lists == 0:
        return True
    kind, end, _ = choose_list(core)
    sentinel = core.pool[0].num_blocks + kind
    victim = core.next[sentinel] if end == OLDEST else core.prev[sentinel]
    level = age_level(age_of(core, victim), core.pool[0].num_blocks)
    return bool(worth_of_new(core, hashes) >= core.model[0].density[kind, level])


@compiled
def _oldest(core: OrderArrays) -> int:
    pool, found = core.pool[0], 0
    for kind in range(CLASSES):
        if (pool.lists >> kind) & 1:
            found = max(found, age_of(core, core.next[pool.num_blocks + kind]))
    return int(pool.clock) - found


# -- nodes -------------------------------------------------------------------------------------------------


@compiled
def _publish(core: OrderArrays, hashes: UInt64Array, table: Int32Array, count: int, key: np.uint64) -> None:
    """Create nodes for a request's blocks in ``table``; replace entries by existing nodes of equal content."""
    parent = ROOT
    for at in range(count):
        mine = int(table[at])
        if mine == NULL_BLOCK:
            parent = ROOT
            continue
        value = hashes[at] ^ key
        node = _find(core, value)
        if node == NULL_BLOCK:
            node = mine
            if core.node_of[mine] != mine:
                _insert(core, mine, parent, value)
            elif core.kind[mine] < ONE_CHILD:  # the block has new content, so its old node is dropped
                _drop(core, mine)
                _insert(core, mine, parent, value)
        elif core.parent[node] == ROOT:  # the node's parent was evicted before the node
            _link(core, node, parent)
        if node != mine and core.node_of[mine] == mine and core.kind[mine] < ONE_CHILD:
            _drop(core, mine)
        if core.node_of[mine] != mine:
            core.node_of[mine] = node
        table[at] = node
        parent = node


@inlined
def _bucket(core: OrderArrays, value: np.uint64) -> int:
    return int(value & np.uint64(core.heads.size - 1))


@inlined
def _find(core: OrderArrays, value: np.uint64) -> int:
    """Return the node (full block after its prefix) whose hash is ``value``, or 0 if there is none.

    A hash collision can only spoil the eviction order, because the pool's owner decides which blocks a request
    reuses.
    """
    node = int(core.heads[_bucket(core, value)])
    while node != NULL_BLOCK and core.node_hash[node] != value:
        node = int(core.chain[node])
    return node


@inner
def _insert(core: OrderArrays, block: int, parent: int, value: np.uint64) -> None:
    core.node_of[block], core.node_hash[block], core.kind[block] = block, value, 0
    bucket = _bucket(core, value)
    core.chain[block] = core.heads[bucket]
    core.heads[bucket] = block
    core.pool[0].nodes += 1
    _link(core, block, parent)


@inner
def _link(core: OrderArrays, node: int, parent: int) -> None:
    """Make ``node`` a child of ``parent``, the block before it in the prefix."""
    core.parent[node] = parent
    if parent == ROOT:
        return
    # A cached node leaves its eviction list when it gets its first child.
    if core.refs[parent] == 0 and core.kind[parent] < ONE_CHILD:
        unlink(core, parent)
        core.next[parent] = NULL_BLOCK
        core.pool[0].cached += 1
    core.kind[parent] += ONE_CHILD


@inner
def _drop(core: OrderArrays, node: int) -> None:
    """Remove a node without children from the index of nodes by hash."""
    unhash(core, node)
    core.node_of[node] = NULL_BLOCK
    core.pool[0].nodes -= 1
    leave_parent(core, node)


@inner
def _cut(core: OrderArrays) -> None:
    """Detach nodes in use from cached parents, so that cached blocks can be evicted again; O(pool).

    It is needed when every cached block has a child. That happens if a request holds a node but not the node's
    parent, because the request has another block with the parent's content.
    """
    for node in range(1, core.pool[0].num_blocks):
        parent = int(core.parent[node])
        if core.node_of[node] != node or core.refs[node] == 0 or parent == ROOT or core.refs[parent] != 0:
            continue
        leave_parent(core, node)
        core.parent[node] = ROOT


# -- blocks ------------------------------------------------------------------------------------------------


@compiled
def _release(core: OrderArrays, blocks: Int32Array) -> None:
    pool = core.pool[0]
    for block in blocks:
        node = core.node_of[block]
        if node != NULL_BLOCK and node != block:
            core.node_of[block], core.kind[block], core.stamp[block] = NULL_BLOCK, SPARE, 0
            core.refs[block] = 0
            pool.cached += 1
            enlist(core, block, block, YOUNGEST)
            if core.refs[node] != 0:
                continue
            unlink(core, node)
        else:
            node = block
        core.refs[node] = 0
        core.stamp[node] = pool.clock & CLOCK_MASK
        pool.clock += 1
        pool.cached += 1
        if core.kind[node] < ONE_CHILD:
            enlist(core, node, node, YOUNGEST)
        else:
            core.next[node] = NULL_BLOCK


@inlined
def _leave(core: OrderArrays, block: int) -> None:
    """Remove a cached block from the eviction order; a block with children is in no eviction list."""
    unlink(core, block)
    core.refs[block], core.stamp[block] = 1, 0
    if core.kind[block] & CLASS_MASK == SPARE:
        core.kind[block] = 0


@compiled
def _take(core: OrderArrays, blocks: Int32Array) -> None:
    for block in blocks:
        if core.refs[block] == 0:
            _leave(core, block)


@compiled
def _pop(core: OrderArrays, count: int, cause: int, out: Int32Array) -> None:
    """Evict ``count`` cached blocks for reason ``cause`` and write their ids to ``out``.

    At least ``count`` blocks must be cached.
    """
    pool, done = core.pool[0], 0
    while done < count:
        spare = pool.num_blocks + SPARE
        if core.next[spare] != spare:
            out[done] = core.next[spare]
            _leave(core, out[done])
            done += 1
            continue
        if pool.lists == 0:
            _cut(core)
        kind, end, left = choose_list(core)
        while left > 0 and done < count:
            sentinel = pool.num_blocks + kind
            block = core.next[sentinel] if end == OLDEST else core.prev[sentinel]
            if block >= pool.num_blocks:
                break
            _leave(core, block)
            if core.node_of[block] == block:
                _drop(core, block)
            core.kind[block] = 0
            pool.evicted[cause] += 1
            out[done] = block
            done += 1
            left -= 1


@compiled
def _forget(core: OrderArrays, blocks: Int32Array) -> None:
    for block in blocks:
        if core.node_of[block] != block:
            continue
        if core.kind[block] >= ONE_CHILD:
            unhash(core, block)
            continue
        here = core.refs[block] == 0
        if here:
            _leave(core, block)
        _drop(core, block)
        core.kind[block] = 0
        if here:
            core.kind[block], core.refs[block] = SPARE, 0
            core.pool[0].cached += 1
            enlist(core, block, block, YOUNGEST)
