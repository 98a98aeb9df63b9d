"""Publishing: a sequence's full computed blocks become nodes of the prefix index, duplicates are merged."""

from __future__ import annotations

import numpy as np

from tonnage.cache.pool import NULL_BLOCK, Int32Array
from tonnage.cache.prefix import Match, Point, PrefixIndex
from tonnage.cache.tables import SequenceTables


def publish(index: PrefixIndex, tables: SequenceTables, row: int) -> int:
    """Publish what the row has computed and not yet published; returns the duplicate blocks given back.

    Where another sequence has published the same tokens meanwhile, its blocks replace the row's own: the chain
    of every sequence is then the index's chain, which is what lets eviction never orphan a node (see
    `tonnage.cache.prefix`). Behind the last node that exists the row's own blocks are inserted.
    """
    start, stop = int(tables.published[row]), int(tables.computed[row]) // tables.block_size
    tokens = tables.full_blocks_of_tokens(row, start, stop)
    salt, point = tables.family(row).salt, tables.points[row]
    match = index.match(tokens, salt, point)
    taken, merged = _merge(index, tables, row, start, match)
    start += taken
    if taken:
        node = int(match.nodes[taken - 1])
        point = Point(node, index.hash_of(node))
    if taken == len(match.nodes):
        blocks = [table[row, start:stop] for table in tables.blocks]
        hashes = index.insert(tokens[taken:], salt, point, blocks)
        if hashes:
            start += len(hashes)
            point = Point(int(tables.blocks[index.anchor][row, start - 1]), hashes[-1])
    tables.published[row], tables.points[row] = start, point
    return merged


def _merge(index: PrefixIndex, tables: SequenceTables, row: int, start: int, match: Match) -> tuple[int, int]:
    """Use existing nodes for the row's blocks from ``start``; returns (nodes taken, blocks given back).

    Stops at a duplicate that forks share: only one of their tables would change, and the blocks they have in
    common are promised once. That happens only after a hash collision has delayed publishing past the fork;
    it is tried again at the next commit.
    """
    merged = 0
    for offset, node in enumerate(match.nodes.tolist()):
        at = start + offset
        own = int(tables.blocks[index.anchor][row, at])
        if own != node and index.pool.references(own) > 1:
            return offset, merged
        for group, table in enumerate(tables.blocks):
            mine, published = int(table[row, at]), int(index.blocks[group, node])
            if mine in (NULL_BLOCK, published):
                continue
            if published == NULL_BLOCK:
                index.add_block(node, group, mine)
            elif own != node:  # the row's alone, as its anchor block is
                index.pool.release(_one(mine), np.zeros(1, np.bool_))
                index.pool.acquire(_one(published))
                table[row, at] = published
                merged += 1
    return len(match.nodes), merged


def _one(block: int) -> Int32Array:
    return np.array([block], np.int32)
