"""A prefix hit before it is taken: what it costs, so that a request is decided on before it is locked."""

from __future__ import annotations

from tonnage.cache.compiled import compiled
from tonnage.cache.prefix import hash_row, lock, match
from tonnage.cache.state import ANCHOR, BLOCK_SIZE, CACHING, GROUPS, NULL_BLOCK, Int32Array, State


@compiled
def find_hit(state: State, row: int) -> int:
    """Blocks of the longest usable hit of the prompt in an unused row; the nodes are left in the row."""
    rows, size = state.rows, state.constants[BLOCK_SIZE]
    if not state.constants[CACHING]:
        return 0
    hash_row(state, row, rows.length[row] // size)
    return match(state, row, (rows.length[row] - 1) // size)


@compiled
def count_hit(state: State, row: int, count: int, lost: Int32Array) -> tuple[int, int]:
    """(blocks of full groups in use, blocks nobody references) of the hit that `find_hit` left in the row.

    ``lost`` [slots], zero before: how many of them each running request has to itself now.
    """
    pool, anchor = state.pool, state.constants[ANCHOR]
    used, cached = 0, 0
    for group in range(state.constants[GROUPS]):
        if state.windows[group] > 0:
            continue
        for at in range(count):
            block = state.index.blocks[group, state.rows.tables[anchor, row, at]]
            if pool.refs[block] == 0:
                cached += 1
            else:
                used += 1
                if pool.owner[block] != 0:
                    lost[pool.owner[block] - 1] += 1
    return used, cached


@compiled
def lock_hit(state: State, row: int, count: int) -> None:
    """Take the hit for the row, whose request is known now."""
    rows = state.rows
    if count > 0:
        lock(state, row, count)
        rows.computed[row] = rows.slots[row] = rows.room[row] = count * state.constants[BLOCK_SIZE]
        rows.published[row] = count


@compiled
def drop_hit(state: State, row: int, count: int) -> None:
    """Leave the row as unused as before `find_hit`."""
    rows = state.rows
    rows.tables[state.constants[ANCHOR], row, :count] = NULL_BLOCK
    rows.length[row] = rows.hashed[row] = rows.shared[row] = 0
    rows.salt[row] = rows.kind[row] = 0
