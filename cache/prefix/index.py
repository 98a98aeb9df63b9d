"""The prefix index: which cached or used blocks hold which tokens. Four verbs: match, insert, lock, evict.

One *node* is one full block of tokens after one given prefix. Its content sits in one block of each group, so
the node is named by its block in the *anchor* group (the first full group): no second kind of id. A node stores
its tokens, its parent node, the id of its salt and the hash that finds it. The hash runs along the chain, each
block's seeded by its parent's, the first block's by its salt's.

**A collision cannot serve a wrong block.** The hash only proposes a node. It is taken when its parent is the
node matched just before, its salt is the request's and its tokens are equal; by induction from the root the
whole prefix is then equal, whatever the hash function does. Nodes with equal hashes live side by side.

**Salts.** Blocks of different salts are never shared, except those of a prefix on the allow-list (a system
prompt that the operator has published): its whole blocks belong to salt 0, and a tenant's own salt enters the
chain behind them.

**What a hit needs.** Full groups: every block of the prefix. A sliding group: only the blocks that queries
after the prefix can still read, i.e. its last window; the longest prefix for which all groups have theirs is
the hit.

**No cached child without its parent.** Laws, kept by the manager and checked in `invariants`: (1) whoever holds
a node's full-group block in its table holds those of all its ancestors (duplicates are merged when they are
published, so that the chain is the same one), so a cached node has no child in use; (2) nodes count their
children, and one with children is in no list that eviction takes from. Eviction of a full-group block drops the
node with its blocks in all groups; a sliding block goes alone.

A layout without any full group has no anchor: its tables drop the start of the chain, and the prefix cache is
off.
"""

from __future__ import annotations

import numpy as np

from tonnage.cache.blocks.pool import acquire, enlist, release, uncache
from tonnage.cache.blocks.state import (
    ANCHOR,
    BLOCK_SIZE,
    BY_RESET,
    CHAIN,
    CLASS_MASK,
    CLASSES,
    COMPUTED,
    EVICTIONS,
    FIRST,
    FIRST_GROUP,
    FREE,
    GROUPS,
    HASHED,
    HELD,
    KIND,
    LIVE,
    LOGGED,
    MERGED,
    NEXT,
    NODE_OF,
    NODES,
    NULL_BLOCK,
    ONE_CHILD,
    PARENT,
    PREV,
    PUBLISHED,
    REFS,
    REMOVED,
    REQUEST,
    ROOT,
    ROW_SALT,
    RULE,
    SALT,
    SHARED,
    STORED,
    Core,
    Int32Array,
    State,
)
from tonnage.cache.compiled import compiled, inlined
from tonnage.cache.eviction.choice import LEARNED, OLDEST, RUN, YOUNGEST, age_of, choose_list
from tonnage.cache.prefix.hashing import hash_tokens


@compiled
def hash_row(core: Core, row: int, blocks: int) -> None:
    """Hashes of the row's first ``blocks`` full blocks; what has been hashed before stays."""
    rows, size = core.rows, core.constants[BLOCK_SIZE]
    at, hashes, tokens = rows[HASHED, row], core.hashes[row], core.tokens[row]
    shared, own = rows[SHARED, row], core.seeds[rows[ROW_SALT, row]]
    while at < blocks:
        if at == 0:
            seed = core.seeds[0] if shared > 0 else own
        elif at == shared:
            seed = hashes[at - 1] ^ own
        else:
            seed = hashes[at - 1]
        hashes[at] = hash_tokens(tokens, at * size, size, seed)
        at += 1
    rows[HASHED, row] = max(rows[HASHED, row], at)


@inlined
def find(core: Core, row: int, at: int, parent: int) -> int:
    """The node of the row's block ``at`` below ``parent``, or 0. Exact."""
    blocks, rows, size = core.blocks, core.rows, core.constants[BLOCK_SIZE]
    value = core.hashes[row, at]
    salt = 0 if at < rows[SHARED, row] else rows[ROW_SALT, row]
    node = int(core.heads[value & np.uint64(core.heads.size - 1)])
    while node != NULL_BLOCK:
        if core.node_hash[node] == value and blocks[PARENT, node] == parent and blocks[SALT, node] == salt:
            offset, equal = at * size, True
            for token in range(size):
                if core.node_tokens[node, token] != core.tokens[row, offset + token]:
                    equal = False
                    break
            if equal:
                return node
        node = int(blocks[CHAIN, node])
    return NULL_BLOCK


