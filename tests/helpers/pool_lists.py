"""Readers of the pool's lists and the index's nodes, in O(pool), for checks and tests."""

from __future__ import annotations

import numpy as np

from tonnage.cache.blocks.state import NULL_BLOCK, Core


def listed(core: Core, kind: int, *, backward: bool = False) -> list[int]:
    """Return the blocks in the eviction list of class ``kind``, oldest first.

    ``backward`` returns them youngest first, by the links in the other direction.
    """
    links, blocks = core.prev if backward else core.next, core.refs.size
    order: list[int] = []
    block = int(links[blocks + kind])
    while block < blocks and len(order) <= blocks:
        order.append(block)
        block = int(links[block])
    return order


def all_cached(core: Core) -> list[int]:
    """Return all cached blocks, whether or not they are in an eviction list."""
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
    """Return all nodes of the prefix index in ascending order; a node is named by its block."""
    own = core.node_of == np.arange(core.node_of.size, dtype=np.int32)
    own[NULL_BLOCK] = False
    found: list[int] = np.flatnonzero(own).tolist()
    return found


def bucket(core: Core, value: int) -> list[int]:
    """Return the prefix-index nodes in the hash bucket of ``value``, newest first."""
    node = int(core.heads[value & (core.heads.size - 1)])
    found: list[int] = []
    while node != NULL_BLOCK and len(found) <= core.chain.size:
        found.append(node)
        node = int(core.chain[node])
    return found
