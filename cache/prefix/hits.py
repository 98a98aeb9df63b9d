"""A prefix hit before it is taken: what it costs, so that a request is decided on before it is locked."""

from __future__ import annotations

from tonnage.cache.blocks.state import (
    ANCHOR,
    BLOCK_SIZE,
    CACHING,
    COMPUTED,
    FIRST_GROUP,
    GROUPS,
    HASHED,
    LENGTH,
    NULL_BLOCK,
    OWNER,
    PUBLISHED,
    REFS,
    ROOM,
    ROW_SALT,
    SHARED,
    SLOTS,
    Core,
    Int32Array,
)
from tonnage.cache.compiled import compiled
from tonnage.cache.eviction.choice import choose_rule
from tonnage.cache.eviction.reuse import observe_start
from tonnage.cache.prefix.index import hash_row, lock, match


@compiled
def find_hit(core: Core, row: int) -> int:
    """Blocks of the longest usable hit of the prompt in an unused row; the nodes are left in the row."""
    rows, size = core.rows, core.constants[BLOCK_SIZE]
    if not core.constants[CACHING]:
        return 0
    hash_row(core, row, rows[LENGTH, row] // size)
    return match(core, row, (rows[LENGTH, row] - 1) // size)


@compiled
def count_hit(core: Core, row: int, count: int, lost: Int32Array) -> tuple[int, int]:
    """(blocks of full groups in use, blocks nobody references) of the hit that `find_hit` left in the row.

    ``lost`` [slots], zero before: how many of them each running request has to itself now.
    """
    blocks, anchor = core.blocks, core.constants[ANCHOR]
    used, cached = 0, 0
    for group in range(core.constants[GROUPS]):
        if core.windows[group] != 0:
            continue
        for at in range(count):
            block = core.blocks[FIRST_GROUP + group, core.tables[anchor, row, at]]
            if blocks[REFS, block] == 0:
                cached += 1
            else:
                used += 1
                if blocks[OWNER, block] != 0:
                    lost[blocks[OWNER, block] - 1] += 1
    return used, cached


@compiled
def lock_hit(core: Core, row: int, count: int) -> None:
    """Take the hit for the row, whose request is known now."""
    rows = core.rows
    if core.constants[CACHING]:
        observe_start(core, row, count)
        choose_rule(core)
    if count > 0:
        lock(core, row, count)
        rows[COMPUTED, row] = rows[SLOTS, row] = rows[ROOM, row] = count * core.constants[BLOCK_SIZE]
        rows[PUBLISHED, row] = count


@compiled
def drop_hit(core: Core, row: int, count: int) -> None:
    """Leave the row as unused as before `find_hit`."""
    rows = core.rows
    core.tables[core.constants[ANCHOR], row, :count] = NULL_BLOCK
    rows[LENGTH, row] = rows[HASHED, row] = rows[SHARED, row] = 0
    rows[ROW_SALT, row] = 0
