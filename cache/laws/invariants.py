"""The laws of the block manager, written once; tests call them after every operation. O(pool).

Named laws, as `InvariantViolation.law` gives them:

=================== =========================================================================================
conservation        every usable block is free, cached or used, and in that state's structure exactly once
null block          block 0 is in no state and in no index
reference counts    a block's reference count is the number of table entries that name it
tables              a row names blocks where it must, the null block elsewhere, and no block twice; sequences
                    that share a block have it at the same place
exclusive writes    a block with positions still to be written has one owner, or its owners must copy first
prefix index        nodes, buckets and blocks refer to each other; a node's tokens, salt and ancestors are those
                    of every sequence that holds it; a row's full computed blocks, and no others, are nodes
reachability        every node's parent is a node, and in use where the node is; listed for eviction are the
                    cached nodes without children and cached sliding blocks, no others
reservation             per request private <= held <= reserved, all counted anew; sequences <= max_num_seqs;
                    without a policy reserved <= usable over all
committed peak      in guaranteed mode everybody can still run to max_tokens, one after the other
=================== =========================================================================================
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from tonnage.cache.admission import committed_peak, is_safe, reserved_blocks
from tonnage.cache.blocks.state import CLASS_MASK, CLASSES, LISTS, NULL_BLOCK, ONE_CHILD, ROOT
from tonnage.cache.errors import InvariantViolation
from tonnage.planner.units import ceil_div

if TYPE_CHECKING:
    from tonnage.cache.manager import KVCacheManager


def check_invariants(manager: KVCacheManager) -> None:
    """Raises InvariantViolation at the first law that does not hold."""
    _check_tables(manager)
    _check_states(manager)
    _check_reservations(manager)
    if manager.index is not None:
        _check_nodes(manager)
        _check_holders(manager)
        _check_order(manager)


def _broken(law: str, message: str) -> NoReturn:
    raise InvariantViolation(message, field=law)


def _check_tables(manager: KVCacheManager) -> None:
    rows, block_size = manager.rows, manager.block_size
    places: dict[int, tuple[int, int]] = {}
    counts: Counter[int] = Counter()
    writers: dict[int, list[int]] = defaultdict(list)
    live = set(manager.sequences.row_of.values())
    if len(live) != len(manager.sequences):
        _broken("tables", "two sequences have one row")
    for row in range(manager.limits.max_num_seqs):
        held = int(rows.room[row]) // block_size
        computed, slots, room = (int(v[row]) for v in (rows.computed, rows.slots, rows.room))
        if row in live and not (computed <= slots <= room and slots <= rows.limit[row]):
            _broken(
                "tables",
                f"row {row}: computed {computed}, slots {slots}, room {room}, {rows.limit[row]} allowed",
            )
        empty = not (
            held or rows.length[row] or rows.published[row] or rows.hashed[row] or rows.shared_tail[row]
        )
        if (rows.request[row] >= 0) != (row in live) or (row not in live and not empty):
            _broken("tables", f"row {row} is unused and not empty, or the other way round")
        for group, table in enumerate(manager.tables):
            first = int(rows.first[group, row])
            window = manager.windows[group]
            if first and first * block_size > oldest_read(window, computed):
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
        for state, blocks in enumerate(manager.states):
            block = int(blocks[row])
            if (block == NULL_BLOCK) != (held == 0):
                _broken("tables", f"row {row} state {state}: block {block}, {held} blocks of tokens")
            if block != NULL_BLOCK:
                counts[block] += 1
                if places.setdefault(block, (-1 - state, 0)) != (-1 - state, 0):
                    _broken("tables", f"block {block} is at {places[block]} and is state {state} of row {row}")
                writers[block].append(row)
    for block, owners in writers.items():
        if counts[block] > 1 and not all(rows.shared_tail[row] for row in owners):
            _broken("exclusive writes", f"block {block} can be written by rows {owners}")
        if counts[block] > 1 and any(rows.slots[row] > rows.computed[row] for row in owners):
            _broken("exclusive writes", f"block {block} of rows {owners} was to be copied")
    expected = np.zeros(manager.pool.num_blocks, np.int32)
    for block, count in counts.items():
        expected[block] = count
    wrong = np.flatnonzero(expected != manager.pool.refs)
    if wrong.size:
        block = int(wrong[0])
        _broken(
            "reference counts", f"block {block}: count {manager.pool.refs[block]}, {expected[block]} in tables"
        )


def _check_states(manager: KVCacheManager) -> None:
    pool = manager.pool
    cached, free = pool.all_cached(), pool.free_blocks().tolist()
    used = np.flatnonzero(pool.refs > 0).tolist()
    if NULL_BLOCK in cached or NULL_BLOCK in free or NULL_BLOCK in used:
        _broken("null block", "block 0 is free, cached or used")
    if sorted(cached + free + used) != list(range(1, pool.num_blocks)):
        _broken("conservation", f"{len(used)} used, {len(cached)} cached, {len(free)} free of {pool.usable}")
    if (len(used), len(cached), len(free)) != (pool.used, pool.cached, pool.free):
        _broken("conservation", f"counted {(len(used), len(cached), len(free))}, kept {manager.stats()}")
    for kind in range(CLASSES):
        listed = pool.listed(kind)
        if pool.listed(kind, backward=True)[::-1] != listed:
            _broken("conservation", f"the list of class {kind} differs read from its two ends")
        if bool(listed) != bool(manager.core.counters[LISTS] >> kind & 1):
            _broken("conservation", f"the list of class {kind} has {len(listed)} blocks, and is kept otherwise")
    if manager.index is None and cached:
        _broken("prefix index", f"{len(cached)} blocks cached without an index")


def _check_reservations(manager: KVCacheManager) -> None:
    sequences, requests, windows = manager.sequences, manager.state.requests, manager.windows
    members: dict[int, list[int]] = defaultdict(list)
    for row in sequences.row_of.values():
        members[int(manager.rows.request[row])].append(row)
    holders: Counter[int] = Counter()  # requests that hold a block of a full group
    blocks_of: dict[int, set[int]] = {}
    reserved = count = windowed = 0
    for slot, rows in members.items():
        sequence_group = sequences.sequence_group(rows[0])
        full: set[int] = set()
        sliding: set[int] = set()
        for row in rows:
            if sequences.sequence_group(row) is not sequence_group or sequence_group.slot != slot:
                _broken("reservation", f"row {row} is not of the request in slot {slot}")
            for table, window in zip(manager.tables, windows, strict=True):
                (sliding if window else full).update(table[row].tolist())
            sliding.update(int(blocks[row]) for blocks in manager.states)
        full.discard(NULL_BLOCK)
        sliding.discard(NULL_BLOCK)
        blocks_of[slot] = full
        holders.update(full)
        if len(full) + len(sliding) > sequence_group.reservation or len(sliding) > sequence_group.sliding:
            _broken(
                "reservation",
                f"rows {rows} hold {len(full)} + {len(sliding)} blocks, reserved {sequence_group}",
            )
        if sequence_group.live != len(rows) or sequence_group.sequences > sequence_group.request.n:
            _broken(
                "reservation",
                f"rows {rows}: {sequence_group.live} live, {sequence_group.forks_left} forks left",
            )
        if (
            sequence_group.sequences == sequence_group.request.n
            and sequence_group.reservation != reserved_blocks(sequence_group.request, manager.limits)
        ):
            _broken("reservation", f"rows {rows}: reservation {sequence_group.reservation}")
        kept = (int(requests.reserved[slot]), int(requests.live[slot]), int(requests.forks_left[slot]))
        if kept != (
            sequence_group.reservation - sequence_group.sliding,
            sequence_group.live,
            sequence_group.forks_left,
        ):
            _broken("reservation", f"slot {slot} keeps {kept}, its request is {sequence_group}")
        reserved += sequence_group.reservation
        windowed += sequence_group.sliding
        count += sequence_group.sequences
    for slot in range(manager.limits.max_num_seqs):
        mine = blocks_of.get(slot, set())
        if requests.held[slot] != len(mine):
            _broken(
                "reservation",
                f"slot {slot} holds {len(mine)} blocks of full groups, kept {requests.held[slot]}",
            )
        alone = sum(holders[block] == 1 for block in mine)
        if not 0 <= requests.private[slot] <= alone:
            _broken("reservation", f"slot {slot}: {alone} blocks are its alone, kept {requests.private[slot]}")
        if sum(int(manager.state.pool.owner[block]) == slot + 1 for block in mine) != requests.private[slot]:
            _broken(
                "reservation",
                f"slot {slot}: the owners of its blocks do not add up to {requests.private[slot]}",
            )
    if len(holders) != manager.pool.used_full:
        _broken("reservation", f"{len(holders)} blocks of full groups are used, kept {manager.pool.used_full}")
    snapshot = manager.snapshot()
    if (reserved, count) != (snapshot.reserved_blocks, snapshot.running):
        _broken("reservation", f"counted {reserved} blocks and {count} sequences, kept {snapshot}")
    if windowed != manager.running().windowed or len(members) != len(manager.running()):
        _broken(
            "reservation", f"{windowed} blocks windowed by {len(members)} requests, kept {manager.running()}"
        )
    if count > manager.limits.max_num_seqs:
        _broken("reservation", f"{count} sequences of {manager.limits.max_num_seqs}")
    if manager.admission is None:
        if reserved > manager.pool.usable:
            _broken("reservation", f"{reserved} of {manager.pool.usable} blocks")
    elif manager.admission.policy.safe and not is_safe(manager.running(), manager.leaving()):
        peak, capacity = committed_peak(manager.running(), manager.leaving()), manager.running().capacity
        _broken("committed peak", f"{peak} of {capacity} blocks")


def _check_nodes(manager: KVCacheManager) -> None:
    reader, index = manager.index, manager.state.index
    assert reader is not None
    nodes = set(reader.nodes().tolist())
    full = [group for group, window in enumerate(manager.windows) if window == 0]
    if len(nodes) != len(reader):
        _broken("prefix index", f"{len(nodes)} nodes, kept {len(reader)}")
    contents = set()
    for node in nodes:
        if node not in reader.bucket(int(index.hash[node])):
            _broken("prefix index", f"node {node} is not in the bucket of its hash")
        if not all(index.blocks[group, node] for group in full):
            _broken("prefix index", f"node {node} has no block in a full group")
        parent = int(index.parent[node])
        if parent != ROOT and parent not in nodes:
            _broken("reachability", f"the parent {parent} of node {node} is no node")
        contents.add((parent, int(index.salt[node]), index.tokens[node].tobytes()))
    if len(contents) != len(nodes):
        _broken("prefix index", "two nodes have the same content")
    salts = Counter(index.salt[list(nodes)].tolist())
    if any(salts[salt] != kept for salt, kept in enumerate(index.salt_nodes.tolist())):
        _broken("prefix index", f"nodes by salt {salts}, kept otherwise")
    owners: dict[int, int] = {}
    for group in range(len(manager.windows)):
        for node in np.flatnonzero(index.blocks[group]).tolist():
            block = int(index.blocks[group, node])
            if node not in nodes or block in owners:
                _broken("prefix index", f"block {block} belongs to node {node}, no node or the second one")
            owners[block] = node
    for block, node in enumerate(index.node_of.tolist()):
        if owners.get(block, 0) != node:
            _broken("prefix index", f"block {block} names node {node}, listed for {owners.get(block, 0)}")
    for block in manager.pool.all_cached():
        if block not in owners:
            _broken("reachability", f"block {block} is cached without a node")
    for block in manager.pool.free_blocks().tolist():
        if block in owners:
            _broken("prefix index", f"block {block} is free and has node {owners[block]}")


def _check_holders(manager: KVCacheManager) -> None:
    rows, index, size = manager.rows, manager.state.index, manager.block_size
    anchor = manager.windows.index(0)
    for row in manager.sequences.row_of.values():
        salt = manager.sequences.sequence_group(row).salt
        computed = int(rows.computed[row]) // size
        if rows.published[row] != computed or rows.hashed[row] < computed:
            _broken(
                "prefix index", f"row {row}: {computed} full blocks computed, {rows.published[row]} published"
            )
        chain = manager.tables[anchor][row].tolist()
        for group, table in enumerate(manager.tables):
            for at, block in enumerate(table[row].tolist()):
                node = int(index.node_of[block]) if block != NULL_BLOCK else 0
                if node == 0:
                    if at < computed and manager.windows[group] == 0:
                        _broken("prefix index", f"row {row} block {at} counts as published and is not")
                    continue
                if at >= computed:
                    _broken("prefix index", f"row {row} block {at} is published before it is computed")
                if chain[at] != node:
                    _broken(
                        "prefix index", f"row {row} group {group} block {at}: node {node}, anchor {chain[at]}"
                    )
                if index.parent[node] != (chain[at - 1] if at else ROOT):
                    _broken("prefix index", f"row {row} block {at}: not the parent of its node")
                expected = b"" if at < rows.shared[row] else salt
                if manager.salts.salt_of(int(index.salt[node])) != expected:
                    _broken("prefix index", f"row {row}: a block of another salt")
                if index.tokens[node].tobytes() != rows.tokens[row, at * size : (at + 1) * size].tobytes():
                    _broken("prefix index", f"row {row} block {at}: other tokens than its node's")
        if ceil_div(int(rows.slots[row]), size) > rows.room[row] // size:
            _broken("tables", f"row {row}: slots beyond its blocks")


def _check_order(manager: KVCacheManager) -> None:
    """Who may be evicted: whoever leaves no child behind."""
    assert manager.index is not None
    index, pool = manager.state.index, manager.pool
    cached = set(pool.all_cached())
    listed = {block: kind for kind in range(CLASSES) for block in pool.listed(kind)}
    nodes = manager.index.nodes().tolist()
    children = Counter(int(index.parent[node]) for node in nodes)
    expected = set()
    for node in nodes:
        if index.kind[node] // ONE_CHILD != children[node]:
            _broken("reachability", f"node {node} has {children[node]} children, kept {index.kind[node]}")
        parent = int(index.parent[node])
        if parent != ROOT and node not in cached and parent in cached:
            _broken("reachability", f"node {node} is in use and its parent {parent} is not")
        for group, window in enumerate(manager.windows):
            block = int(index.blocks[group, node])
            if block in cached and (window != 0 or (block == node and not children[node])):
                expected.add(block)
                if block == node and listed.get(block) != index.kind[node] & CLASS_MASK:
                    _broken("reachability", f"node {node} is listed as {listed.get(block)}")
    if expected != set(listed):
        _broken("reachability", f"blocks {sorted(expected ^ set(listed))} should be listed, or should not")


def oldest_read(window: int, computed: int) -> int:
    """First position that a query at a position >= ``computed`` may read; ``window`` as `groups.reach` says."""
    if window == 0:
        return 0
    return max(0, computed - window + 1) if window > 0 else computed - computed % -window
