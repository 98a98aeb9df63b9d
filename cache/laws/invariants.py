"""The invariants of the block manager in full detail, for tests after every operation; O(pool).

`InvariantViolation.law` has one of these names:

=================== =========================================================================================
conservation        every usable block is free, cached or used, and in that state's structure exactly once
null block          block 0 is in no state and in no index
reference counts    a block's reference count is the number of table entries that name it
tables              a row has blocks where it must, the null block elsewhere, and no block twice; sequences
                    that share a block have it at the same place; of cached states a row has the one it
                    continues from and the one it writes, at most two
exclusive writes    a block with positions still to be written has one owner, or its owners must copy first
prefix index        nodes, buckets and blocks refer to each other; a node's tokens, salt and ancestors match
                    every sequence that holds it; exactly the full computed blocks of a row are nodes
reachability        every node's parent is a node, and in use if the node is; exactly the cached nodes
                    without children and the cached sliding blocks and states are listed for eviction
reservation         per request private <= held <= reserved, all recounted; sequences <= max_num_seqs;
                    in no_evict mode the sum of all reservations <= usable
committed peak      in guaranteed mode every request can still run to max_tokens, one after the other
=================== =========================================================================================
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, NoReturn, Protocol

import numpy as np

from tonnage.cache.admission import (
    AdmissionMode,
    Limits,
    committed_peak,
    is_safe,
    reserved_blocks,
)
from tonnage.cache.admission.controller import Admission
from tonnage.cache.admission.ledger import Reservations
from tonnage.cache.admission.snapshot import RunningSnapshot
from tonnage.cache.blocks.groups import MOST_STATES, STATE_WINDOW, paged
from tonnage.cache.blocks.pool import BlockPool
from tonnage.cache.blocks.state import (
    CLASS_MASK,
    COPY_TAIL,
    DROP_SOURCE,
    NULL_BLOCK,
    ONE_CHILD,
    ROOT,
    Core,
    Int32Array,
)
from tonnage.cache.errors import InvariantViolation
from tonnage.cache.eviction.model import CLASSES
from tonnage.cache.laws import readers
from tonnage.cache.prefix.cache import PrefixCache
from tonnage.cache.results import CacheStats
from tonnage.cache.sequences.tables import Sequences
from tonnage.planner.units import ceil_div


class Checked(Protocol):
    """The attributes of a block manager that the checks read."""

    limits: Limits
    block_size: int
    core: Core
    rows: Any
    requests: Any
    counts: Any
    tables: tuple[Int32Array, ...]
    cached_states: bool
    pool: BlockPool
    prefix: PrefixCache
    sequences: Sequences
    admission: Admission
    reservations: Reservations

    def running(self) -> RunningSnapshot:
        """Return what the running requests hold."""

    def stats(self) -> CacheStats:
        """Return the counts of blocks."""


def check_invariants(manager: Checked) -> None:
    """Check every invariant and raise InvariantViolation for the first that does not hold."""
    _check_tables(manager)
    _check_states(manager)
    _check_reservations(manager)
    if manager.prefix.enabled:
        _check_nodes(manager)
        _check_holders(manager)
        _check_order(manager)


def _windows(manager: Checked) -> list[int]:
    """Return what a query reads in each paged group.

    0 is every position, W > 0 the last W positions, and -C its own chunk of C positions.
    """
    groups = paged(manager.limits.layout)
    return [(group.window or 0) * (-1 if group.kind == "chunked" else 1) for group in groups]


def _all_windows(manager: Checked) -> list[int]:
    """Return `_windows`, followed by the state groups if states are cached."""
    states = len(manager.core.tables) - len(manager.tables)
    return _windows(manager) + [STATE_WINDOW] * (states if manager.cached_states else 0)


def _broken(law: str, message: str) -> NoReturn:
    raise InvariantViolation(message, field=law)


def _check_tables(manager: Checked) -> None:
    rows, block_size, windows = manager.rows, manager.block_size, _windows(manager)
    places: dict[int, tuple[int, int]] = {}
    counts: Counter[int] = Counter()
    writers: dict[int, list[int]] = defaultdict(list)
    live = set(manager.sequences.row_of.values())
    if len(live) != len(manager.sequences):
        _broken("tables", "two sequences have the same row")
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
            _broken("tables", f"row {row} is unused but not empty, or used by no live sequence")
        for group, table in enumerate(manager.tables):
            first = int(manager.core.first[group, row])
            window = windows[group]
            if first and first * block_size > oldest_read(window, computed):
                _broken(
                    "tables", f"row {row} group {group}: blocks below {first} are released but still needed"
                )
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
        for group in range(len(manager.tables), len(manager.core.tables)):
            entries = manager.core.tables[group, row].tolist()
            named = [at for at, block in enumerate(entries) if block != NULL_BLOCK]
            if not _states_in_place(manager, row, group, named):
                _broken("tables", f"row {row} state group {group}: states at entries {named} of {held} blocks")
            for at in named:
                block = entries[at]
                counts[block] += 1
                if places.setdefault(block, (group, at)) != (group, at):
                    _broken("tables", f"block {block} is at {places[block]} and at {(group, at)}")
                if not manager.cached_states or (at + 1) * block_size > computed:
                    writers[block].append(row)
    for block, owners in writers.items():
        if counts[block] > 1 and not all(rows.shared_tail[row] & COPY_TAIL for row in owners):
            _broken(
                "exclusive writes", f"rows {owners} share block {block}, which some can write without a copy"
            )
        if counts[block] > 1 and any(rows.slots[row] > rows.computed[row] for row in owners):
            _broken(
                "exclusive writes", f"rows {owners} extended beyond the shared block {block} without a copy"
            )
    expected = np.zeros(manager.pool.num_blocks, np.int32)
    for block, count in counts.items():
        expected[block] = count
    wrong = np.flatnonzero(expected != manager.pool.refs)
    if wrong.size:
        block = int(wrong[0])
        _broken(
            "reference counts", f"block {block}: count {manager.pool.refs[block]}, {expected[block]} in tables"
        )


def _states_in_place(manager: Checked, row: int, group: int, named: list[int]) -> bool:
    """Return whether ``named`` is the right set of table entries for the row's recurrent state.

    Without cached states this is entry 0. With cached states it is the entry at the end of the computed
    positions, the row's last entry, and at most one more of the step before, which the next step releases.
    """
    size, rows = manager.block_size, manager.rows
    held, computed = int(rows.room[row]) // size, int(rows.computed[row])
    if not manager.cached_states:
        return named == [0] * min(1, held)
    needed = {held - 1} if held else set()
    if computed:
        needed.add(ceil_div(computed, size) - 1)
    first = int(manager.core.first[group, row])
    left = first <= min(named, default=0) and first * size <= oldest_read(STATE_WINDOW, computed)
    source = len(named) < MOST_STATES or bool(rows.shared_tail[row] & DROP_SOURCE)
    return (
        needed <= set(named)
        and len(named) <= MOST_STATES
        and max(named, default=-1) < held
        and source
        and (left or not held)
    )


def _check_states(manager: Checked) -> None:
    pool = manager.pool
    cached, free = readers.all_cached(manager.core), readers.free_blocks(manager.core)
    used = np.flatnonzero(pool.refs > 0).tolist()
    if NULL_BLOCK in cached or NULL_BLOCK in free or NULL_BLOCK in used:
        _broken("null block", "block 0 is free, cached or used")
    if sorted(cached + free + used) != list(range(1, pool.num_blocks)):
        _broken("conservation", f"{len(used)} used, {len(cached)} cached, {len(free)} free of {pool.usable}")
    if (len(used), len(cached), len(free)) != (pool.used, pool.cached, pool.free):
        _broken("conservation", f"recounted {(len(used), len(cached), len(free))}, stats say {manager.stats()}")
    for kind in range(CLASSES):
        listed = readers.listed(manager.core, kind)
        if readers.listed(manager.core, kind, backward=True)[::-1] != listed:
            _broken("conservation", f"the list of class {kind} differs when read backwards")
        if bool(listed) != bool(manager.counts.lists[0] >> kind & 1):
            _broken(
                "conservation", f"the list of class {kind} has {len(listed)} blocks; its bit says otherwise"
            )
    if not manager.prefix.enabled and cached:
        _broken("prefix index", f"{len(cached)} blocks are cached without a prefix index")


def _check_reservations(manager: Checked) -> None:
    sequences, requests, windows = manager.sequences, manager.requests, _windows(manager)
    members: dict[int, list[int]] = defaultdict(list)
    for row in sequences.row_of.values():
        members[int(manager.rows.request[row])].append(row)
    holders: Counter[int] = Counter()  # how many requests hold each block of a full-attention group
    blocks_of: dict[int, set[int]] = {}
    reserved = count = windowed = 0
    for slot, rows in members.items():
        reservation, forks = manager.reservations[rows[0]], int(requests.forks_left[slot])
        full: set[int] = set()
        sliding: set[int] = set()
        for row in rows:
            if manager.reservations[row] is not reservation or reservation.slot != slot:
                _broken("reservation", f"row {row} does not belong to the request in slot {slot}")
            for table, window in zip(manager.tables, windows, strict=True):
                (sliding if window else full).update(table[row].tolist())
            sliding.update(manager.core.tables[len(manager.tables) :, row].ravel().tolist())
        full.discard(NULL_BLOCK)
        sliding.discard(NULL_BLOCK)
        blocks_of[slot] = full
        holders.update(full)
        if len(full) + len(sliding) > reservation.blocks or len(sliding) > reservation.windowed:
            _broken(
                "reservation",
                f"rows {rows} hold {len(full)} + {len(sliding)} blocks; reserved are {reservation}",
            )
        if requests.live[slot] != len(rows) or len(rows) + forks > reservation.request.n:
            _broken(
                "reservation",
                f"rows {rows}: {requests.live[slot]} live, {forks} forks left",
            )
        if len(rows) + forks == reservation.request.n and reservation.blocks != reserved_blocks(
            reservation.request, manager.limits
        ):
            _broken("reservation", f"rows {rows}: wrong reservation of {reservation.blocks} blocks")
        if requests.reserved[slot] != reservation.blocks - reservation.windowed:
            _broken(
                "reservation",
                f"slot {slot} counts {requests.reserved[slot]} reserved blocks; its request has {reservation}",
            )
        reserved += reservation.blocks
        windowed += reservation.windowed
        count += len(rows) + forks
    for slot in range(manager.limits.max_num_seqs):
        mine = blocks_of.get(slot, set())
        if requests.held[slot] != len(mine):
            _broken(
                "reservation",
                f"slot {slot} holds {len(mine)} full-attention blocks, counted {requests.held[slot]}",
            )
        alone = sum(holders[block] == 1 for block in mine)
        if not 0 <= requests.private[slot] <= alone:
            _broken("reservation", f"slot {slot}: {alone} private blocks, counted {requests.private[slot]}")
        if sum(int(manager.core.stamp[block]) == slot + 1 for block in mine) != requests.private[slot]:
            _broken(
                "reservation",
                f"slot {slot}: its blocks with it as owner are not {requests.private[slot]}",
            )
    if len(holders) != manager.pool.used_full:
        _broken("reservation", f"{len(holders)} full-attention blocks in use, counted {manager.pool.used_full}")
    kept = manager.reservations.reserved, manager.reservations.sequences
    if (reserved, count) != kept:
        _broken("reservation", f"recounted {reserved} blocks and {count} sequences, ledger {kept}")
    if windowed != manager.running().windowed or len(members) != len(manager.running()):
        _broken(
            "reservation",
            f"{windowed} windowed blocks of {len(members)} requests, snapshot {manager.running()}",
        )
    if count > manager.limits.max_num_seqs:
        _broken("reservation", f"{count} sequences, max_num_seqs is {manager.limits.max_num_seqs}")
    mode, leaving = manager.admission.policy.mode, manager.admission.leaving()
    if mode is AdmissionMode.NO_EVICT and reserved > manager.pool.usable:
        _broken("reservation", f"{reserved} blocks are reserved of {manager.pool.usable} usable ones")
    if mode is AdmissionMode.GUARANTEED and not is_safe(manager.running(), leaving):
        peak, capacity = committed_peak(manager.running(), leaving), manager.running().capacity
        _broken("committed peak", f"peak of {peak} blocks, capacity {capacity}")


def _check_nodes(manager: Checked) -> None:
    core, windows = manager.core, _all_windows(manager)
    nodes = set(readers.nodes(core))
    full = [group for group, window in enumerate(windows) if window == 0]
    if len(nodes) != manager.counts.nodes[0]:
        _broken("prefix index", f"{len(nodes)} nodes, counted {manager.counts.nodes[0]}")
    contents = set()
    for node in nodes:
        if node not in readers.bucket(core, int(core.node_hash[node])):
            _broken("prefix index", f"node {node} is not in the bucket of its hash")
        if not all(core.node_blocks[group, node] for group in full):
            _broken("prefix index", f"node {node} has no block in a full-attention group")
        parent = int(core.parent[node])
        if parent != ROOT and parent not in nodes:
            _broken("reachability", f"the parent {parent} of node {node} is not a node")
        contents.add((parent, int(core.salt[node]), core.node_tokens[node].tobytes()))
    if len(contents) != len(nodes):
        _broken("prefix index", "two nodes have the same content")
    salts = Counter(core.salt[list(nodes)].tolist())
    if any(salts[salt] != kept for salt, kept in enumerate(core.salt_nodes.tolist())):
        _broken("prefix index", f"nodes by salt are {salts}, counted otherwise")
    owners: dict[int, int] = {}
    for group in range(len(windows)):
        for node in np.flatnonzero(core.node_blocks[group]).tolist():
            block = int(core.node_blocks[group, node])
            if node not in nodes or block in owners:
                _broken("prefix index", f"block {block}: {node} is not a node, or is its second node")
            owners[block] = node
    for block, node in enumerate(core.node_of.tolist()):
        if owners.get(block, 0) != node:
            _broken("prefix index", f"block {block} names node {node}, but node {owners.get(block, 0)} has it")
    for block in readers.all_cached(core):
        if block not in owners:
            _broken("reachability", f"block {block} is cached without a node")
    for block in readers.free_blocks(core):
        if block in owners:
            _broken("prefix index", f"block {block} is free and has node {owners[block]}")


def _check_holders(manager: Checked) -> None:
    rows, core, size, windows = manager.rows, manager.core, manager.block_size, _all_windows(manager)
    anchor = windows.index(0)
    for row in manager.sequences.row_of.values():
        salt = manager.reservations[row].salt
        computed = int(rows.computed[row]) // size
        if rows.published[row] != computed or rows.hashed[row] < computed:
            _broken(
                "prefix index", f"row {row}: {computed} full blocks computed, {rows.published[row]} published"
            )
        chain = manager.tables[anchor][row].tolist()
        for group in range(len(windows)):
            for at, block in enumerate(core.tables[group, row].tolist()):
                node = int(core.node_of[block]) if block != NULL_BLOCK else 0
                if node == 0:
                    if at < computed and windows[group] == 0:
                        _broken("prefix index", f"row {row} block {at} counts as published but has no node")
                    continue
                if at >= computed:
                    _broken("prefix index", f"row {row} block {at} is published before it is computed")
                if chain[at] != node:
                    _broken(
                        "prefix index", f"row {row} group {group} block {at}: node {node}, anchor {chain[at]}"
                    )
                if core.parent[node] != (chain[at - 1] if at else ROOT):
                    _broken("prefix index", f"row {row} block {at}: its node has another parent")
                expected = b"" if at < rows.shared[row] else salt
                if manager.prefix.salts.salt_of(int(core.salt[node])) != expected:
                    _broken("prefix index", f"row {row}: a block has another salt")
                if core.node_tokens[node].tobytes() != core.tokens[row, at * size : (at + 1) * size].tobytes():
                    _broken("prefix index", f"row {row} block {at}: its node has other tokens")
        if ceil_div(int(rows.slots[row]), size) > rows.room[row] // size:
            _broken("tables", f"row {row}: writable positions beyond its blocks")


def _check_order(manager: Checked) -> None:
    """Check that exactly the blocks that would orphan no child are listed for eviction."""
    core, windows = manager.core, _all_windows(manager)
    cached = set(readers.all_cached(core))
    listed = {block: kind for kind in range(CLASSES) for block in readers.listed(core, kind)}
    nodes = readers.nodes(core)
    children = Counter(int(core.parent[node]) for node in nodes)
    expected = set()
    for node in nodes:
        if core.kind[node] // ONE_CHILD != children[node]:
            _broken(
                "reachability", f"node {node} has {children[node]} children, counted in kind {core.kind[node]}"
            )
        parent = int(core.parent[node])
        if parent != ROOT and node not in cached and parent in cached:
            _broken("reachability", f"node {node} is in use but its parent {parent} is not")
        for group, window in enumerate(windows):
            block = int(core.node_blocks[group, node])
            if block in cached and (window != 0 or (block == node and not children[node])):
                expected.add(block)
                if block == node and listed.get(block) != core.kind[node] & CLASS_MASK:
                    _broken("reachability", f"node {node} is in the list of class {listed.get(block)}")
    if expected != set(listed):
        _broken("reachability", f"blocks {sorted(expected ^ set(listed))} are wrongly listed or not listed")


def oldest_read(window: int, computed: int) -> int:
    """Return the first position that a query at a position >= ``computed`` may read.

    ``window`` is 0 for everything, W > 0 for the last W positions, and -C for the query's chunk of C.
    """
    if window == 0:
        return 0
    return max(0, computed - window + 1) if window > 0 else computed - computed % -window
