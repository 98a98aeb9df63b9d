"""The number of block-table entries that a sequence fills in a group, and a position's entry.

- A paged group has one entry for each ``block_size`` tokens.
- A group of recurrent states without prefix caching has only entry 0, whose block every step overwrites.
- With prefix caching, a recurrent state is at the entry of the token block it ends in. The entries between two
  cached states stay empty.
"""

from __future__ import annotations

from tonnage.cache.blocks.groups import ALIGNED, STATE
from tonnage.cache.compiled import inlined


@inlined
def entries(kind: int, tokens: int, size: int) -> int:
    """Return how many block-table entries of a group ``tokens`` tokens fill, with ``size`` tokens per block."""
    if kind == STATE:
        return 1 if tokens > 0 else 0
    return (tokens + size - 1) // size


@inlined
def blocks_to_grow(kind: int, computed: int, room: int, end: int, size: int) -> int:
    """Return how many blocks a KV cache group takes to extend a sequence from ``room`` to ``end`` positions.

    ``room`` is the number of positions that the sequence's blocks provide now. A cached recurrent state takes
    one block for any distance. It takes none if an earlier step took the block but was then not computed.
    """
    if kind == ALIGNED:
        return 1 if room // size == (computed + size - 1) // size else 0
    return entries(kind, end, size) - entries(kind, room, size)


@inlined
def entry_of(kind: int, position: int, size: int) -> int:
    """Return the index of the block-table entry whose block is written for ``position``."""
    return 0 if kind == STATE else position // size
