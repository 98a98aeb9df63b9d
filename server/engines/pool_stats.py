"""The block manager's state as the PoolStats of an engine that has one (hf, fake)."""

from __future__ import annotations

import logging

from tonnage.cache.admission.peak import growth_of, peak_of
from tonnage.cache.blocks.groups import num_full
from tonnage.cache.manager import KVCacheManager
from tonnage.planner.errors import DeploymentError
from tonnage.server.engines.base import PoolStats
from tonnage.server.engines.sharing import Sharing

log = logging.getLogger("tonnage.server")

# Steps between two looks at the laws. One takes 2 ms where all of 262,144 blocks are cached (test machine).
LAWS_EVERY = 1024


def sample_laws(manager: KVCacheManager, step: int) -> None:
    """Every so many steps, look whether the block manager's laws hold; a broken one is logged and counted."""
    if step % LAWS_EVERY == 0 and (law := manager.sample_invariants()) is not None:
        log.error("the block manager broke its law of %s; restart this engine and report it", law)


def share(manager: KVCacheManager, sharing: Sharing) -> None:
    """Let the manager publish and share what the settings say. Raises DeploymentError for an endpoint that
    cannot be bound."""
    for prefix in sharing.prefixes:
        manager.allow_prefix(prefix)
    if sharing.events is not None:
        import zmq  # of the server's extra, and only where somebody listens

        from tonnage.server.observe.kv_events import KVEventPublisher

        try:
            publisher = KVEventPublisher.of(sharing.events)
        except zmq.ZMQError as error:
            raise DeploymentError(
                f"cannot bind {sharing.events.endpoint} or its replay endpoint: {error}",
                field="kv_events_config",
            ) from None
        manager.subscribe(publisher.publish)


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
        reserved=stats.reserved,
        evictions=stats.evictions,
        evictions_by_cause=stats.evictions_by_cause,
        committed=_committed(manager),
        tail_waste_slots=waste,
    )


def _committed(manager: KVCacheManager) -> int | None:
    """Most blocks in use at one time if every running request goes on to its max_tokens.

    None where admission counts the sum of reservations: requests that end at different times never hold all of
    it.
    """
    groups = num_full(manager.limits.layout)
    if manager.admission is None or groups == 0:
        return None
    snapshot, limits = manager.running(), manager.limits
    if not len(snapshot):
        return 0
    block_size = limits.layout.block_size
    growth = growth_of(snapshot, snapshot.output_left, block_size, limits.max_num_batched_tokens, groups)
    shared = snapshot.used - int(snapshot.private.sum())
    return min(limits.usable_blocks, snapshot.windowed + shared + groups * peak_of(growth, block_size))
