"""The laws of the block manager, written once; tests call them after every operation. O(pool).

Named laws, as `InvariantViolation.law` gives them:

=================== =========================================================================================
conservation        every usable block is free, cached or used, and in that state's structure exactly once
null block          block 0 is in no state and in no index
reference counts    a block's reference count is the number of table entries that name it
tables              a row names blocks where it must, the null block elsewhere, and no block twice; sequences
                    that share a block have it at the same place
exclusive writes    a block with positions still to be written has one owner, or its owners must copy first
prefix index        nodes, hashes and blocks refer to each other; a node's tokens and ancestors are those of
                    every sequence that holds it; only computed blocks are nodes
reachability        every node's parent is a node, and is evicted after it
promise             per request held <= promised; over all promised <= usable; sequences <= max_num_seqs
=================== =========================================================================================
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NoReturn

from tonnage.cache.admission import ceil_div, promised_blocks
from tonnage.cache.errors import InvariantViolation
from tonnage.cache.pool import NULL_BLOCK
from tonnage.cache.prefix import ROOT, PrefixIndex

if TYPE_CHECKING:
    from tonnage.cache.manager import KVCacheManager


def check_invariants(manager: KVCacheManager) -> None:
    """Raises InvariantViolation at the first law that does not hold."""
    _check_tables(manager)
    _check_states(manager)
    _check_promises(manager)
    if manager.index is not None:
        _check_nodes(manager, manager.index)
        _check_holders(manager, manager.index)
        _check_order(manager, manager.index)


def _broken(law: str, message: str) -> NoReturn:
    raise InvariantViolation(message, field=law)


def _check_tables(manager: KVCacheManager) -> None:
    rows, block_size = manager.rows, manager.block_size
    places: dict[int, tuple[int, int]] = {}
    counts: Counter[int] = Counter()
    writers: dict[int, list[int]] = defaultdict(list)
    live = set(rows.row_of.values())
    if len(live) != len(rows.row_of):
        _broken("tables", "two sequences have one row")
    for row in range(manager.limits.max_num_seqs):
        held = rows.held_blocks(row)
        computed, slots, room = (int(v[row]) for v in (rows.computed, rows.slots, rows.room))
        if row in live and not (computed <= slots <= room and slots <= rows.limit[row]):
            _broken(
                "tables",
                f"row {row}: computed {computed}, slots {slots}, room {room}, {rows.limit[row]} allowed",
            )
        if row not in live and (held or rows.length[row] or rows.published[row] or rows.shared_tail[row]):
            _broken("tables", f"row {row} is in no use and not empty")
        for group, table in enumerate(manager.tables):
            first = int(rows.first[group, row])
            window = manager.windows[group]
            if first and (window is None or first * block_size > max(0, computed - window + 1)):
                _broken("tables", f"row {row} group {group}: blocks below {first} are gone and still needed")
            entries = table[row].tolist()
            if any(entries[:first]) or any(entries[held:]) or not all(entries[first:held]):
                _broken(
                    "tables",
                    f"row {row} group {group}: {entries[: held + 1]}, blocks {first} to {held} expected",
                )
            for at in range(first, held):
                block = entries[at]
                counts[block] += 1
                if places.setdefault(block, (group, at)) != (group, at):
                    _broken("tables", f"block {block} is at {places[block]} and at {(group, at)}")
                if (at + 1) * block_size > computed:
                    writers[block].append(row)
    for block, owners in writers.items():
        if counts[block] > 1 and not all(rows.shared_tail[row] for row in owners):
            _broken("exclusive writes", f"block {block} can be written by rows {owners}")
        if counts[block] > 1 and any(rows.slots[row] > rows.computed[row] for row in owners):
            _broken("exclusive writes", f"block {block} of rows {owners} was to be copied")
    for block, count in enumerate(manager.pool.refs.tolist()):
        if counts[block] != count:
            _broken("reference counts", f"block {block}: count {count}, {counts[block]} table entries")


def _check_states(manager: KVCacheManager) -> None:
    pool = manager.pool
    cached, free = pool.lru_order(), pool.free_blocks().tolist()
    used = [block for block, count in enumerate(pool.refs.tolist()) if count > 0]
    if NULL_BLOCK in cached or NULL_BLOCK in free or NULL_BLOCK in used:
        _broken("null block", "block 0 is free, cached or used")
    if sorted(cached + free + used) != list(range(1, pool.num_blocks)):
        _broken("conservation", f"{len(used)} used, {len(cached)} cached, {len(free)} free of {pool.usable}")
    if (len(used), len(cached), len(free)) != (pool.used, pool.cached, pool.free):
        _broken("conservation", f"counted {(len(used), len(cached), len(free))}, kept {manager.stats()}")
    backward: list[int] = []
    block = pool.newest
    while block != NULL_BLOCK and len(backward) <= len(cached):
        backward.append(block)
        block = pool.before(block)
    if backward[::-1] != cached:
        _broken("conservation", "the LRU list differs read from its two ends")
    if manager.index is None and cached:
        _broken("prefix index", f"{len(cached)} blocks cached without an index")


def _check_promises(manager: KVCacheManager) -> None:
    rows = manager.rows
    members: dict[int, list[int]] = defaultdict(list)
    for row in rows.row_of.values():
        members[id(rows.families[row])].append(row)
    promised = sequences = 0
    for family_rows in members.values():
        family = rows.family(family_rows[0])
        held: set[int] = set()
        for row in family_rows:
            for table in manager.tables:
                held.update(table[row].tolist())
        held.discard(NULL_BLOCK)
        if len(held) > family.promise:
            _broken("promise", f"rows {family_rows} hold {len(held)} blocks, promised {family.promise}")
        if family.live != len(family_rows) or family.sequences > family.request.n:
            _broken("promise", f"rows {family_rows}: {family.live} live, {family.forks_left} forks left")
        if family.sequences == family.request.n and family.promise != promised_blocks(
            family.request, manager.limits
        ):
            _broken("promise", f"rows {family_rows}: promise {family.promise}")
        promised += family.promise
        sequences += family.sequences
    snapshot = manager.snapshot()
    if (promised, sequences) != (snapshot.promised_blocks, snapshot.running):
        _broken("promise", f"counted {promised} blocks and {sequences} sequences, kept {snapshot}")
    if promised > manager.pool.usable or sequences > manager.limits.max_num_seqs:
        _broken("promise", f"{promised} of {manager.pool.usable} blocks, {sequences} sequences")


def _check_nodes(manager: KVCacheManager, index: PrefixIndex) -> None:
    by_hash = index.nodes()
    nodes = set(by_hash.values())
    full = [group for group, window in enumerate(index.windows) if window is None]
    if len(nodes) != len(by_hash):
        _broken("prefix index", "two hashes find one node")
    for value, node in by_hash.items():
        if index.hash_of(node) != value:
            _broken("prefix index", f"node {node} is found by a hash that is not its own")
        if not all(index.blocks[group, node] for group in full):
            _broken("prefix index", f"node {node} has no block in a full group")
        parent = index.parent_of(node)
        if parent == ROOT and index.salt_of(node) is None:
            _broken("reachability", f"node {node} hangs on no root")
        if parent != ROOT and parent not in nodes:
            _broken("reachability", f"the parent {parent} of node {node} is no node")
    firsts = Counter(index.salt_of(node) for node in nodes if index.parent_of(node) == ROOT)
    if firsts != Counter(index.roots()):
        _broken("prefix index", f"salts of first blocks {firsts}, kept {index.roots()}")
    owners: dict[int, int] = {}
    for group in range(len(index.windows)):
        for node, block in enumerate(index.blocks[group].tolist()):
            if block == NULL_BLOCK:
                continue
            if node not in nodes or block in owners:
                _broken("prefix index", f"block {block} belongs to node {node}, no node or the second one")
            owners[block] = node
    for block, node in enumerate(index.node_of.tolist()):
        if owners.get(block, 0) != node:
            _broken("prefix index", f"block {block} names node {node}, listed for {owners.get(block, 0)}")
    for block in manager.pool.lru_order():
        if block not in owners:
            _broken("reachability", f"block {block} is cached without a node")
    for block in manager.pool.free_blocks().tolist():
        if block in owners:
            _broken("prefix index", f"block {block} is free and has node {owners[block]}")


def _check_holders(manager: KVCacheManager, index: PrefixIndex) -> None:
    rows = manager.rows
    for row in rows.row_of.values():
        salt = rows.family(row).salt
        computed = int(rows.computed[row]) // manager.block_size
        published = int(rows.published[row])
        chain = manager.tables[index.anchor][row].tolist()
        for group, table in enumerate(manager.tables):
            for at, block in enumerate(table[row].tolist()):
                node = int(index.node_of[block]) if block != NULL_BLOCK else 0
                if node == 0:
                    if at < published and index.windows[group] is None:
                        _broken("prefix index", f"row {row} block {at} counts as published and is not")
                    continue
                if at >= computed:
                    _broken("prefix index", f"row {row} block {at} is published before it is computed")
                if chain[at] != node:
                    _broken(
                        "prefix index", f"row {row} group {group} block {at}: node {node}, anchor {chain[at]}"
                    )
                if index.parent_of(node) != (chain[at - 1] if at else ROOT):
                    _broken("prefix index", f"row {row} block {at}: not the parent of its node")
                if at == 0 and index.salt_of(node) != salt:
                    _broken("prefix index", f"row {row}: a block of another salt")
                tokens = rows.full_blocks_of_tokens(row, at, at + 1)[0]
                if index.tokens[node].tolist() != tokens.tolist():
                    _broken("prefix index", f"row {row} block {at}: other tokens than its node's")
        if ceil_div(int(rows.slots[row]), manager.block_size) > rows.held_blocks(row):
            _broken("tables", f"row {row}: slots beyond its blocks")


def _check_order(manager: KVCacheManager, index: PrefixIndex) -> None:
    age = {block: place for place, block in enumerate(manager.pool.lru_order())}  # 0 is evicted first
    for group, window in enumerate(index.windows):
        if window is not None:
            continue
        for node in index.nodes().values():
            parent = index.parent_of(node)
            if parent == ROOT:
                continue
            mine, above = int(index.blocks[group, node]), int(index.blocks[group, parent])
            if mine not in age and above in age:
                _broken("reachability", f"node {node} is in use and its parent {parent} may be evicted")
            if mine in age and above in age and age[above] < age[mine]:
                _broken("reachability", f"the parent {parent} is evicted before node {node}")
