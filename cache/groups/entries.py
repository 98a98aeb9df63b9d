"""The number of table entries that a sequence fills in a group, and the entry that a position is written to.

A paged group has an entry for each ``block_size`` tokens. A recurrent state has a single entry, entry 0, which
every step overwrites. A cached state is at the entry of the token block it ends in; the entries between two
cached states stay empty.
"""

from __future__ import annotations

from tonnage.cache.blocks.groups import ALIGNED, STATE
from tonnage.cache.compiled import inlined


@inlined
def entries(kind: int, tokens: int, size: int) -> int:
    """Return the number of table entries that ``tokens`` tokens fill, with blocks of ``size`` tokens."""
    if kind == STATE:
        return 1 if tokens > 0 else 0
    return (tokens + size - 1) // size


@inlined
def blocks_to_grow(kind: int, computed: int, room: int, end: int, size: int) -> int:
    """Return the blocks that a group takes to extend a row from ``room`` positions (whole blocks) to ``end``.

    A cached state takes one block for any distance, and none if a step that was never computed has already
    taken it.
    """
    if kind == ALIGNED:
        return 1 if room // size == (computed + size - 1) // size else 0
    return entries(kind, end, size) - entries(kind, room, size)


@inlined
def entry_of(kind: int, position: int, size: int) -> int:
    """Return the table entry that a write at ``position`` goes to."""
    return 0 if kind == STATE else position // size
