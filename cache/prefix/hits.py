"""Prefix hits: the cached blocks of a prompt, counted for admission before the request takes them."""

from __future__ import annotations

from tonnage.cache.blocks.groups import FULL
from tonnage.cache.blocks.state import NULL_BLOCK, Core, Int32Array
from tonnage.cache.compiled import compiled
from tonnage.cache.prefix.index import hash_row, lock, match


@compiled
def find_hit(core: Core, row: int) -> int:
    """Return the number of cached blocks that the prompt written to an unused table row can reuse.

    The prefix-index nodes of these blocks are recorded in the row.
    """
    size, length = core.pool[0].block_size, core.rows[row].length
    hash_row(core, row, length // size)
    return match(core, row, (length - 1) // size)


@compiled
def count_hit(core: Core, row: int, count: int, lost: Int32Array) -> tuple[int, int]:
    """Count the full-attention blocks of the prefix hit that `find_hit` recorded in a table row.

    Args:
        core: The block manager's arrays.
        row: Row with the prefix hit.
        count: Length of the prefix hit in blocks.
        lost: int32 [slots], zeros; receives, for each running request, how many of the hit's blocks no other
            request holds.

    Returns:
        The number of the hit's blocks that are in use, and the number that are cached without a reference.
    """
    used, cached = 0, 0
    for group in range(core.groups.size):
        if core.groups[group].kind != FULL:
            continue
        for at in range(count):
            block = core.node_blocks[group, core.tables[core.pool[0].anchor, row, at]]
            if core.refs[block] == 0:
                cached += 1
            else:
                used += 1
                if core.stamp[block] != 0:
                    lost[core.stamp[block] - 1] += 1
    return used, cached


@compiled
def lock_hit(core: Core, row: int, count: int) -> None:
    """Add a reference to each of the first ``count`` cached blocks that `find_hit` recorded in the row.

    The row is that of an admitted request.
    """
    state = core.rows[row]
    if count > 0:
        lock(core, row, count)
        state.computed = state.slots = state.room = count * core.pool[0].block_size
        state.published = count


@compiled
def drop_hit(core: Core, row: int, count: int) -> None:
    """Empty the row in which `find_hit` recorded cached blocks; the blocks stay cached."""
    state = core.rows[row]
    core.tables[core.pool[0].anchor, row, :count] = NULL_BLOCK
    state.length = state.hashed = state.shared = state.salt = state.found = 0
