"""The prefix index: which cached or used blocks hold which tokens (match, insert, lock, evict).

A *node* is one full block of tokens after one given prefix. Its content is in one block of each group, and its
block in the *anchor* group (the first full-attention group) names it. A node stores its tokens, its parent
node, the id of its salt and its hash. A block's hash is seeded by its parent's hash, and the first block's by
its salt's. The last section describes layouts without a full-attention group.

**A hash collision cannot return a wrong block.** The hash only proposes a node. The node is accepted if its
parent is the node matched just before, its salt is the request's and its tokens are equal. By induction the
whole prefix is then equal. Nodes with equal hashes coexist.

**Salts.** Blocks of different salts are never shared, except an allowed prefix such as a system prompt
published by the operator. Its whole blocks belong to salt 0, and a tenant's salt enters the chain after them.

**Requirements of a hit.** A full-attention group needs every block of the prefix. A sliding group needs only
the blocks that queries after the prefix can still read, i.e. its last window. A cached recurrent state is
needed at the end of the prefix. The hit is the longest prefix for which all groups have these.

**No cached child without its parent.** The manager keeps two invariants, which the tests check. (1)
A sequence that holds a node's block of a full-attention group holds the blocks of all its ancestors, because
duplicates are merged when they are published. A cached node therefore has no child in use. (2) Nodes count
their children, and a node with children is in no eviction list. Evicting a node's own block frees its blocks in
all groups; a sliding-window block can be evicted separately.

**Sliding windows only.** If every group has a window, tables drop the start of the chain, and its blocks may be
evicted before later ones. Nodes then have no parent (`ROOT`), and the anchor is the group with the largest
window. A hit needs consecutive blocks over the last window, wherever it ends in the prompt. Tokens and salt of
these blocks are compared. The prefix before them is known by its hash only, which is therefore a keyed
pseudorandom function (`tonnage.cache.prefix.keyed`); vLLM relies on its hash (SHA-256) in every layout.

A layout of windows and recurrent states alone has no prefix cache.
"""

from __future__ import annotations

import numpy as np

from tonnage.cache.blocks.groups import ALIGNED, FULL
from tonnage.cache.blocks.pool import acquire, release, uncache
from tonnage.cache.blocks.state import NULL_BLOCK, ONE_CHILD, ROOT, Core
from tonnage.cache.compiled import compiled, inlined, inner
from tonnage.cache.eviction.choice import OLDEST, choose_list, leave_parent, unhash
from tonnage.cache.groups import states, windows
from tonnage.cache.prefix.hashing import hash_tokens


@compiled
def hash_row(core: Core, row: int, blocks: int) -> None:
    """Hash the tokens of the row's first ``blocks`` full blocks, except blocks hashed before."""
    size, state = core.pool[0].block_size, core.rows[row]
    for at in range(state.hashed, blocks):
        core.hashes[row, at] = hash_tokens(core.tokens[row], at * size, size, seed_at(core, row, at))
    state.hashed = max(state.hashed, blocks)


@inlined
def seed_at(core: Core, row: int, at: int) -> np.uint64:
    """Return the seed for hashing block ``at`` of a row: the previous block's hash, the salt's, or both."""
    state = core.rows[row]
    own: np.uint64 = core.seeds[state.salt]
    public: np.uint64 = core.seeds[0]
    if at == 0:
        return public if state.shared > 0 else own
    parent: np.uint64 = core.hashes[row, at - 1]
    return parent ^ own if at == state.shared else parent


