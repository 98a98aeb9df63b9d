"""How many table entries a sequence fills in a group, and which one a position is written to.

A paged group has one for each ``block_size`` tokens; a recurrent state has one in all, entry 0, which is
written in every step. A cached state lies at the entry of the block of tokens that it ends in; the entries
between two of them stay empty.
"""

from __future__ import annotations

from tonnage.cache.blocks.groups import ALIGNED, STATE
from tonnage.cache.compiled import inlined


@inlined
def entries(kind: int, tokens: int, size: int) -> int:
    """Entries that ``tokens`` tokens fill, blocks of ``size`` tokens."""
    if kind == STATE:
        return 1 if tokens > 0 else 0
    return (tokens + size - 1) // size


@inlined
def blocks_to_grow(kind: int, computed: int, room: int, end: int, size: int) -> int:
    """Blocks that a group takes for the positions from ``room`` (whole blocks) to ``end``, which is beyond it.

    A cached state takes one, however far; none where a step that was never computed has taken it.
    """
    if kind == ALIGNED:
        return 1 if room // size == (computed + size - 1) // size else 0
    return entries(kind, end, size) - entries(kind, room, size)


@inlined
def entry_of(kind: int, position: int, size: int) -> int:
    """The entry that is written at ``position``."""
    return 0 if kind == STATE else position // size
