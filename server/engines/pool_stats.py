"""The block manager's state as the PoolStats of an engine that has one (hf, fake)."""

from __future__ import annotations

from tonnage.cache.admission.peak import growth_of, peak_of
from tonnage.cache.admission.policy import full_groups
from tonnage.cache.manager import KVCacheManager
from tonnage.server.engines.base import PoolStats


def pool_stats(manager: KVCacheManager) -> PoolStats:
    """A snapshot; costs tens of microseconds."""
    stats, rows = manager.stats(), manager.rows
    # Each group has its own blocks for the same positions; rows that are not in use are all zeros.
    waste = (int(rows.room.sum()) - int(rows.computed.sum())) * len(manager.tables)
    return PoolStats(
        num_blocks=stats.num_blocks,
        usable=stats.usable,
        used=stats.used,
        cached=stats.cached,
        free=stats.free,
        promised=stats.promised,
        evictions=stats.evictions,
        committed=_committed(manager),
        tail_waste_slots=waste,
    )


def _committed(manager: KVCacheManager) -> int | None:
    """Most blocks in use at one time if every running request goes on to its max_tokens.

    None where admission counts the sum of promises: requests that end at different times never hold all of it.
    """
    if manager.admission is None:
        return None
    snapshot, limits = manager.running(), manager.limits
    if not len(snapshot):
        return 0
    block_size, groups = limits.layout.block_size, full_groups(limits)
    growth = growth_of(snapshot, snapshot.output_left, block_size, limits.max_num_batched_tokens, groups)
    shared = snapshot.used - int(snapshot.private.sum())
    return min(limits.usable_blocks, snapshot.reserved + shared + groups * peak_of(growth, block_size))
