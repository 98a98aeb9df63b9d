"""The eviction order of the cached blocks of a pool that is managed elsewhere, such as vLLM's.

The pool reports when a request begins and ends, and which blocks are released, reused and handed out. It keeps
its own reference counts, tables and index. This module keeps what the eviction rule needs beside them: classes
and ages of released blocks, and the parent of each block, so that a prefix outlives its continuations.

**Nodes** are created from a request's full blocks when it ends, and found by hash. Two requests that compute
the same tokens at the same time leave two blocks, which our own pool would merge. The second block is a
*spare*: it is evicted before all others, and its release counts as a release of the first.

**Arrays** have the names and the meaning of `Core`'s. ``refs`` is 0 for the blocks held here and 1 for all
others. Other groups of the same pool (`follow`) have nodes of their own, in the class of the first group's
block at the same place. Blocks of windowed groups have no nodes: each may be evicted separately.
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
from tonnage.cache.eviction.choice import OLDEST, YOUNGEST, choose_list, choose_rule, enlist_by_age
from tonnage.cache.eviction.model import CLASSES, ENTRY, LEARNED, OrderArrays, history_buckets, new_model
from tonnage.cache.eviction.reuse import observe_end, observe_start

SPARE = CLASSES  # an additional list: blocks whose content another block has too


class EvictionOrder:
    """The eviction order of the cached blocks of a pool that another manager owns.

    Args:
        num_blocks: Blocks of the pool; ids are 1 to num_blocks - 1. None is held here at first.
        block_size: Tokens per block.
        max_blocks: Upper bound of the blocks of one request in one group.
        learning: False: the block released first is evicted first, unless a cached block continues it.
    """

    def __init__(self, num_blocks: int, block_size: int, max_blocks: int, *, learning: bool = True) -> None:
        self.arrays = _new_arrays(num_blocks, block_size, learning)
        self._hashes, self._table = np.zeros(max_blocks, np.uint64), np.zeros(max_blocks, np.int32)
        self._classes = np.zeros(max_blocks, np.int32)
        self._ended = 0  # blocks of the last request that ended: entries of `_classes`
        self._out = np.zeros(num_blocks, np.int32)
        self._counts, self._model = columns(self.arrays.pool), columns(self.arrays.model)

    # -- requests ------------------------------------------------------------------------------------------

    def start(self, hashes: UInt64Array, hit: Sequence[int], tokens: int, free: int) -> int:
        """Record the start of a request and return the turn of its conversation, which `end` needs.

        Args:
            hashes: Hashes of the prompt's full blocks.
            hit: Blocks of the prefix hit, not taken yet.
            tokens: Length of the prompt.
            free: Blocks of the pool without content.
        """
        self._counts.free[0] = free
        count = min(self._enter(hashes, hit), len(hit))
        return int(_start(self.arrays, self._hashes, self._table, count, tokens))

    def end(self, hashes: UInt64Array, blocks: Sequence[int], prompt: int, tokens: int, turn: int) -> None:
        """Record the end of a request, before its blocks are released.

        Args:
            hashes: Hashes of its full blocks.
            blocks: Its full blocks with content, in order; 0 where it has none.
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
        """Record the blocks of another group of the request last passed to `end`.

        ``key`` distinguishes the groups; ``full`` says that the group is full attention.
        """
        self._enter(hashes, blocks)
        count = min(len(blocks), len(self._table), len(hashes) if full else len(blocks))
        if full:
            _publish(self.arrays, self._hashes, self._table, count, np.uint64(key))
        if self._ended:
            _follow(self.arrays, self._table, count, block_size, self._ended, self._classes)

    # -- blocks --------------------------------------------------------------------------------------------

    def release(self, blocks: Sequence[int]) -> None:
        """Add blocks that no request references any more to the order, a request's last block first."""
        _release(self.arrays, np.array(blocks, np.int32))

    def take(self, blocks: Sequence[int]) -> None:
        """Remove blocks that are referenced again from the order; blocks that are not in it are ignored."""
        _take(self.arrays, np.array(blocks, np.int32))

    def pop(self, count: int) -> list[int]:
        """Evict ``count`` blocks and return them. Raises ValueError if the order has fewer."""
        if count > self.cached:
            raise ValueError(f"{count} blocks requested, {self.cached} cached")
        return self._popped(count, FOR_PREFILL)

    def forget(self, blocks: Sequence[int]) -> None:
        """Record blocks that have lost their content otherwise.

        A block in use must not be passed to `end` any more, but must still be released here: other blocks may
        continue it.
        """
        _forget(self.arrays, np.array(blocks, np.int32))

    def reset(self) -> list[int]:
        """Evict all blocks in the order and return them."""
        return self._popped(self.cached, BY_RESET)

    # -- what may be read ----------------------------------------------------------------------------------

    @property
    def cached(self) -> int:
        """Number of unreferenced blocks with content, whose order of eviction is kept here."""
        return int(self._counts.cached[0])

    @property
    def evicted(self) -> int:
        """Number of evicted blocks whose content no other block had."""
        return int(self._counts.evicted[0, :BY_RESET].sum())

    @property
    def learned(self) -> bool:
        """Whether the current rule is the learned one, not LRU."""
        return bool(self._model.rule[0] == LEARNED)

    def blocks(self) -> list[int]:
        """Return the unreferenced blocks with content: spare blocks first, then by release; O(pool)."""
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
    """Return the arrays of a pool that holds no block."""
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


