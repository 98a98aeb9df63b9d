"""The rule for a pool that somebody else keeps, like vLLM's: which of its cached blocks goes next.

The pool says when a request begins and ends and which blocks are released, taken again and handed out; it has
its own reference counts, tables and index. Kept here is what the rule needs beside that: classes and ages of
released blocks, and which block continues which, so that a prefix outlives what hangs on it.

**Nodes** are made when a request ends, of its full blocks, and found by hash. Two requests that have computed
the same tokens at the same time may leave two blocks for them, where our own pool would have merged them: the
second is a *spare*, goes before all others, and its release counts as one of the first.

**Arrays** are those of `Core`, with one row for the request that is spoken of. ``refs`` is 0 for the blocks
that stand here and 1 for all others. Other groups of the same pool (`follow`) have nodes of their own, in the
class of the first group's block at the same place; blocks of groups with a window are none: any of them may go
alone.
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

SPARE = CLASSES  # one more list, of blocks whose content another block has too


class EvictionOrder:
    """Blocks ``1 .. num_blocks - 1`` of a pool with blocks of ``block_size`` tokens; none stands here at first.

    ``max_blocks``: of one request in one group. ``learning`` False: the longest released goes first, unless
    another continues it.
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
        unused = np.zeros((1, 1), np.int32)  # the tokens and the other blocks of nodes
        self.core = core._replace(next=links[0], prev=links[1], node_tokens=unused, node_blocks=unused)
        self.core.refs[:] = 1
        self._room = max_blocks
        self._classes = np.zeros(max_blocks, np.int32)
        self._ended = 0  # blocks of the last request that ended: entries of `_classes`
        self._out = np.zeros(num_blocks, np.int32)
        self._counts, self._model = columns(self.core.pool), columns(self.core.model)

    # -- requests --------------------------------------------------------------------------------------------

    def start(self, hashes: UInt64Array, hit: Sequence[int], tokens: int, free: int) -> int:
        """A request of ``tokens`` tokens begins: which turn of its conversation it is, for `end`.

        ``hashes`` [full blocks]; ``hit``: the blocks found, not taken yet; ``free``: blocks without content.
        """
        self._counts.free[0] = free
        count = self._enter(hashes, hit)
        return int(_start(self.core, min(count, len(hit)), tokens))

    def end(self, hashes: UInt64Array, blocks: Sequence[int], prompt: int, tokens: int, turn: int) -> None:
        """A request leaves, before its blocks are released. ``blocks``: the full ones with content, in order;
        0 where it has none. ``prompt`` of its ``tokens`` were asked."""
        self._ended = min(self._enter(hashes, blocks), len(blocks))
        _end(self.core, self._ended, prompt, tokens, turn, self._classes)

    def follow(
        self, hashes: UInt64Array, blocks: Sequence[int], block_size: int, key: int, *, full: bool
    ) -> None:
        """Blocks of another group of the request just named to `end`, ``key`` telling the groups apart."""
        self._enter(hashes, blocks)
        count = min(len(blocks), self._room, len(hashes) if full else len(blocks))
        _follow(self.core, count, block_size, self._ended, np.uint64(key), full, self._classes)

    # -- blocks ----------------------------------------------------------------------------------------------

    def release(self, blocks: Sequence[int]) -> None:
        """Nobody uses the blocks any more; they stand here from now on. A request's last block first."""
        _release(self.core, np.array(blocks, np.int32))

    def take(self, blocks: Sequence[int]) -> None:
        """The blocks are used again; those that do not stand here are none of this one's business."""
        _take(self.core, np.array(blocks, np.int32))

    def pop(self, count: int) -> list[int]:
        """``count`` blocks, which lose their content. Raises ValueError where fewer stand here."""
        if count > self.cached:
            raise ValueError(f"{count} blocks are asked of {self.cached}")
        return self._popped(count, FOR_PREFILL)

    def forget(self, blocks: Sequence[int]) -> None:
        """The blocks have lost their content otherwise. Those in use are not to be named to `end` any more, but
        released here: others may continue them."""
        _forget(self.core, np.array(blocks, np.int32))

    def reset(self) -> list[int]:
        """All that stand here, which lose their content."""
        return self._popped(self.cached, BY_RESET)

    # -- what may be read ------------------------------------------------------------------------------------

    @property
    def cached(self) -> int:
        """Blocks that stand here."""
        return int(self._counts.cached[0])

    @property
    def evicted(self) -> int:
        """Blocks handed out with content that nothing else has."""
        return int(self._counts.evicted[0, :BY_RESET].sum())

    @property
    def learned(self) -> bool:
        """Whether the rule is the learned one now, and not LRU."""
        return bool(self._model.rule[0] == LEARNED)

    def blocks(self) -> list[int]:
        """Those that stand here, the spare ones, then by their release; O(pool)."""
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


# -- nodes -----------------------------------------------------------------------------------------------------


@inner
def _publish(core: Core, count: int, key: np.uint64) -> None:
    """Nodes of the row's blocks, which are in use; in the table the blocks of the nodes that were there."""
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
            elif core.kind[mine] < ONE_CHILD:  # its content is another now
                _drop(core, mine)
                _insert(core, mine, parent, value)
        elif core.parent[node] == ROOT:  # what it continues had gone before it
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
    """The node of this hash, or 0. A collision costs a hit at most: the pool itself decides what it serves."""
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
    """``node`` continues ``parent``."""
    core.parent[node] = parent
    if parent == ROOT:
        return
    if core.refs[parent] == 0 and core.kind[parent] < ONE_CHILD:  # it waits for its child
        unlink(core, parent)
        core.next[parent] = NULL_BLOCK
        core.pool[0].cached += 1
    core.kind[parent] += ONE_CHILD


@inner
def _unhash(core: Core, node: int) -> None:
    """No longer found, if it was."""
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
    """A node without children is none any more."""
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
    """What is in use continues nothing that stands here any more: all that do wait for one another. O(pool).

    A request may hold a node and, in place of the one before it, a block of its own with the same content.
    """
    for node in range(1, core.pool[0].num_blocks):
        parent = int(core.parent[node])
        if core.node_of[node] != node or core.refs[node] == 0 or parent == ROOT or core.refs[parent] != 0:
            continue
        core.parent[node] = ROOT
        core.kind[parent] -= ONE_CHILD
        if core.kind[parent] < ONE_CHILD:
            enlist_by_age(core, parent)


# -- blocks ----------------------------------------------------------------------------------------------------


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
    """A listed block, or one that waits for its children, stands here no more."""
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
    """``count`` blocks, at most those that stand here, into ``out``."""
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
