"""Which cached block goes next: two lists by class, compared by age."""

from __future__ import annotations

from tonnage.cache.compiled import compiled
from tonnage.cache.state import CLASSES, CLOCK, CLOCK_MASK, COLD, HOT, NEXT, TIME, Core


@compiled
def oldest_to_evict(core: Core) -> int:
    """The cached block to forget; one must be cached. The older of the two classes' oldest, where a hot block
    ages ``slowness`` times slower than a cold one."""
    blocks = core.blocks
    size = blocks.shape[1] - CLASSES
    cold, hot = int(blocks[NEXT, size + COLD]), int(blocks[NEXT, size + HOT])
    if cold >= size:
        return hot
    if hot >= size:
        return cold
    now = core.counters[CLOCK]
    cold_age = (now - blocks[TIME, cold]) & CLOCK_MASK
    hot_age = (now - blocks[TIME, hot]) & CLOCK_MASK
    return hot if hot_age > cold_age * core.slowness[HOT] else cold
