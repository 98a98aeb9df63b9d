"""Which cached block goes next: two lists by class, compared by age."""

from __future__ import annotations

from tonnage.cache.compiled import compiled
from tonnage.cache.state import CLOCK, COLD, HOT, Pool


@compiled
def oldest_to_evict(pool: Pool) -> int:
    """The cached block to forget; one must be cached. The older of the two classes' oldest, where a hot block
    ages ``slowness`` times slower than a cold one."""
    blocks = pool.refs.size
    cold, hot = int(pool.next[blocks + COLD]), int(pool.next[blocks + HOT])
    if cold >= blocks:
        return hot
    if hot >= blocks:
        return cold
    now = pool.counters[CLOCK]
    cold_age = (now - pool.time[cold]) & 0xFFFFFFFF
    hot_age = (now - pool.time[hot]) & 0xFFFFFFFF
    return hot if hot_age > cold_age * pool.slowness[HOT] else cold
