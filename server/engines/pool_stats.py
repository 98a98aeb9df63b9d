"""The block manager's state as the PoolStats of an engine that has one (hf, fake)."""

from __future__ import annotations

from tonnage.cache.manager import KVCacheManager
from tonnage.server.engines.base import PoolStats


def pool_stats(manager: KVCacheManager) -> PoolStats:
    """A snapshot; costs a few microseconds."""
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
        tail_waste_slots=waste,
    )