@inlined
def find(core: Core, row: int, at: int, parent: int) -> int:
    """Return the child node of ``parent`` with the tokens of block ``at`` of a row, or 0 if there is none.

    A node is an entry of the prefix index. Tokens are compared, not only hashes.
    """
    state, size, value = core.rows[row], core.pool[0].block_size, core.hashes[row, at]
    salt = 0 if at < state.shared else state.salt
    node = int(core.heads[value & np.uint64(core.heads.size - 1)])
    while node != NULL_BLOCK:
        if core.node_hash[node] == value and core.parent[node] == parent and core.salt[node] == salt:
            offset, equal = at * size, True
            for token in range(size):
                if core.node_tokens[node, token] != core.tokens[row, offset + token]:
                    equal = False
                    break
            if equal:
                return node
        node = int(core.chain[node])
    return NULL_BLOCK


@inner
def match(core: Core, row: int, blocks: int) -> int:
    """Return how many leading blocks, of the first ``blocks`` of a row's tokens, are in the prefix index.

    The nodes found are written to the row in the block table of the anchor group (the group whose block ids
    name the nodes). The row must be empty before. If every group has a sliding window, the count is the end of
    the longest usable prefix.
    """
    table = core.tables[core.pool[0].anchor, row]
    if core.pool[0].windows_only:
        return _match_windows(core, row, blocks)
    found, parent = 0, ROOT
    while found < blocks:
        node = find(core, row, found, parent)
        if node == NULL_BLOCK:
            break
        table[found] = node
        parent = node
        found += 1
    core.rows[row].found = found
    count = windows.usable_hit(core, table, found) if core.pool[0].windowed else found
    for at in range(count, found):
        table[at] = NULL_BLOCK
    return count


@inner
def _match_windows(core: Core, row: int, blocks: int) -> int:
    """Return the length in blocks of the longest prefix whose last sliding window every group has cached.

    The nodes of that window are written to the row in the block table of the anchor group, i.e. the group with
    the largest window, whose block ids name the nodes.
    """
    table = core.tables[core.pool[0].anchor, row]
    for at in range(blocks):
        table[at] = find(core, row, at, ROOT)
    count = windows.usable_hit(core, table, blocks)
    first = windows.first_needed(core, core.pool[0].anchor, count * core.pool[0].block_size)
    for at in range(blocks):
        if at < first or at >= count:
            table[at] = NULL_BLOCK
    core.rows[row].found = count
    return count


@inner
def lock(core: Core, row: int, count: int) -> None:
    """Add a reference to each block of the first ``count`` nodes that `match` wrote to the row.

    Table entries before a sliding window become the null block.
    """
    pool, slot = core.pool[0], core.rows[row].request
    for group in range(pool.num_groups):
        full = core.groups[group].kind == FULL
        first = windows.first_needed(core, group, count * pool.block_size)
        core.first[group, row] = first
        for at in range(first, count):
            block = core.node_blocks[group, core.tables[pool.anchor, row, at]]
            acquire(core, block, full, slot)
            if full:
                core.requests[slot].held += 1
            if group != pool.anchor:
                core.tables[group, row, at] = block


@inlined
def insert(core: Core, row: int, at: int, parent: int) -> None:
    """Add the block at index ``at`` of a sequence's row to the prefix index, as a new child of ``parent``.

    The caller has checked with `find` that no node has the same content.
    """
    pool, state, value = core.pool[0], core.rows[row], core.hashes[row, at]
    node, size = core.tables[pool.anchor, row, at], pool.block_size
    for token in range(size):
        core.node_tokens[node, token] = core.tokens[row, at * size + token]
    salt = 0 if at < state.shared else state.salt
    core.parent[node], core.node_hash[node], core.salt[node] = parent, value, salt
    core.salt_nodes[salt] += 1
    # The node has no children yet. Its eviction list is chosen when the request ends.
    core.kind[node] = 0
    if parent != ROOT:
        core.kind[parent] += ONE_CHILD
    bucket = value & np.uint64(core.heads.size - 1)
    core.chain[node] = core.heads[bucket]
    core.heads[bucket] = node
    for group in range(pool.num_groups):
        block = core.tables[group, row, at]
        if core.groups[group].kind == ALIGNED and not states.is_kept(core, row, at):
            block = NULL_BLOCK
        core.node_blocks[group, node] = block
        if block != NULL_BLOCK:
            core.node_of[block] = node
    pool.nodes += 1
    if pool.logged:
        core.stored[pool.stored] = node
        pool.stored += 1


