"""Compiled checks of the block manager's invariants that need only its arrays, cheap enough for production.

One pass over blocks and tables finds a broken invariant and its place. tests/helpers/invariants.py lists all
invariants and checks them after every operation of a test. A running server can afford only the checks here.
"""

from __future__ import annotations

import numpy as np

from tonnage.cache.blocks.groups import ALIGNED, FULL, MOST_STATES, STATE
from tonnage.cache.blocks.state import (
    COPY_TAIL,
    DROP_SOURCE,
    NULL_BLOCK,
    ONE_CHILD,
    ROOT,
    Core,
    Int32Array,
)
from tonnage.cache.compiled import compiled, inner
from tonnage.cache.eviction.model import CLASSES
from tonnage.cache.groups import windows

LAWS = (
    "",
    "conservation",
    "null block",
    "reference counts",
    "tables",
    "exclusive writes",
    "prefix index",
    "reachability",
    "reservation",
)
HOLD, CONSERVATION, NULL, REFERENCES, TABLES, WRITES, INDEX, REACH, RESERVATION = range(9)
_FREE_STATE, _CACHED_STATE, _LISTED_STATE = 1, 2, 3


def first_broken(core: Core) -> tuple[str, int] | None:
    """Return the name of the first broken invariant with the block or row it concerns, or None if all hold."""
    counts, states = np.zeros((2, core.refs.size), np.int32)
    law, at = broken_law(core, counts, states, np.zeros(core.requests.size, np.int32))
    return (LAWS[law], int(at)) if law else None


@compiled
def broken_law(core: Core, counts: Int32Array, states: Int32Array, owned: Int32Array) -> tuple[int, int]:
    """Return the index in LAWS of the first broken invariant, and its block or row; (0, 0) if all hold.

    ``counts`` and ``states`` [blocks] and ``owned`` [slots] are scratch arrays of zeros.
    """
    pool = core.pool[0]
    code, at = _tables(core, counts, states)
    if code == HOLD:
        code, at = _states(core, counts, states, owned)
    if code == HOLD and pool.caching:
        counts[:] = 0
        code, at = _nodes(core, counts, states)
    return code, at


@inner
def _tables(core: Core, counts: Int32Array, places: Int32Array) -> tuple[int, int]:
    """Check the block tables, and count in ``counts`` the references to each block; ``places`` is scratch."""
    pool, size = core.pool[0], core.pool[0].block_size
    for at_row in range(core.rows.size):
        row = core.rows[at_row]
        if row.request < 0:
            if row.room != 0:
                return TABLES, at_row
            continue
        ordered = row.computed <= row.slots <= row.room
        if not ordered or row.slots > row.limit:
            return TABLES, at_row
        if pool.caching and row.published != row.computed // size:
            return INDEX, at_row
        for group in range(pool.num_groups):
            table, first = core.tables[group, at_row], core.first[group, at_row]
            held, gaps = _held(core, group, row.room), core.groups[group].kind == ALIGNED
            if first > windows.first_needed(core, group, row.computed):
                return TABLES, at_row
            for at in range(held):
                block = table[at]
                if (block == NULL_BLOCK) != (at < first) and not (gaps and block == NULL_BLOCK):
                    return TABLES, at_row
                counts[block] += 1
                place = 1 + group * table.size + at
                if block != NULL_BLOCK and places[block] != 0 and places[block] != place:
                    return TABLES, at_row
                places[block] = place
            if gaps and not _states_in_place(core, group, at_row, held):
                return TABLES, at_row
            if held < table.size and table[held] != NULL_BLOCK:
                return TABLES, at_row
    counts[NULL_BLOCK] = 0
    places[:] = 0
    for at_row in range(core.rows.size):
        row = core.rows[at_row]
        if row.request < 0:
            continue
        to_copy = row.shared_tail & COPY_TAIL and row.slots <= row.computed
        for group in range(pool.num_groups):
            start = 0 if core.groups[group].kind == STATE else row.computed // size
            for at in range(start, _held(core, group, row.room)):
                if counts[core.tables[group, at_row, at]] > 1 and not to_copy:
                    return WRITES, at_row
    if core.refs[NULL_BLOCK] != 0 or core.node_of[NULL_BLOCK] != 0:
        return NULL, 0
    for block in range(1, pool.num_blocks):
        if core.refs[block] != counts[block]:
            return REFERENCES, block
    return HOLD, 0


