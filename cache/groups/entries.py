"""How many table entries a sequence fills in a group, and which one a position is written to.

A paged group has one for each ``block_size`` tokens; a recurrent state has one in all, entry 0, which is
written in every step.
"""

from __future__ import annotations

from tonnage.cache.blocks.groups import STATE
from tonnage.cache.compiled import inlined


@inlined
def entries(kind: int, tokens: int, size: int) -> int:
    """Entries that ``tokens`` tokens fill, blocks of ``size`` tokens."""
    if kind == STATE:
        return 1 if tokens > 0 else 0
    return (tokens + size - 1) // size


@inlined
def entry_of(kind: int, position: int, size: int) -> int:
    """The entry that is written at ``position``."""
    return 0 if kind == STATE else position // size
