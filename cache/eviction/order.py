"""The eviction order of the cached blocks of a pool that is managed elsewhere, such as vLLM's.

The pool reports when a request begins and ends, and which blocks are released, reused and handed out. It keeps
its own reference counts, tables and index. This module keeps what the eviction rule needs beside them: classes
and ages of released blocks, and the parent of each block, so that a prefix outlives its continuations.

**Nodes** are created from a request's full blocks when it ends, and found by hash. Two requests that compute
the same tokens at the same time leave two blocks, which our own pool would merge. The second block is a
*spare*: it is evicted before all others, and its release counts as a release of the first.

**Arrays** are a `Core`'s, with one row for the request of the current call. ``refs`` is 0 for the blocks held
here and 1 for all others. Other groups of the same pool (`follow`) have nodes of their own, in the class of the
first group's block at the same place. Blocks of windowed groups have no nodes: each may be evicted separately.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tonnage.cache.blocks.pool import enlist, unlink
from tonnage.cache.blocks.state import (
    BY_RESET,
    CLASS_MASK,
    CLOCK_MASK,
    FOR_PREFILL,
    NULL_BLOCK,
    ONE_CHILD,
    ROOT,
    Core,
    Int32Array,
    UInt64Array,
    columns,
    new_core,
)
from tonnage.cache.compiled import compiled, inlined, inner
from tonnage.cache.eviction.choice import OLDEST, YOUNGEST, choose_list, choose_rule, enlist_by_age
from tonnage.cache.eviction.model import CLASSES, LEARNED
from tonnage.cache.eviction.reuse import observe_end, observe_start
from tonnage.planner.model.layout import KVGroup, KVLayout

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
        one_full_group = KVLayout((KVGroup("full", (0,)),), block_size, 1, 1, 1, "bfloat16", 2)
        core = new_core(
            one_full_group,
            num_blocks,
            rows=1,
            max_model_len=max_blocks * block_size,
            max_step=max_blocks * block_size,
            caching=True,
            seed=0,
            logged=False,
            learning=learning,
        )
        links = np.zeros((2, num_blocks + SPARE + 1), np.int32)
        links[:, num_blocks:] = np.arange(num_blocks, num_blocks + SPARE + 1)
        # arrays of nodes that are unused here: tokens and blocks of other groups
        unused = np.zeros((1, 1), np.int32)
        self.core = core._replace(next=links[0], prev=links[1], node_tokens=unused, node_blocks=unused)
        self.core.refs[:] = 1
        self._room = max_blocks
        self._classes = np.zeros(max_blocks, np.int32)
        self._ended = 0  # blocks of the last request that ended: entries of `_classes`
        self._out = np.zeros(num_blocks, np.int32)
        self._counts, self._model = columns(self.core.pool), columns(self.core.model)

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
        count = self._enter(hashes, hit)
        return int(_start(self.core, min(count, len(hit)), tokens))

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
        _end(self.core, self._ended, prompt, tokens, turn, self._classes)

    def follow(
        self, hashes: UInt64Array, blocks: Sequence[int], block_size: int, key: int, *, full: bool
    ) -> None:
        """Record the blocks of another group of the request last passed to `end`.

        ``key`` distinguishes the groups; ``full`` says that the group is full attention.
        """
        self._enter(hashes, blocks)
        count = min(len(blocks), self._room, len(hashes) if full else len(blocks))
        _follow(self.core, count, block_size, self._ended, np.uint64(key), full, self._classes)

    # -- blocks --------------------------------------------------------------------------------------------

    def release(self, blocks: Sequence[int]) -> None:
        """Take over blocks that no request references any more, a request's last block first."""
        _release(self.core, np.array(blocks, np.int32))

    def take(self, blocks: Sequence[int]) -> None:
        """Drop blocks that are referenced again; blocks that are not held here are ignored."""
        _take(self.core, np.array(blocks, np.int32))

    def pop(self, count: int) -> list[int]:
        """Evict ``count`` blocks and return them. Raises ValueError if fewer are held."""
        if count > self.cached:
            raise ValueError(f"{count} blocks requested, {self.cached} cached")
        return self._popped(count, FOR_PREFILL)

    def forget(self, blocks: Sequence[int]) -> None:
        """Record blocks that have lost their content otherwise.

        A block in use must not be passed to `end` any more, but must still be released here: other blocks may
        continue it.
        """
        _forget(self.core, np.array(blocks, np.int32))

    def reset(self) -> list[int]:
        """Evict all held blocks and return them."""
        return self._popped(self.cached, BY_RESET)

    # -- what may be read ----------------------------------------------------------------------------------

    @property
    def cached(self) -> int:
        """Blocks held here."""
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
        """Return the held blocks: spare blocks first, then in order of release; O(pool)."""
        here = np.flatnonzero(self.core.refs == 0)
        age = (int(self._counts.clock[0]) - self.core.stamp[here]) & CLOCK_MASK
        spare = self.core.kind[here] & CLASS_MASK == SPARE
        found: list[int] = here[np.lexsort((-age, ~spare))].tolist()
        return found

    def _popped(self, count: int, cause: int) -> list[int]:
        _pop(self.core, count, cause, self._out)
        found: list[int] = self._out[:count].tolist()
        return found

    def _enter(self, hashes: UInt64Array, blocks: Sequence[int]) -> int:
        count, held = min(len(hashes), self._room), min(len(blocks), self._room)
        self.core.hashes[0, :count] = hashes[:count]
        self.core.tables[0, 0, :held] = blocks[:held]
        return count