@inner
def merge(core: Core, row: int, at: int, node: int, shared_by_sibling: bool) -> None:
    """Replace a row's blocks at table entry ``at`` by the blocks of ``node``, which hold the same tokens."""
    slot = core.rows[row].request
    for group in range(core.groups.size):
        full = core.groups[group].kind == FULL
        mine, theirs = core.tables[group, row, at], core.node_blocks[group, node]
        if mine == NULL_BLOCK or mine == theirs:  # noqa: SIM109 (numba wants one type in a tuple)
            continue
        if core.groups[group].kind == ALIGNED and not states.is_kept(core, row, at):
            continue
        # The node has no block of this group: its sliding-window block or state was evicted separately, or it
        # was not kept.
        if theirs == NULL_BLOCK:
            core.node_blocks[group, node] = mine
            core.node_of[mine] = node
            continue
        acquire(core, theirs, full, slot)
        release(core, mine, full, slot)
        core.tables[group, row, at] = theirs
        if full and shared_by_sibling:
            core.requests[slot].held -= 1
        core.pool[0].merged += 1


@inner
def publish(core: Core, row: int) -> None:
    """Add a row's full computed blocks to the prefix index; replace them by existing blocks of equal content.

    The blocks of every sequence then form a parent-child chain in the index, so eviction never orphans a node.
    """
    pool, state = core.pool[0], core.rows[row]
    table, stop = core.tables[pool.anchor, row], state.computed // pool.block_size
    hash_row(core, row, stop)
    known = True  # whether the parent may have children; a node that this call inserted has none
    for at in range(state.published, stop):
        parent = table[at - 1] if at > 0 and not pool.windows_only else ROOT
        node = find(core, row, at, parent) if known else NULL_BLOCK
        if node == NULL_BLOCK:
            insert(core, row, at, parent)
            known = pool.windows_only == 1
        elif node != table[at]:
            merge(core, row, at, node, sibling_holds(core, row, pool.anchor, at, node))
    state.published = stop


@inner
def sibling_holds(core: Core, row: int, group: int, at: int, block: int) -> bool:
    """Return whether another sequence of the same request holds a block, at the same table entry."""
    slot = core.rows[row].request
    if core.requests[slot].live < 2 or core.refs[block] == 0:
        return False
    for other in range(core.rows.size):
        if other != row and core.rows[other].request == slot and core.tables[group, other, at] == block:
            return True
    return False


@compiled
def evict(core: Core, count: int, cause: int) -> None:
    """Evict at least ``count`` cached blocks, which become free; ``cause`` is an index into EVICTION_CAUSES."""
    pool = core.pool[0]
    goal = pool.free + count
    while pool.free < goal:
        kind, end, left = choose_list(core)
        while left > 0 and pool.free < goal:
            sentinel = pool.num_blocks + kind
            block = core.next[sentinel] if end == OLDEST else core.prev[sentinel]
            if block >= pool.num_blocks:
                break
            _forget(core, block)
            pool.evicted[cause] += 1
            left -= 1


@inlined
def _forget(core: Core, block: int) -> None:
    pool, node = core.pool[0], core.node_of[block]
    if block != node and windows.forget_alone(core, node, block):
        return
    unhash(core, node)
    for group in range(pool.num_groups):
        held = core.node_blocks[group, node]
        if held != NULL_BLOCK:
            core.node_blocks[group, node] = NULL_BLOCK
            core.node_of[held] = NULL_BLOCK
            uncache(core, held)
    leave_parent(core, node)
    core.salt_nodes[core.salt[node]] -= 1
    pool.nodes -= 1
    if pool.logged:
        core.removed[pool.removed] = core.node_hash[node]
        pool.removed += 1
