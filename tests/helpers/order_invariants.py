"""The invariants of `tonnage.cache.eviction.order`, for tests."""

from __future__ import annotations

from collections import Counter

from tonnage.cache.blocks.state import CLASS_MASK, NULL_BLOCK, ONE_CHILD, ROOT
from tonnage.cache.errors import InvariantViolation
from tonnage.cache.eviction.order import SPARE, EvictionOrder


def check_order(order: EvictionOrder) -> None:
    """Check the lists, buckets, parents and counts of an eviction order; O(pool).

    Every cached block is in one eviction list, or has children. Raises InvariantViolation if a check fails.
    """
    core, size = order.arrays, int(order.arrays.pool["num_blocks"][0])
    here = {block for block in range(size) if core.refs[block] == 0}
    nodes = {block for block in range(size) if core.node_of[block] == block != NULL_BLOCK}
    listed: list[int] = []
    for kind in range(SPARE + 1):
        sentinel = size + kind
        before, block = sentinel, int(core.next[sentinel])
        while block != sentinel:
            _hold(core.prev[block] == before, f"block {block} has a wrong backward link")
            listed.append(block)
            before, block = block, int(core.next[block])
        _hold(core.prev[sentinel] == before, f"list {kind} has a wrong youngest block")
        marked = bool(int(core.pool["lists"][0]) >> kind & 1)
        _hold(marked == (before != sentinel), f"list {kind} has a wrong bit")
    _hold(len(here) == order.cached, f"{len(here)} blocks are held, counted {order.cached}")
    _hold(max(Counter(listed).values(), default=1) == 1, "a block is listed twice")
    waiting = {block for block in here if core.kind[block] >= ONE_CHILD}
    _hold(set(listed) == here - waiting, f"blocks {sorted(listed)} are listed, {sorted(here)} are held")
    children = Counter(int(core.parent[node]) for node in nodes)
    children.pop(ROOT, None)
    _hold(children.keys() <= nodes, f"{sorted(children.keys() - nodes)} are parents but not nodes")
    for block in range(1, size):
        count = int(core.kind[block]) // ONE_CHILD
        _hold(count == children[block], f"block {block} counts {count} children, has {children[block]}")
        spare = int(core.kind[block]) & CLASS_MASK == SPARE
        _hold(not spare or (block in here and block not in nodes), f"block {block} is wrongly marked as spare")
    found: set[int] = set()
    for bucket, head in enumerate(core.heads.tolist()):
        node = head
        while node != NULL_BLOCK:
            _hold(node not in found, f"node {node} is in two places")
            _hold(int(core.node_hash[node]) % len(core.heads) == bucket, f"node {node} is in a wrong bucket")
            found.add(node)
            node = int(core.chain[node])
    _hold(found <= nodes, f"{sorted(found - nodes)} are in buckets but not nodes")
    _hold(len(nodes) == int(core.pool["nodes"][0]), "the count of nodes is wrong")


def _hold(law: bool, message: str) -> None:
    if not law:
        raise InvariantViolation(message, field="eviction order")
