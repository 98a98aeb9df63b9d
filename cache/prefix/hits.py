"""A prefix hit before it is locked: its length and its cost in blocks, so that admission can decide first."""

from __future__ import annotations

from tonnage.cache.blocks.groups import FULL
from tonnage.cache.blocks.state import NULL_BLOCK, Core, Int32Array
from tonnage.cache.compiled import compiled
from tonnage.cache.eviction.choice import choose_rule
from tonnage.cache.eviction.reuse import observe_start
from tonnage.cache.prefix.index import hash_row, lock, match


@compiled
def find_hit(core: Core, row: int) -> int:
    """Return the blocks of the longest usable hit of the prompt in an unused row.

    Its nodes are recorded in the row.
    """
    size, length = core.pool[0].block_size, core.rows[row].length
    hash_row(core, row, length // size)
    return match(core, row, (length - 1) // size)


@compiled
def count_hit(core: Core, row: int, count: int, lost: Int32Array) -> tuple[int, int]:
    """Count the blocks of full-attention groups in the hit that `find_hit` recorded in the row.

    Args:
        core: The block manager's arrays.
        row: The row with the hit.
        count: Blocks of the hit.
        lost: int32 [slots], zeros; receives how many of the blocks each running request holds alone now.

    Returns:
        Blocks in use, and cached blocks without a reference.
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
    """Take references to the blocks of the hit for the row, whose request has been admitted."""
    state = core.rows[row]
    if core.pool[0].caching:
        table = core.tables[core.pool[0].anchor, row]
        state.turn = observe_start(core, core.hashes[row], table, state.length, count)
        choose_rule(core)
    if count > 0:
        lock(core, row, count)
        state.computed = state.slots = state.room = count * core.pool[0].block_size
        state.published = count


@compiled
def drop_hit(core: Core, row: int, count: int) -> None:
    """Clear the hit that `find_hit` recorded, so that the row is unused again."""
    state = core.rows[row]
    core.tables[core.pool[0].anchor, row, :count] = NULL_BLOCK
    state.length = state.hashed = state.shared = state.salt = state.found = 0
