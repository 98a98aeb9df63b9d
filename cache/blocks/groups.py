"""The groups of a layout as the pool sees them.

A *paged* group has a block for every ``block_size`` tokens that a query can still read. A *state* group
(recurrent layers: Mamba, gated delta, short convolution) has one block a sequence from its first step to its
end, overwritten in place.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tonnage.cache.errors import CacheConfigError
from tonnage.planner.model.layout import KVGroup, KVLayout

# What a query reads: everything before it, the last ``window`` positions with its own, its own chunk of
# ``window`` positions, a recurrent state.
FULL, SLIDING, CHUNKED, STATE = range(4)
GROUP = np.dtype([("kind", np.int64), ("window", np.int64)])

_KINDS = {"full": FULL, "mla": FULL, "sliding": SLIDING, "chunked": CHUNKED, "state": STATE}


def kind_of(group: KVGroup) -> int:
    """FULL, SLIDING, CHUNKED or STATE."""
    kind = _KINDS[group.kind]
    return FULL if kind in (SLIDING, CHUNKED) and group.window is None else kind


def in_order(layout: KVLayout) -> tuple[KVGroup, ...]:
    """The groups as the manager numbers them: paged ones first, each kind in the layout's order."""
    return tuple(sorted(layout.groups, key=lambda group: group.kind == "state"))


def group_records(layout: KVLayout) -> npt.NDArray[np.void]:
    """A GROUP record for each group, in the manager's order; ``window`` 0 where there is none."""
    windowed = (SLIDING, CHUNKED)
    return np.array(
        [(kind_of(g), (g.window or 0) if kind_of(g) in windowed else 0) for g in in_order(layout)], GROUP
    )


def paged(layout: KVLayout) -> tuple[KVGroup, ...]:
    """The groups with block tables, in the layout's order."""
    return tuple(group for group in layout.groups if group.kind != "state")


def num_states(layout: KVLayout) -> int:
    """Blocks that a sequence holds for its recurrent states."""
    return len(layout.groups) - len(paged(layout))


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
