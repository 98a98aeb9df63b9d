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
from typing import NoReturn

import numpy as np
import pool_lists

from tonnage.cache.admission import (
    AdmissionMode,
    committed_peak,
    is_safe,
    reserved_blocks,
)
from tonnage.cache.blocks.groups import paged
from tonnage.cache.blocks.state import (
    CLASS_MASK,
    NULL_BLOCK,
    ROOT,
)
from tonnage.cache.errors import InvariantViolation
from tonnage.cache.eviction.model import CLASSES
from tonnage.cache.laws.sampled import first_broken
from tonnage.cache.manager import KVCacheManager


def check_invariants(manager: KVCacheManager) -> None:
    """Check every invariant and raise InvariantViolation for the first that does not hold."""
    broken = first_broken(manager.core)
    if broken is not None:
        _broken(broken[0], f"at block or row {broken[1]}")
    _check_rows(manager)
    _check_reservations(manager)
    _check_snapshot(manager)
    if manager.prefix.enabled:
        _check_nodes(manager)
        _check_holders(manager)


def check_step(manager: KVCacheManager) -> None:
    """Check every invariant, and in guaranteed mode that the committed peak's upper bound fits the pool."""
    check_invariants(manager)
    now = manager.running()
    if manager.admission.policy.mode is AdmissionMode.GUARANTEED and committed_peak(now) > now.capacity:
        _broken("committed peak", f"{committed_peak(now)} blocks committed, capacity {now.capacity}")


def _is_full(manager: KVCacheManager) -> list[bool]:
    """Return for each group in the prefix index whether it is full attention, in the order of the tables."""
    states = len(manager.core.tables) - len(manager.tables)
    windows = [group.window for group in paged(manager.limits.layout)]
    return [not window for window in windows] + [False] * (states if manager.cached_states else 0)


def _broken(law: str, message: str) -> NoReturn:
    raise InvariantViolation(message, field=law)


def _check_rows(manager: KVCacheManager) -> None:
    rows, live = manager.rows, set(manager.sequences.row_of.values())
    if len(live) != len(manager.sequences):
        _broken("tables", "two sequences have the same row")
    for row in range(manager.limits.max_num_seqs):
        held = int(rows.room[row]) // manager.block_size
        empty = not (
            held or rows.length[row] or rows.published[row] or rows.hashed[row] or rows.shared_tail[row]
        )
        if (rows.request[row] >= 0) != (row in live) or (row not in live and not empty):
            _broken("tables", f"row {row} is unused but not empty, or used by no live sequence")
        for group, table in enumerate(manager.core.tables):
            # a recurrent state that is overwritten in place fills one entry
            one = group >= len(manager.tables) and not manager.cached_states
            if table[row, min(1, held) if one else held :].any():
                _broken("tables", f"row {row} group {group}: blocks beyond the {held} that it holds")
    if not manager.prefix.enabled and manager.pool.cached:
        _broken("prefix index", f"{manager.pool.cached} blocks are cached without a prefix index")


def _check_snapshot(manager: KVCacheManager) -> None:
    """Check that the snapshot kept for admission is the one that a ledger without it would make."""
    kept, held = manager.running(), manager.reservations
    held._snapshot = held._order = None
    made = manager.running()
    if not np.array_equal(kept.rows, made.rows) or (kept.used, kept.windowed) != (made.used, made.windowed):
        _broken("snapshot", f"{kept} is kept, {made} is true")


def _check_reservations(manager: KVCacheManager) -> None:
    sequences, requests, is_full = manager.sequences, manager.requests, _is_full(manager)
    members: dict[int, list[int]] = defaultdict(list)
    for row in sequences.row_of.values():
        members[int(manager.rows.request[row])].append(row)
    holders: Counter[int] = Counter()  # number of requests that hold each block of a full-attention group
    blocks_of: dict[int, set[int]] = {}
    reserved = count = windowed = 0
    for slot, rows in members.items():
        reservation, forks = manager.reservations[rows[0]], int(requests.forks_left[slot])
        full: set[int] = set()
        sliding: set[int] = set()
        for row in rows:
            if manager.reservations[row] is not reservation or reservation.slot != slot:
                _broken("reservation", f"row {row} does not belong to the request in slot {slot}")
            for table, whole in zip(manager.tables, is_full, strict=False):
                (full if whole else sliding).update(table[row].tolist())
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


