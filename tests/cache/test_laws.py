"""Tests that the invariant checks detect each kind of damage and name it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pool_lists
import pytest
from invariants import check_invariants
from kv_small import make, start

from tonnage.cache.blocks.pool import enlist
from tonnage.cache.errors import InvariantViolation
from tonnage.cache.manager import KVCacheManager


def _orphan(manager: KVCacheManager) -> None:
    node = int(manager.tables[0][manager.row(1), 0])
    manager.core.node_of[node] = 0
    manager.counts.nodes[0] -= 1


def _list_a_parent(manager: KVCacheManager) -> None:
    parent = next(block for block in pool_lists.all_cached(manager.core) if manager.core.next[block] == 0)
    enlist(manager.core, parent, parent, 1)


def _lose_a_child(manager: KVCacheManager) -> None:
    manager.core.kind[manager.tables[0][manager.row(1), 0]] = 0


def _set(values: np.ndarray, at: int, value: int) -> None:
    values[at] = value


DAMAGE: dict[str, tuple[str, Callable[[KVCacheManager], None]]] = {
    "a lost reference": ("reference counts", lambda m: _set(m.pool.refs, int(m.tables[0][m.row(1), 0]), 0)),
    "one block twice": ("tables", lambda m: _set(m.tables[0][m.row(1)], 1, int(m.tables[0][m.row(1), 0]))),
    "a hole in a table": ("tables", lambda m: _set(m.tables[0][m.row(1)], 1, 0)),
    "a shared block to write": ("exclusive writes", lambda m: m.rows.shared_tail.fill(False)),
    "a leaked block": ("conservation", lambda m: _set(m.counts.free, 0, m.pool.free - 1)),
    "a reservation forgotten": (
        "reservation",
        lambda m: setattr(m.reservations, "reserved", m.reservations.reserved - 1),
    ),
    "a reservation too small": (
        "reservation",
        lambda m: setattr(m.reservations[m.row(1)], "blocks", 1),
    ),
    "a parent that is no node": ("reachability", _orphan),
    "a parent that may be evicted": ("reachability", _list_a_parent),
    "a child not counted": ("reachability", _lose_a_child),
    "a private count too high": ("reservation", lambda m: _set(m.requests.private, 0, 50)),
    "tokens that changed": ("prefix index", lambda m: _set(m.core.tokens[m.row(1)], 0, 77)),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_violated_block_manager_invariant_is_named_in_the_error(case: str) -> None:
    manager = make()
    start(manager, 1, list(range(10)), n=2)
    manager.fork(1, 2)
    start(manager, 3, list(range(30, 39)))
    manager.free([3])
    check_invariants(manager)
    law, damage = DAMAGE[case]
    damage(manager)
    with pytest.raises(InvariantViolation) as caught:
        check_invariants(manager)
    assert caught.value.law == law
