"""The groups of a layout as the pool sees them.

A *paged* group has a block for every ``block_size`` tokens that a query can still read. A *state* group
(recurrent layers: Mamba, gated delta, short convolution) has one block a sequence from its first step to its
end, overwritten in place; or, where states are cached with prefixes, a new one wherever a step ends in another
block of tokens than the one before (`tonnage.cache.groups.states`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tonnage.cache.errors import CacheConfigError
from tonnage.planner.model.layout import KVGroup, KVLayout

# What a query reads: everything before it, the last ``window`` positions with its own, its own chunk of
# ``window`` positions, a recurrent state (STATE: overwritten in place, ALIGNED: cached at ends of blocks).
FULL, SLIDING, CHUNKED, STATE, ALIGNED = range(5)
# A step reads the state after the position before its own: of the blocks before it, it needs those that a
# sliding window of two would read.
STATE_WINDOW = 2
MOST_STATES = 2  # cached blocks that a sequence holds in one state group: what it goes on from, what it writes
GROUP = np.dtype([("kind", np.int64), ("window", np.int64)])

_KINDS = {"full": FULL, "mla": FULL, "sliding": SLIDING, "chunked": CHUNKED, "state": STATE}


def kind_of(group: KVGroup) -> int:
    """FULL, SLIDING, CHUNKED or STATE."""
    kind = _KINDS[group.kind]
    return FULL if kind in (SLIDING, CHUNKED) and group.window is None else kind


def in_order(layout: KVLayout) -> tuple[KVGroup, ...]:
    """The groups as the manager numbers them: paged ones first, each kind in the layout's order."""
    return tuple(sorted(layout.groups, key=lambda group: group.kind == "state"))


def group_records(layout: KVLayout, aligned: bool = False) -> npt.NDArray[np.void]:
    """A GROUP record for each group, in the manager's order; ``window`` 0 where there is none. ``aligned``:
    states are cached."""

    def record(group: KVGroup) -> tuple[int, int]:
        kind = kind_of(group)
        if kind == STATE and aligned:
            return ALIGNED, STATE_WINDOW
        return kind, (group.window or 0) if kind in (SLIDING, CHUNKED) else 0

    return np.array([record(group) for group in in_order(layout)], GROUP)


def paged(layout: KVLayout) -> tuple[KVGroup, ...]:
    """The groups with block tables, in the layout's order."""
    return tuple(group for group in layout.groups if group.kind != "state")


def num_states(layout: KVLayout) -> int:
    """Blocks that a sequence holds for its recurrent states."""
    return len(layout.groups) - len(paged(layout))


def can_cache_states(layout: KVLayout) -> bool:
    """Whether recurrent states can be cached with the prefixes of full groups: both are there, and states are
    kept at ends of the pool's blocks. Without a full group there is no chain of blocks to find them by."""
    states = [group for group in layout.groups if group.kind == "state"]
    aligned = all(group.block_size in (None, layout.block_size) for group in states)
    return bool(states) and aligned and any(group.kind in ("full", "mla") for group in layout.groups)


def state_every(interval: int | None, block_size: int) -> int:
    """`prefix_cache_retention_interval` in blocks; None (all) is 1. Raises CacheConfigError."""
    if interval is None:
        return 1
    if interval < 0 or interval % block_size:
        raise CacheConfigError(
            f"{interval} is not a multiple of the block size, {block_size}",
            field="prefix_cache_retention_interval",
            hint="0 keeps states only where prompts end and part",
        )
    return interval // block_size


def num_full(layout: KVLayout) -> int:
    """Groups that keep every token."""
    return sum(kind_of(group) == FULL for group in layout.groups)


def check_groups(layout: KVLayout) -> None:
    """Raises CacheConfigError for a layout whose groups have no place in one pool, naming what it has."""
    for group in layout.groups:
        if group.kind not in _KINDS:
            raise CacheConfigError(f"a group of kind {group.kind!r} is not understood", field="layout")
        if group.kind in ("sliding", "chunked") and (group.window is None or group.window < 1):
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
