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
published, so that the chain is the same one); (2) tables are released tail first; (3) a hot node's parent is
hot. So when a child becomes unreferenced its parent is still referenced or released right after it: in the
list of one class every child is older than its parent. `tonnage.cache.eviction` says why choosing between the
two lists by age orphans nothing either. Eviction of a full-group block drops the node with its blocks in all
groups; a sliding block goes alone.

A layout without any full group has no anchor: its tables drop the start of the chain, and the prefix cache is
off.
"""

from __future__ import annotations

import numpy as np

from tonnage.cache.compiled import compiled
from tonnage.cache.eviction import oldest_to_evict
from tonnage.cache.hashing import hash_tokens
from tonnage.cache.pool import acquire, release, uncache
from tonnage.cache.state import (
    ANCHOR,
    BLOCK_SIZE,
    COLD,
    EVICTIONS,
    FREE,
    GROUPS,
    HOT,
    LOGGED,
    MERGED,
    NODES,
    NULL_BLOCK,
    REMOVED,
    ROOT,
    STORED,
    Int32Array,
    State,
)


@compiled
def hash_row(state: State, row: int, blocks: int) -> None:
    """Hashes of the row's first ``blocks`` full blocks; what has been hashed before stays."""
    rows, size = state.rows, state.constants[BLOCK_SIZE]
    at, hashes, tokens = rows.hashed[row], rows.hashes[row], rows.tokens[row]
    shared, own = rows.shared[row], state.index.seeds[rows.salt[row]]
    while at < blocks:
        if at == 0:
            seed = state.index.seeds[0] if shared > 0 else own
        elif at == shared:
            seed = hashes[at - 1] ^ own
        else:
            seed = hashes[at - 1]
        hashes[at] = hash_tokens(tokens, at * size, size, seed)
        at += 1
    if rows.hashed[row] < at:
        rows.hashed[row] = at


@compiled
def find(state: State, row: int, at: int, parent: int) -> int:
    """The node of the row's block ``at`` below ``parent``, or 0. Exact."""
    index, rows, size = state.index, state.rows, state.constants[BLOCK_SIZE]
    value = rows.hashes[row, at]
    salt = 0 if at < rows.shared[row] else rows.salt[row]
    node = int(index.heads[value & np.uint64(index.heads.size - 1)])
    while node != NULL_BLOCK:
        if index.hash[node] == value and index.parent[node] == parent and index.salt[node] == salt:
            offset, equal = at * size, True
            for token in range(size):
                if index.tokens[node, token] != rows.tokens[row, offset + token]:
                    equal = False
                    break
            if equal:
                return node
        node = int(index.chain[node])
    return NULL_BLOCK


@compiled
def match(state: State, row: int, blocks: int) -> int:
    """How many of the row's first ``blocks`` blocks are cached in every group; their nodes go into the row of
    the anchor group's table, which must be empty there."""
    index, table = state.index, state.rows.tables[state.constants[ANCHOR], row]
    found, parent = 0, ROOT
    while found < blocks:
        node = find(state, row, found, parent)
        if node == NULL_BLOCK:
            break
        table[found] = node
        parent = node
        found += 1
    count = found
    while count > 0:  # a sliding group may lack blocks of the last window: the hit ends before them
        missing = -1
        for group in range(state.constants[GROUPS]):
            if state.windows[group] > 0:
                first = first_needed(state.windows[group], count * state.constants[BLOCK_SIZE], state)
                for at in range(count - 1, first - 1, -1):
                    if index.blocks[group, table[at]] == NULL_BLOCK:
                        missing = max(missing, at)
                        break
        if missing < 0:
            break
        count = missing
    for at in range(count, found):
        table[at] = NULL_BLOCK
    return count


@compiled
def first_needed(window: int, computed: int, state: State) -> int:
    """Index of the first block that a query at a position >= ``computed`` can still read (0 for full)."""
    if window == 0 or computed < window:
        return 0
    return (computed - window + 1) // int(state.constants[BLOCK_SIZE])


@compiled
def lock(state: State, row: int, count: int) -> None:
    """Take a reference to the blocks of the ``count`` nodes that `match` left in the row; they are hot now.
    Blocks a sliding window has left are the null block."""
    index, rows, anchor = state.index, state.rows, state.constants[ANCHOR]
    slot, computed = rows.request[row], count * state.constants[BLOCK_SIZE]
    for group in range(state.constants[GROUPS]):
        full = state.windows[group] == 0
        first = first_needed(state.windows[group], computed, state)
        rows.first[group, row] = first
        for at in range(first, count):
            block = index.blocks[group, rows.tables[anchor, row, at]]
            acquire(state, block, full, slot)
            if full:
                state.requests.held[slot] += 1
            if group != anchor:
                rows.tables[group, row, at] = block
    for at in range(count):
        index.kind[rows.tables[anchor, row, at]] = HOT