# -- nodes -------------------------------------------------------------------------------------------------


@compiled
def _publish(core: OrderArrays, hashes: UInt64Array, table: Int32Array, count: int, key: np.uint64) -> None:
    """Create nodes for the blocks in ``table``, which are in use; replace blocks by existing nodes there."""
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
            elif core.kind[mine] < ONE_CHILD:  # its content has changed
                _drop(core, mine)
                _insert(core, mine, parent, value)
        elif core.parent[node] == ROOT:  # its parent was evicted before it
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
    """Return the node with this hash, or 0.

    A collision costs at most a hit, because the pool itself decides which blocks to serve.
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
    """Make ``node`` a child of ``parent``."""
    core.parent[node] = parent
    if parent == ROOT:
        return
    if core.refs[parent] == 0 and core.kind[parent] < ONE_CHILD:  # a node with a child is in no list
        unlink(core, parent)
        core.next[parent] = NULL_BLOCK
        core.pool[0].cached += 1
    core.kind[parent] += ONE_CHILD


@inner
def _unhash(core: OrderArrays, node: int) -> None:
    """Remove the node from its hash bucket, if it is in it."""
    bucket = _bucket(core, core.node_hash[node])
    at = int(core.heads[bucket])
    if at == node:
        core.heads[bucket] = core.chain[node]
    else:
        while at != NULL_BLOCK and core.chain[at] != node:
            at = int(core.chain[at])
        if at != NULL_BLOCK:
            core.chain[at] = core.chain[node]
    core.chain[node] = NULL_BLOCK


@inner
def _drop(core: OrderArrays, node: int) -> None:
    """Remove a node without children from the index."""
    _unhash(core, node)
    core.node_of[node] = NULL_BLOCK
    core.pool[0].nodes -= 1
    parent = int(core.parent[node])
    if parent != ROOT:
        core.kind[parent] -= ONE_CHILD
        if core.kind[parent] < ONE_CHILD and core.refs[parent] == 0:
            enlist_by_age(core, parent)


@inner
def _cut(core: OrderArrays) -> None:
    """Detach nodes in use from cached parents, so that a cached block can be listed again; O(pool).

    It is needed when every cached block has a child. A request may hold a node and, in place of its parent, a
    block of its own with the same content.
    """
    for node in range(1, core.pool[0].num_blocks):
        parent = int(core.parent[node])
        if core.node_of[node] != node or core.refs[node] == 0 or parent == ROOT or core.refs[parent] != 0:
            continue
        core.parent[node] = ROOT
        core.kind[parent] -= ONE_CHILD
        if core.kind[parent] < ONE_CHILD:
            enlist_by_age(core, parent)


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
    """Remove a held block, listed or with children, from the order."""
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
    """Write ``count`` evicted blocks, at most the held ones, to ``out``."""
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
            _unhash(core, block)
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
