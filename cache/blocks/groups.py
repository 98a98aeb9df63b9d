"""The KV cache groups of a layout, classified as the block pool needs them.

A *paged* group has a block for every ``block_size`` tokens that a query can still read. A *state* group
(recurrent layers: Mamba, gated delta, short convolution) has one block per sequence, which every step
overwrites in place. If states are cached with prefixes, the state moves to a new block when a step ends in
another block of tokens than the step before (`tonnage.cache.groups.states`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tonnage.cache.errors import CacheConfigError
from tonnage.planner.model.layout import KVGroup, KVLayout

# The kinds of groups, by the positions that a query reads. FULL: all positions up to its own. SLIDING: the last
# ``window`` positions up to its own. CHUNKED: its own chunk of ``window`` positions, up to its own. STATE: a
# recurrent state that is overwritten in place. ALIGNED: a recurrent state that is cached at the end of blocks.
FULL, SLIDING, CHUNKED, STATE, ALIGNED = range(5)
# A step at position p continues from the recurrent state after position p - 1. A cached state therefore needs
# the same blocks as a sliding window of two positions.
STATE_WINDOW = 2
# cached states that a sequence holds per state group: one it continues from, one it writes
MOST_STATES = 2
GROUP = np.dtype([("kind", np.int64), ("window", np.int64)])

_KINDS = {"full": FULL, "mla": FULL, "sliding": SLIDING, "chunked": CHUNKED, "state": STATE}


def kind_of(group: KVGroup) -> int:
    """Return the kind of a KV cache group: FULL, SLIDING, CHUNKED or STATE."""
    kind = _KINDS[group.kind]
    return FULL if kind in (SLIDING, CHUNKED) and group.window is None else kind


def in_order(layout: KVLayout) -> tuple[KVGroup, ...]:
    """Return the KV cache groups in the order of the block manager's arrays: state groups come last."""
    return tuple(sorted(layout.groups, key=lambda group: group.kind == "state"))


def group_records(layout: KVLayout, aligned: bool = False) -> npt.NDArray[np.void]:
    """Return one record (kind, window in tokens) per KV cache group: paged groups first, then state groups.

    ``window`` is 0 for a group without a window. ``aligned`` says that recurrent states are cached with
    prefixes.
    """

    def record(group: KVGroup) -> tuple[int, int]:
        kind = kind_of(group)
        if kind == STATE and aligned:
            return ALIGNED, STATE_WINDOW
        return kind, (group.window or 0) if kind in (SLIDING, CHUNKED) else 0

    return np.array([record(group) for group in in_order(layout)], GROUP)


def paged(layout: KVLayout) -> tuple[KVGroup, ...]:
    """Return the KV cache groups that have block tables, in the layout's order."""
    return tuple(group for group in layout.groups if group.kind != "state")


def num_states(layout: KVLayout) -> int:
    """Return the number of blocks that a sequence holds for its recurrent states."""
    return len(layout.groups) - len(paged(layout))


def can_cache_states(layout: KVLayout) -> bool:
    """Return whether recurrent states can be cached with the prefixes of full-attention groups.

    The layout needs full-attention and state groups, and states that can be stored at the ends of blocks.
    Without a full-attention group no chain of blocks leads to a cached state.
    """
    states = [group for group in layout.groups if group.kind == "state"]
    aligned = all(group.block_size in (None, layout.block_size) for group in states)
    return bool(states) and aligned and any(group.kind in ("full", "mla") for group in layout.groups)


def state_every(interval: int | None, block_size: int) -> int:
    """Convert `prefix_cache_retention_interval` from tokens to blocks; None (keep every state) gives 1.

    Raises CacheConfigError for a number that is not a multiple of the block size.
    """
    if interval is None:
        return 1
    if interval < 0 or interval % block_size:
        raise CacheConfigError(
            f"{interval} is not a multiple of the block size, {block_size}",
            field="prefix_cache_retention_interval",
            hint="0 keeps states only where prompts end and diverge",
        )
    return interval // block_size


def windows_only(layout: KVLayout) -> bool:
    """Return whether every KV cache group has a sliding window (Mistral 7B v0.1, Phi-3, StarCoder2)."""
    return all(kind_of(group) == SLIDING for group in layout.groups)


def anchor_of(groups: npt.NDArray[np.void]) -> int:
    """Return the index of the anchor group, whose block ids name the nodes of the prefix index.

    The anchor is the first full-attention group. If all groups have sliding windows, it is the group with the
    largest window: a sequence that holds a node's block in any group then also holds the node's block in the
    anchor. ``groups`` are the records from `group_records`.
    """
    full = np.flatnonzero(groups["kind"] == FULL)
    return int(full[0]) if len(full) else int(groups["window"].argmax())


def num_full(layout: KVLayout) -> int:
    """Return the number of full-attention groups, which keep the K/V of every token."""
    return sum(kind_of(group) == FULL for group in layout.groups)


def check_groups(layout: KVLayout) -> None:
    """Raise CacheConfigError for a layout whose groups cannot share one pool, naming the group."""
    for group in layout.groups:
        if group.kind not in _KINDS:
            raise CacheConfigError(f"the KV cache group kind {group.kind!r} is not supported", field="layout")
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
                hint="all groups of a pool need the same block size",
            )
