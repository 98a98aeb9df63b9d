"""Readers of the pool's lists and the index's nodes, in O(pool), for checks and tests."""

from __future__ import annotations

import numpy as np

from tonnage.cache.blocks.state import NULL_BLOCK, Core


def listed(core: Core, kind: int, *, backward: bool = False) -> list[int]:
    """Return the blocks in the eviction list of a class, oldest first, or from its other end."""
    links, blocks = core.prev if backward else core.next, core.refs.size
    order: list[int] = []
    block = int(links[blocks + kind])
    while block < blocks and len(order) <= blocks:
        order.append(block)
        block = int(links[block])
    return order


def all_cached(core: Core) -> list[int]:
    """Return the cached blocks, listed for eviction or not."""
    cached: list[int] = np.flatnonzero((core.refs == 0) & (core.node_of != NULL_BLOCK)).tolist()
    return cached


def free_blocks(core: Core) -> list[int]:
    """Return the free blocks in the order in which they will be handed out."""
    order: list[int] = []
    block = int(core.pool["free_head"][0])
    while block != NULL_BLOCK and len(order) <= core.refs.size:
        order.append(block)
        block = int(core.next[block])
    return order


def nodes(core: Core) -> list[int]:
    """Return all nodes of the prefix index, ordered by their block."""
    own = core.node_of == np.arange(core.node_of.size, dtype=np.int32)
    own[NULL_BLOCK] = False
    found: list[int] = np.flatnonzero(own).tolist()
    return found


def bucket(core: Core, value: int) -> list[int]:
    """Return the nodes in the bucket of a hash, newest first."""
    node = int(core.heads[value & (core.heads.size - 1)])
    found: list[int] = []
    while node != NULL_BLOCK and len(found) <= core.chain.size:
        found.append(node)
        node = int(core.chain[node])
    return found