@compiled
def match(core: Core, row: int, blocks: int) -> int:
    """How many of the row's first ``blocks`` blocks are cached in every group; their nodes go into the row of
    the anchor group's table, which must be empty there."""
    table = core.tables[core.constants[ANCHOR], row]
    found, parent = 0, ROOT
    while found < blocks:
        node = find(core, row, found, parent)
        if node == NULL_BLOCK:
            break
        table[found] = node
        parent = node
        found += 1
    count = found
    while count > 0:  # a sliding group may lack blocks of the last window: the hit ends before them
        missing = -1
        for group in range(core.constants[GROUPS]):
            if core.windows[group] != 0:
                first = first_needed(core.windows[group], count * core.constants[BLOCK_SIZE], core)
                for at in range(count - 1, first - 1, -1):
                    if core.blocks[FIRST_GROUP + group, table[at]] == NULL_BLOCK:
                        missing = max(missing, at)
                        break
        if missing < 0:
            break
        count = missing
    for at in range(count, found):
        table[at] = NULL_BLOCK
    return count


@compiled
def first_needed(window: int, computed: int, core: Core) -> int:
    """Index of the first block that a query at a position >= ``computed`` can still read (0 for full)."""
    if window < 0:
        return computed // -window * -window // int(core.constants[BLOCK_SIZE])
    if window == 0 or computed < window:
        return 0
    return (computed - window + 1) // int(core.constants[BLOCK_SIZE])


@compiled
def lock(core: Core, row: int, count: int) -> None:
    """Take a reference to the blocks of the ``count`` nodes that `match` left in the row. Blocks a sliding
    window has left are the null block."""
    rows, anchor = core.rows, core.constants[ANCHOR]
    slot, computed = rows[REQUEST, row], count * core.constants[BLOCK_SIZE]
    for group in range(core.constants[GROUPS]):
        full = core.windows[group] == 0
        first = first_needed(core.windows[group], computed, core)
        core.rows[FIRST + group, row] = first
        for at in range(first, count):
            block = core.blocks[FIRST_GROUP + group, core.tables[anchor, row, at]]
            acquire(core, block, full, slot)
            if full:
                core.requests[HELD, slot] += 1
            if group != anchor:
                core.tables[group, row, at] = block


@inlined
def insert(core: Core, row: int, at: int, parent: int) -> None:
    """Publish the row's used block ``at`` as a node below ``parent``; `find` found none."""
    blocks, rows, size = core.blocks, core.rows, core.constants[BLOCK_SIZE]
    node = core.tables[core.constants[ANCHOR], row, at]
    value = core.hashes[row, at]
    for token in range(size):
        core.node_tokens[node, token] = core.tokens[row, at * size + token]
    blocks[PARENT, node] = parent
    core.node_hash[node] = value
    salt = 0 if at < rows[SHARED, row] else rows[ROW_SALT, row]
    blocks[SALT, node] = salt
    core.salt_nodes[salt] += 1
    blocks[KIND, node] = 0  # its class is given when the request ends
    if parent != ROOT:
        blocks[KIND, parent] += ONE_CHILD
    bucket = value & np.uint64(core.heads.size - 1)
    blocks[CHAIN, node] = core.heads[bucket]
    core.heads[bucket] = node
    for group in range(core.constants[GROUPS]):
        block = core.tables[group, row, at]
        core.blocks[FIRST_GROUP + group, node] = block
        if block != NULL_BLOCK:
            blocks[NODE_OF, block] = node
    core.counters[NODES] += 1
    if core.constants[LOGGED]:
        core.stored[core.counters[STORED]] = node
        core.counters[STORED] += 1


@compiled
def merge(core: Core, row: int, at: int, node: int, shared_by_sibling: bool) -> None:
    """The row has computed what ``node`` holds already: use the node's blocks and give back the row's own."""
    blocks, slot = core.blocks, core.rows[REQUEST, row]
    for group in range(core.constants[GROUPS]):
        full = core.windows[group] == 0
        mine, theirs = core.tables[group, row, at], core.blocks[FIRST_GROUP + group, node]
        if mine == NULL_BLOCK or mine == theirs:  # noqa: SIM109 (numba wants one type in a tuple)
            continue
        if theirs == NULL_BLOCK:  # a sliding block that had been evicted alone
            core.blocks[FIRST_GROUP + group, node] = mine
            blocks[NODE_OF, mine] = node
            continue
        acquire(core, theirs, full, slot)
        release(core, mine, full, slot)
        core.tables[group, row, at] = theirs
        if full and shared_by_sibling:
            core.requests[HELD, slot] -= 1
        core.counters[MERGED] += 1


