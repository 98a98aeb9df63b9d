"""The groups of a layout as the pool sees them.

A *paged* group has a block for every ``block_size`` tokens that a query can still read. A *state* group
(recurrent layers: Mamba, gated delta, short convolution) has one block a sequence from its first step to its
end, overwritten in place.
"""

from __future__ import annotations

from tonnage.cache.errors import CacheConfigError
from tonnage.planner.layout import KVGroup, KVLayout

_FULL = ("full", "mla")
_WINDOWED = ("sliding", "chunked")


def reach(group: KVGroup) -> int:
    """What a query of a paged group reads: 0 everything before it, W > 0 the last W positions with its own,
    -C its own chunk of C positions."""
    if group.kind in _FULL or group.window is None:
        return 0
    return -group.window if group.kind == "chunked" else group.window


def paged(layout: KVLayout) -> tuple[KVGroup, ...]:
    """The groups with block tables, in the layout's order."""
    return tuple(group for group in layout.groups if group.kind != "state")


def num_states(layout: KVLayout) -> int:
    """Blocks that a sequence holds for its recurrent states."""
    return sum(group.kind == "state" for group in layout.groups)


def num_full(layout: KVLayout) -> int:
    """Groups that keep every token."""
    return sum(reach(group) == 0 for group in paged(layout))


def check_groups(layout: KVLayout) -> None:
    """Raises CacheConfigError for a layout whose groups have no place in one pool, naming what it has."""
    for group in layout.groups:
        if group.kind not in (*_FULL, *_WINDOWED, "state"):
            raise CacheConfigError(f"a group of kind {group.kind!r} is not understood", field="layout")
        if group.kind in _WINDOWED and (group.window is None or group.window < 1):
            raise CacheConfigError(
                f"a {group.kind} group with window {group.window}",
                field="layout",
                hint="a window is at least 1",
            )
        if group.kind != "state" and group.block_size not in (None, layout.block_size):
            raise CacheConfigError(
                f"a group with blocks of {group.block_size} tokens in a pool of blocks of {layout.block_size}",
                field="layout",
                hint="one pool takes one block size",
            )