@compiled
def _start(core: Core, hit: int, tokens: int) -> int:
    core.rows[0].length = min(tokens, core.hashes.shape[1] * core.pool[0].block_size)
    observe_start(core, 0, hit)
    choose_rule(core)
    return int(core.rows[0].turn)


@compiled
def _end(core: Core, count: int, prompt: int, tokens: int, turn: int, classes: Int32Array) -> None:
    row = core.rows[0]
    _publish(core, count, np.uint64(0))
    row.published, row.length, row.turn, row.request = count, tokens, turn, 0
    core.requests[0].prompt = prompt
    observe_end(core, 0)
    for at in range(count):
        classes[at] = core.kind[core.tables[0, 0, at]] & CLASS_MASK


@compiled
def _follow(
    core: Core, count: int, block_size: int, ended: int, key: np.uint64, full: bool, classes: Int32Array
) -> None:
    if full:
        _publish(core, count, key)
    if ended == 0:
        return
    for at in range(count):
        block = core.tables[0, 0, at]
        if block != NULL_BLOCK:
            place = min(((at + 1) * block_size - 1) // core.pool[0].block_size, ended - 1)
            core.kind[block] = (core.kind[block] & ~CLASS_MASK) | classes[place]


# -- nodes -------------------------------------------------------------------------------------------------


@inner
def _publish(core: Core, count: int, key: np.uint64) -> None:
    """Create nodes for the row's blocks, which are in use; replace blocks in the table by existing nodes."""
    table, parent = core.tables[0, 0], ROOT
    for at in range(count):
        mine = int(table[at])
        if mine == NULL_BLOCK:
            parent = ROOT
            continue
        value = core.hashes[0, at] ^ key
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
def _bucket(core: Core, value: np.uint64) -> int:
    return int(value & np.uint64(core.heads.size - 1))


@inlined
def _find(core: Core, value: np.uint64) -> int:
    """Return the node with this hash, or 0.

    A collision costs at most a hit, because the pool itself decides which blocks to serve.
    """
    node = int(core.heads[_bucket(core, value)])
    while node != NULL_BLOCK and core.node_hash[node] != value:
        node = int(core.chain[node])
    return node


@inner
def _insert(core: Core, block: int, parent: int, value: np.uint64) -> None:
    core.node_of[block], core.node_hash[block], core.kind[block] = block, value, 0
    bucket = _bucket(core, value)
    core.chain[block] = core.heads[bucket]
    core.heads[bucket] = block
    core.pool[0].nodes += 1
    _link(core, block, parent)


@inner
def _link(core: Core, node: int, parent: int) -> None:
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
def _unhash(core: Core, node: int) -> None:
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
def _drop(core: Core, node: int) -> None:
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
def _cut(core: Core) -> None:
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
def _release(core: Core, blocks: Int32Array) -> None:
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
def _leave(core: Core, block: int) -> None:
    """Remove a held block, listed or with children, from the order."""
    unlink(core, block)
    core.refs[block], core.stamp[block] = 1, 0
    if core.kind[block] & CLASS_MASK == SPARE:
        core.kind[block] = 0


@compiled
def _take(core: Core, blocks: Int32Array) -> None:
    for block in blocks:
        if core.refs[block] == 0:
            _leave(core, block)


@compiled
def _pop(core: Core, count: int, cause: int, out: Int32Array) -> None:
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
def _forget(core: Core, blocks: Int32Array) -> None:
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