@compiled
def publish(core: Core, row: int) -> None:
    """Make nodes of the row's full computed blocks; where others have published the same, take theirs.

    The chain of every sequence is then the index's chain, which is what lets eviction never orphan a node.
    """
    rows, anchor = core.rows, core.constants[ANCHOR]
    table, slot = core.tables[anchor, row], rows[REQUEST, row]
    stop = rows[COMPUTED, row] // core.constants[BLOCK_SIZE]
    hash_row(core, row, stop)
    known = True  # the parent was there before this call: it may have children
    for at in range(rows[PUBLISHED, row], stop):
        parent = table[at - 1] if at > 0 else ROOT
        node = find(core, row, at, parent) if known else NULL_BLOCK
        if node == NULL_BLOCK:
            insert(core, row, at, parent)
            known = False
        elif node != table[at]:
            sibling = False
            if core.requests[LIVE, slot] > 1:
                for other in range(rows.shape[1]):
                    if other != row and rows[REQUEST, other] == slot and core.tables[anchor, other, at] == node:
                        sibling = True
            merge(core, row, at, node, sibling)
    rows[PUBLISHED, row] = stop


@compiled
def evict(core: Core, count: int, cause: int) -> None:
    """Turn at least ``count`` cached blocks into free ones. ``cause``: an entry of EVICTION_CAUSES."""
    counters = core.counters
    goal = counters[FREE] + count
    size = core.blocks.shape[1] - CLASSES
    while counters[FREE] < goal:
        kind, end = choose_list(core)
        left = RUN if counters[RULE] == LEARNED else 1
        while left > 0 and counters[FREE] < goal:
            block = core.blocks[NEXT if end == OLDEST else PREV, size + kind]
            if block >= size:
                break
            _forget(core, block)
            counters[EVICTIONS + cause] += 1
            left -= 1


@inlined
def _forget(core: Core, block: int) -> None:
    blocks = core.blocks
    node = blocks[NODE_OF, block]
    if block != node:
        for group in range(core.constants[GROUPS]):
            if core.blocks[FIRST_GROUP + group, node] == block and core.windows[group] != 0:
                core.blocks[FIRST_GROUP + group, node] = NULL_BLOCK
                blocks[NODE_OF, block] = NULL_BLOCK
                uncache(core, block)
                return
    value = core.node_hash[node]
    bucket = value & np.uint64(core.heads.size - 1)
    if core.heads[bucket] == node:
        core.heads[bucket] = blocks[CHAIN, node]
    else:
        before = core.heads[bucket]
        while blocks[CHAIN, before] != node:
            before = blocks[CHAIN, before]
        blocks[CHAIN, before] = blocks[CHAIN, node]
    for group in range(core.constants[GROUPS]):
        held = core.blocks[FIRST_GROUP + group, node]
        if held != NULL_BLOCK:
            core.blocks[FIRST_GROUP + group, node] = NULL_BLOCK
            blocks[NODE_OF, held] = NULL_BLOCK
            uncache(core, held)
    blocks[CHAIN, node] = NULL_BLOCK
    parent = blocks[PARENT, node]
    if parent != ROOT:
        blocks[KIND, parent] -= ONE_CHILD
        if blocks[KIND, parent] < ONE_CHILD and blocks[REFS, parent] == 0:
            _enlist_by_age(core, parent)
    core.salt_nodes[blocks[SALT, node]] -= 1
    core.counters[NODES] -= 1
    if core.constants[LOGGED]:
        core.removed[core.counters[REMOVED]] = value
        core.counters[REMOVED] += 1


@inlined
def _enlist_by_age(core: Core, node: int) -> None:
    """The node's last child has gone: to the end of its list that its age is nearer."""
    blocks = core.blocks
    size = blocks.shape[1] - CLASSES
    oldest = blocks[NEXT, size + (blocks[KIND, node] & CLASS_MASK)]
    older = oldest >= size or age_of(core, node) >= age_of(core, oldest)
    enlist(core, node, node, OLDEST if older else YOUNGEST)


class PrefixIndex:
    """What may be read of the index: for events, tests and checks."""

    def __init__(self, state: State) -> None:
        self.state = state

    def __len__(self) -> int:
        return int(self.state.pool.counters[NODES])

    def nodes(self) -> Int32Array:
        """All nodes, ordered by their block. O(pool): for checks."""
        node_of = self.state.index.node_of
        own = node_of == np.arange(len(node_of), dtype=np.int32)
        own[NULL_BLOCK] = False
        nodes: Int32Array = np.flatnonzero(own).astype(np.int32)
        return nodes

    def bucket(self, value: int) -> list[int]:
        """Nodes of the bucket of a hash, newest first: for checks."""
        index = self.state.index
        node = int(index.heads[value & (index.heads.size - 1)])
        found: list[int] = []
        while node != NULL_BLOCK and len(found) <= index.chain.size:
            found.append(node)
            node = int(index.chain[node])
        return found

    def evict(self, count: int) -> None:
        """`evict`, to forget everything or for tests; ``count`` blocks must be cached."""
        evict(self.state.core, count, BY_RESET)
