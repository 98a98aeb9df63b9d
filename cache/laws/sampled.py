"""The laws of `tonnage.cache.laws.invariants` about the arrays, compiled: cheap enough to sample in production.

One pass over blocks and tables. It answers with a number and a place; the slow check in `invariants`, written
independently of it, says what is wrong.
"""

from __future__ import annotations

from tonnage.cache.blocks.state import (
    ANCHOR,
    BLOCK_SIZE,
    CACHED,
    CACHING,
    CLASSES,
    COMPUTED,
    FIRST,
    FIRST_GROUP,
    FREE,
    FREE_HEAD,
    GROUPS,
    HELD,
    KIND,
    LIMIT,
    LISTS,
    NEXT,
    NODE_OF,
    NODES,
    NULL_BLOCK,
    ONE_CHILD,
    OWNER,
    PARENT,
    PREV,
    PRIVATE,
    PUBLISHED,
    REFS,
    REQUEST,
    RESERVED,
    ROOM,
    ROOT,
    SHARED_TAIL,
    SLOTS,
    STATES,
    USED_FULL,
    Core,
    Int32Array,
)
from tonnage.cache.compiled import compiled

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


@compiled
def broken_law(core: Core, counts: Int32Array, states: Int32Array, owned: Int32Array) -> tuple[int, int]:
    """(law, block or row) of the first broken law, (0, 0) when all hold. ``counts`` and ``states`` [blocks],
    ``owned`` [slots]: scratch, zero before."""
    code, at = _tables(core, counts)
    if code == HOLD:
        code, at = _states(core, counts, states, owned)
    if code == HOLD and core.constants[CACHING]:
        counts[:] = 0
        code, at = _nodes(core, counts, states)
    return code, at