@inner
def _states_in_place(core: Core, group: int, at_row: int, held: int) -> bool:
    """Return whether a sequence's row has its cached recurrent states at the right block-table entries.

    A row has the state it continues from and the state it writes, and at most one more that the next step
    releases.
    """
    row, table = core.rows[at_row], core.tables[group, at_row]
    if held == 0:
        return True
    named = 0
    for at in range(held):
        if table[at] != NULL_BLOCK:
            named += 1
    if named > MOST_STATES or (named == MOST_STATES and row.shared_tail & DROP_SOURCE == 0):
        return False
    if row.computed > 0 and table[(row.computed - 1) // core.pool[0].block_size] == NULL_BLOCK:
        return False
    return bool(table[held - 1] != NULL_BLOCK)


@inner
def _held(core: Core, group: int, room: int) -> int:
    """Return how many block-table entries ``room`` positions fill in a KV cache group."""
    blocks = int(room // core.pool[0].block_size)
    return min(1, blocks) if core.groups[group].kind == STATE else blocks


@inner
def _states(core: Core, counts: Int32Array, states: Int32Array, owned: Int32Array) -> tuple[int, int]:
    pool = core.pool[0]
    size = pool.num_blocks
    block, free = int(pool.free_head), 0
    while block != NULL_BLOCK:
        if free == size or block >= size or states[block] != 0:
            return CONSERVATION, block
        states[block] = _FREE_STATE
        free += 1
        block = int(core.next[block])
    for kind in range(CLASSES):
        before, block = size + kind, int(core.next[size + kind])
        if (block < size) != ((pool.lists >> kind) & 1 == 1):
            return CONSERVATION, block
        while block < size:
            if block == NULL_BLOCK or states[block] != 0 or core.prev[block] != before:
                return CONSERVATION, block
            states[block] = _LISTED_STATE
            before, block = block, int(core.next[block])
        if block != size + kind or core.prev[block] != before:
            return CONSERVATION, block
    cached = 0
    for block in range(1, size):
        if states[block] == _LISTED_STATE:
            cached += 1
        elif core.refs[block] == 0 and core.node_of[block] != NULL_BLOCK:
            cached += 1
            if states[block] == 0:
                if core.next[block] != NULL_BLOCK:
                    return CONSERVATION, block
                states[block] = _CACHED_STATE
    if free != pool.free or cached != pool.cached:
        return CONSERVATION, 0
    used_full = 0
    for block in range(1, size):
        if (counts[block] > 0) == (states[block] != 0):
            return CONSERVATION, block
        if states[block] >= _CACHED_STATE and core.node_of[block] == NULL_BLOCK:
            return REACH, block
        if states[block] == _FREE_STATE and core.node_of[block] != NULL_BLOCK:
            return INDEX, block
        if counts[block] > 0 and core.stamp[block] != 0:
            owned[core.stamp[block] - 1] += 1
    # count each block of a full-attention group once, at the first row that has the block
    for row in range(core.rows.size):
        if core.rows[row].request < 0:
            continue
        for group in range(pool.num_groups):
            if core.groups[group].kind != FULL:
                continue
            for at in range(core.rows[row].room // pool.block_size):
                block = core.tables[group, row, at]
                if counts[block] > 0:
                    used_full += 1
                    counts[block] = 0
    if used_full != pool.used_full:
        return RESERVATION, 0
    for slot in range(core.requests.size):
        if owned[slot] != core.requests[slot].private:
            return RESERVATION, slot
        if not core.requests[slot].private <= core.requests[slot].held <= core.requests[slot].reserved:
            return RESERVATION, slot
    return HOLD, 0


@inner
def _nodes(core: Core, counts: Int32Array, states: Int32Array) -> tuple[int, int]:
    """Check the nodes of the prefix index.

    ``counts`` [blocks], zeros at the call, receives the number of children of each node.
    """
    pool = core.pool[0]
    anchor, nodes, size = pool.anchor, 0, pool.num_blocks
    for node in range(1, size):
        if core.node_of[node] != node:
            continue
        nodes += 1
        if core.node_blocks[anchor, node] != node:
            return INDEX, node
        parent = core.parent[node]
        if parent == ROOT:
            continue
        if core.node_of[parent] != parent:
            return REACH, node
        if core.refs[parent] == 0 and core.refs[node] > 0:
            return REACH, node
        counts[parent] += 1
    if nodes != pool.nodes:
        return INDEX, 0
    for block in range(1, size):
        node = core.node_of[block]
        if node == NULL_BLOCK:
            continue
        if block == node and core.kind[node] // ONE_CHILD != counts[node]:
            return REACH, node
        if core.refs[block] > 0:
            continue
        sliding = False
        for group in range(pool.num_groups):
            if core.groups[group].kind != FULL and core.node_blocks[group, node] == block:
                sliding = True
        if (states[block] == _LISTED_STATE) != (sliding or (block == node and counts[node] == 0)):
            return REACH, block
    return HOLD, 0
