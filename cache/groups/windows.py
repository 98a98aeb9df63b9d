"""Sliding windows and chunked attention: the blocks that queries and prefix hits still need.

The functions are called only for layouts with such groups (`POOL.windowed`). Cached recurrent states count as
windows of two positions (`blocks.groups.STATE_WINDOW`), so that a hit needs only the state at its end.
"""

from __future__ import annotations

from tonnage.cache.blocks.groups import CHUNKED
from tonnage.cache.blocks.pool import release, uncache
from tonnage.cache.blocks.state import NULL_BLOCK, Core, Int32Array
from tonnage.cache.compiled import inner


@inner
def first_needed(core: Core, group: int, computed: int) -> int:
    """Return the table index of the first block that queries from position ``computed`` on can read.

    The result is 0 for a group without a window.
    """
    window, size = core.groups[group].window, core.pool[0].block_size
    if window == 0:
        return 0
    if core.groups[group].kind == CHUNKED:
        return int(computed // window * window // size)
    return 0 if computed < window else int((computed - window + 1) // size)


@inner
def usable_hit(core: Core, table: Int32Array, found: int) -> int:
    """Return the length in blocks of the longest cached prefix that every KV cache group can reuse.

    The first ``found`` blocks are cached in full-attention groups. Groups with windows need the last window
    before the prefix's end.
    """
    count = found
    while count > 0:
        missing = -1
        for group in range(core.groups.size):
            if core.groups[group].window != 0:
                first = first_needed(core, group, count * core.pool[0].block_size)
                for at in range(count - 1, first - 1, -1):
                    if core.node_blocks[group, table[at]] == NULL_BLOCK:
                        missing = max(missing, at)
                        break
        if missing < 0:
            break
        count = missing
    return count


@inner
def count_left(core: Core, row: int, computed: int, change: int) -> int:
    """Add ``change`` to the reference counts of a row's KV blocks that its sliding windows have left behind.

    ``computed`` is the number of computed positions. Returns the number of reference counts that reach zero.
    """
    gone = 0
    for group in range(core.groups.size):
        if core.groups[group].window != 0:
            for at in range(core.first[group, row], first_needed(core, group, computed)):
                block = core.tables[group, row, at]
                if block == NULL_BLOCK:  # no recurrent state was kept at this table entry
                    continue
                core.refs[block] += change
                if core.refs[block] == 0:
                    gone += 1
    return gone


@inner
def drop_left(core: Core, row: int) -> None:
    """Release the KV blocks of a row that its sliding windows have left behind."""
    for group in range(core.groups.size):
        if core.groups[group].window != 0:
            first = first_needed(core, group, core.rows[row].computed)
            for at in range(core.first[group, row], first):
                block = core.tables[group, row, at]
                if block != NULL_BLOCK:
                    release(core, block, False, core.rows[row].request)
                    core.tables[group, row, at] = NULL_BLOCK
            core.first[group, row] = max(first, core.first[group, row])


@inner
def forget_alone(core: Core, node: int, block: int) -> bool:
    """Free a cached block of a group with a window, but keep its prefix-index node.

    Returns False, and frees nothing, for a block of another group.
    """
    for group in range(core.groups.size):
        if core.groups[group].window != 0 and core.node_blocks[group, node] == block:
            core.node_blocks[group, node] = NULL_BLOCK
            core.node_of[block] = NULL_BLOCK
            uncache(core, block)
            return True
    return False