@compiled
def _tables(core: Core, counts: Int32Array) -> tuple[int, int]:
    rows, size = core.rows, core.constants[BLOCK_SIZE]
    for row in range(rows.shape[1]):
        if rows[REQUEST, row] < 0:
            if rows[ROOM, row] != 0:
                return TABLES, row
            continue
        ordered = rows[COMPUTED, row] <= rows[SLOTS, row] <= rows[ROOM, row]
        if not ordered or rows[SLOTS, row] > rows[LIMIT, row]:
            return TABLES, row
        if core.constants[CACHING] and rows[PUBLISHED, row] != rows[COMPUTED, row] // size:
            return INDEX, row
        held = rows[ROOM, row] // size
        for group in range(core.constants[GROUPS]):
            table = core.tables[group, row]
            first = rows[FIRST + group, row]
            for at in range(held):
                block = table[at]
                if (block == NULL_BLOCK) != (at < first):
                    return TABLES, row
                counts[block] += 1
            if held < table.size and table[held] != NULL_BLOCK:
                return TABLES, row
        for at in range(core.constants[STATES]):
            block = core.states[at, row]
            if (block == NULL_BLOCK) != (held == 0):
                return TABLES, row
            counts[block] += 1
    for row in range(rows.shape[1]):
        if rows[REQUEST, row] < 0:
            continue
        to_copy = rows[SHARED_TAIL, row] != 0 and rows[SLOTS, row] <= rows[COMPUTED, row]
        for group in range(core.constants[GROUPS]):
            for at in range(rows[COMPUTED, row] // size, rows[ROOM, row] // size):
                if counts[core.tables[group, row, at]] > 1 and not to_copy:
                    return WRITES, row
        for at in range(core.constants[STATES]):
            block = core.states[at, row]
            if block != NULL_BLOCK and counts[block] > 1 and not to_copy:
                return WRITES, row
    counts[NULL_BLOCK] = 0
    return HOLD, 0


@compiled
def _states(core: Core, counts: Int32Array, states: Int32Array, owned: Int32Array) -> tuple[int, int]:
    blocks, counters, requests = core.blocks, core.counters, core.requests
    size = blocks.shape[1] - CLASSES
    block, free = int(counters[FREE_HEAD]), 0
    while block != NULL_BLOCK:
        if free == size or block >= size or states[block] != 0:
            return CONSERVATION, block
        states[block] = _FREE_STATE
        free += 1
        block = int(blocks[NEXT, block])
    for kind in range(CLASSES):
        before, block = size + kind, int(blocks[NEXT, size + kind])
        if (block < size) != ((counters[LISTS] >> kind) & 1 == 1):
            return CONSERVATION, block
        while block < size:
            if block == NULL_BLOCK or states[block] != 0 or blocks[PREV, block] != before:
                return CONSERVATION, block
            states[block] = _LISTED_STATE
            before, block = block, int(blocks[NEXT, block])
        if block != size + kind or blocks[PREV, block] != before:
            return CONSERVATION, block
    cached = 0
    for block in range(1, size):
        if states[block] == _LISTED_STATE:
            cached += 1
        elif blocks[REFS, block] == 0 and blocks[NODE_OF, block] != NULL_BLOCK:
            cached += 1
            if states[block] == 0:
                if blocks[NEXT, block] != NULL_BLOCK:
                    return CONSERVATION, block
                states[block] = _CACHED_STATE
    if free != counters[FREE] or cached != counters[CACHED]:
        return CONSERVATION, 0
    used_full = 0
    if blocks[REFS, NULL_BLOCK] != 0 or blocks[NODE_OF, NULL_BLOCK] != 0:
        return NULL, 0
    for block in range(1, size):
        if blocks[REFS, block] != counts[block]:
            return REFERENCES, block
        if (counts[block] > 0) == (states[block] != 0):
            return CONSERVATION, block
        if states[block] >= _CACHED_STATE and blocks[NODE_OF, block] == NULL_BLOCK:
            return REACH, block
        if states[block] == _FREE_STATE and blocks[NODE_OF, block] != NULL_BLOCK:
            return INDEX, block
        if counts[block] > 0 and blocks[OWNER, block] != 0:
            owned[blocks[OWNER, block] - 1] += 1
    for row in range(core.rows.shape[1]):  # count each block of a full group once, at its first row
        if core.rows[REQUEST, row] < 0:
            continue
        for group in range(core.constants[GROUPS]):
            if core.windows[group] != 0:
                continue
            for at in range(core.rows[ROOM, row] // core.constants[BLOCK_SIZE]):
                block = core.tables[group, row, at]
                if counts[block] > 0:
                    used_full += 1
                    counts[block] = 0
    if used_full != counters[USED_FULL]:
        return RESERVATION, 0
    for slot in range(requests.shape[1]):
        if owned[slot] != requests[PRIVATE, slot]:
            return RESERVATION, slot
        if not requests[PRIVATE, slot] <= requests[HELD, slot] <= requests[RESERVED, slot]:
            return RESERVATION, slot
    return HOLD, 0


@compiled
def _nodes(core: Core, counts: Int32Array, states: Int32Array) -> tuple[int, int]:
    """``counts`` [blocks]: all zero, becomes the children of each node."""
    blocks, anchor, nodes = core.blocks, core.constants[ANCHOR], 0
    size = blocks.shape[1] - CLASSES
    for node in range(1, size):
        if blocks[NODE_OF, node] != node:
            continue
        nodes += 1
        if blocks[FIRST_GROUP + anchor, node] != node:
            return INDEX, node
        parent = blocks[PARENT, node]
        if parent == ROOT:
            continue
        if blocks[NODE_OF, parent] != parent:
            return REACH, node
        if blocks[REFS, parent] == 0 and blocks[REFS, node] > 0:
            return REACH, node
        counts[parent] += 1
    if nodes != core.counters[NODES]:
        return INDEX, 0
    for block in range(1, size):
        node = blocks[NODE_OF, block]
        if node == NULL_BLOCK:
            continue
        if block == node and blocks[KIND, node] // ONE_CHILD != counts[node]:
            return REACH, node
        if blocks[REFS, block] > 0:
            continue
        sliding = False
        for group in range(core.constants[GROUPS]):
            if core.windows[group] != 0 and blocks[FIRST_GROUP + group, node] == block:
                sliding = True
        if (states[block] == _LISTED_STATE) != (sliding or (block == node and counts[node] == 0)):
            return REACH, block
    return HOLD, 0