@compiled
def insert(state: State, row: int, at: int, parent: int) -> None:
    """Publish the row's used block ``at`` as a node below ``parent``; `find` found none."""
    index, rows, size = state.index, state.rows, state.constants[BLOCK_SIZE]
    node = rows.tables[state.constants[ANCHOR], row, at]
    value = rows.hashes[row, at]
    for token in range(size):
        index.tokens[node, token] = rows.tokens[row, at * size + token]
    index.parent[node] = parent
    index.hash[node] = value
    salt = 0 if at < rows.shared[row] else rows.salt[row]
    index.salt[node] = salt
    index.salt_nodes[salt] += 1
    hot = rows.kind[row] == HOT and (parent == ROOT or index.kind[parent] == HOT)
    index.kind[node] = HOT if hot else COLD
    bucket = value & np.uint64(index.heads.size - 1)
    index.chain[node] = index.heads[bucket]
    index.heads[bucket] = node
    for group in range(state.constants[GROUPS]):
        block = rows.tables[group, row, at]
        index.blocks[group, node] = block
        if block != NULL_BLOCK:
            index.node_of[block] = node
    state.pool.counters[NODES] += 1
    if state.constants[LOGGED]:
        index.stored[state.pool.counters[STORED]] = node
        state.pool.counters[STORED] += 1


@compiled
def merge(state: State, row: int, at: int, node: int, shared_by_sibling: bool) -> None:
    """The row has computed what ``node`` holds already: use the node's blocks and give back the row's own."""
    index, rows, slot = state.index, state.rows, state.rows.request[row]
    parent = index.parent[node]
    if parent == ROOT or index.kind[parent] == HOT:
        index.kind[node] = HOT
    for group in range(state.constants[GROUPS]):
        full = state.windows[group] == 0
        mine, theirs = rows.tables[group, row, at], index.blocks[group, node]
        if mine == NULL_BLOCK or mine == theirs:  # noqa: SIM109 (numba wants one type in a tuple)
            continue
        if theirs == NULL_BLOCK:  # a sliding block that had been evicted alone
            index.blocks[group, node] = mine
            index.node_of[mine] = node
            continue
        acquire(state, theirs, full, slot)
        release(state, mine, full, slot)
        rows.tables[group, row, at] = theirs
        if full and shared_by_sibling:
            state.requests.held[slot] -= 1
        state.pool.counters[MERGED] += 1


@compiled
def publish(state: State, row: int) -> None:
    """Make nodes of the row's full computed blocks; where others have published the same, take theirs.

    The chain of every sequence is then the index's chain, which is what lets eviction never orphan a node.
    """
    rows, anchor = state.rows, state.constants[ANCHOR]
    table, slot = rows.tables[anchor, row], rows.request[row]
    stop = rows.computed[row] // state.constants[BLOCK_SIZE]
    hash_row(state, row, stop)
    for at in range(rows.published[row], stop):
        parent = table[at - 1] if at > 0 else ROOT
        node = find(state, row, at, parent)
        if node == NULL_BLOCK:
            insert(state, row, at, parent)
        elif node != table[at]:
            sibling = False
            if state.requests.live[slot] > 1:
                for other in range(rows.request.size):
                    if other != row and rows.request[other] == slot and rows.tables[anchor, other, at] == node:
                        sibling = True
            merge(state, row, at, node, sibling)
    rows.published[row] = stop


@compiled
def evict(state: State, count: int) -> None:
    """Turn at least ``count`` cached blocks into free ones."""
    counters = state.pool.counters
    goal = counters[FREE] + count
    while counters[FREE] < goal:
        _forget(state, oldest_to_evict(state.pool))
        counters[EVICTIONS] += 1


@compiled
def _forget(state: State, block: int) -> None:
    index = state.index
    node = index.node_of[block]
    if block != node:
        for group in range(state.constants[GROUPS]):
            if index.blocks[group, node] == block and state.windows[group] > 0:
                index.blocks[group, node] = NULL_BLOCK
                index.node_of[block] = NULL_BLOCK
                uncache(state.pool, block)
                return
    value = index.hash[node]
    bucket = value & np.uint64(index.heads.size - 1)
    if index.heads[bucket] == node:
        index.heads[bucket] = index.chain[node]
    else:
        before = index.heads[bucket]
        while index.chain[before] != node:
            before = index.chain[before]
        index.chain[before] = index.chain[node]
    for group in range(state.constants[GROUPS]):
        held = index.blocks[group, node]
        if held != NULL_BLOCK:
            index.blocks[group, node] = NULL_BLOCK
            index.node_of[held] = NULL_BLOCK
            uncache(state.pool, held)
    index.chain[node] = NULL_BLOCK
    index.salt_nodes[index.salt[node]] -= 1
    state.pool.counters[NODES] -= 1
    if state.constants[LOGGED]:
        index.removed[state.pool.counters[REMOVED]] = value
        state.pool.counters[REMOVED] += 1


class PrefixIndex:
    """What may be read of the index: for events, tests and checks."""

    def __init__(self, state: State, core: State) -> None:
        self.state = state
        self._core = core

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
        """`evict`, for tests that want a smaller cache; ``count`` blocks must be cached."""
        evict(self._core, count)