def _check_nodes(manager: KVCacheManager) -> None:
    core, is_full, nodes = manager.core, _is_full(manager), pool_lists.nodes(manager.core)
    contents = set()
    for node in nodes:
        if node not in pool_lists.bucket(core, int(core.node_hash[node])):
            _broken("prefix index", f"node {node} is not in the bucket of its hash")
        if not all(core.node_blocks[group, node] for group, whole in enumerate(is_full) if whole):
            _broken("prefix index", f"node {node} has no block in a full-attention group")
        before = int(core.node_hash[node]) if manager.counts.windows_only[0] else int(core.parent[node])
        contents.add((before, int(core.salt[node]), core.node_tokens[node].tobytes()))
    if len(contents) != len(nodes):
        _broken("prefix index", "two nodes have the same content")
    salts = Counter(core.salt[nodes].tolist())
    if any(salts[salt] != kept for salt, kept in enumerate(core.salt_nodes.tolist())):
        _broken("prefix index", f"nodes by salt are {salts}, counted otherwise")
    owners: dict[int, int] = {}
    for group, node in np.argwhere(core.node_blocks[: len(is_full)]).tolist():
        block = int(core.node_blocks[group, node])
        if core.node_of[node] != node or block in owners:
            _broken("prefix index", f"block {block}: {node} is not a node, or is its second node")
        owners[block] = node
    for block, node in enumerate(core.node_of.tolist()):
        if owners.get(block, 0) != node:
            _broken("prefix index", f"block {block} names node {node}, but node {owners.get(block, 0)} has it")
    for kind in range(CLASSES):
        for block in pool_lists.listed(core, kind):
            if core.node_of[block] == block and core.kind[block] & CLASS_MASK != kind:
                _broken("reachability", f"node {block} is in the list of class {kind}")


def _check_holders(manager: KVCacheManager) -> None:
    rows, core, size, is_full = manager.rows, manager.core, manager.block_size, _is_full(manager)
    anchor, no_parents = int(manager.counts.anchor[0]), bool(manager.counts.windows_only[0])
    for row in manager.sequences.row_of.values():
        salt = manager.reservations[row].salt
        computed = int(rows.computed[row]) // size
        if rows.hashed[row] < computed:
            _broken("prefix index", f"row {row}: {computed} full blocks computed, {rows.hashed[row]} hashed")
        chain = manager.tables[anchor][row].tolist()
        for group, whole in enumerate(is_full):
            for at, block in enumerate(core.tables[group, row].tolist()):
                node = int(core.node_of[block]) if block != NULL_BLOCK else 0
                if node == 0:
                    if at < computed and whole:
                        _broken("prefix index", f"row {row} block {at} counts as published but has no node")
                    continue
                if at >= computed:
                    _broken("prefix index", f"row {row} block {at} is published before it is computed")
                if chain[at] != node:
                    _broken(
                        "prefix index", f"row {row} group {group} block {at}: node {node}, anchor {chain[at]}"
                    )
                if core.parent[node] != (chain[at - 1] if at and not no_parents else ROOT):
                    _broken("prefix index", f"row {row} block {at}: its node has another parent")
                expected = b"" if at < rows.shared[row] else salt
                if manager.prefix.salts.salt_of(int(core.salt[node])) != expected:
                    _broken("prefix index", f"row {row}: a block has another salt")
                if core.node_tokens[node].tobytes() != core.tokens[row, at * size : (at + 1) * size].tobytes():
                    _broken("prefix index", f"row {row} block {at}: its node has other tokens")
