"""Creation of the block manager from a plan, and statistics of block manager and scheduler.

The HF and the fake engine use this module.
"""

from __future__ import annotations

import logging

from tonnage.cache.admission import Policy
from tonnage.cache.manager import KVCacheManager
from tonnage.cache.scheduler import S, Scheduler
from tonnage.planner.errors import DeploymentError
from tonnage.planner.plans import Plan
from tonnage.server.engines.capacity import limits_of
from tonnage.server.engines.sharing import Sharing
from tonnage.server.engines.stats import EngineStats, PoolStats, stats_of_auto

log = logging.getLogger("tonnage.server")

# Steps between two checks of the block manager's invariants. A check takes 2 ms if all of 262,144 blocks are
# cached (test machine).
LAWS_EVERY = 1024


def new_manager(plan: Plan, policy: Policy | None, *, kv_events: bool = False) -> KVCacheManager:
    """Create the KV block manager for the pool of a memory plan.

    Args:
        plan: the memory plan.
        policy: admission policy; None means guaranteed mode.
        kv_events: whether the manager reports KV events.

    Raises:
        DeploymentError: the plan has no value for a limit.
    """
    limits = limits_of(plan)
    return KVCacheManager(
        limits.layout,
        plan.kv_cache.num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        # The value is not None here, because make_plan has replaced None by the engine's default.
        enable_prefix_caching=bool(plan.deployment.enable_prefix_caching),
        policy=policy or Policy(),
        kv_events=kv_events,
    )


def sample_laws(manager: KVCacheManager, step: int) -> None:
    """Check the KV block manager's invariants every `LAWS_EVERY` steps; log and count a violation."""
    if step % LAWS_EVERY == 0 and (law := manager.sample_invariants()) is not None:
        log.error("the block manager's invariant %s does not hold; restart this engine and report it", law)


def share(manager: KVCacheManager, sharing: Sharing) -> None:
    """Start the configured publisher of KV events, and let all cache salts share the configured prefixes.

    Raises:
        DeploymentError: an endpoint of the publisher cannot be bound.
    """
    for prefix in sharing.prefixes:
        manager.allow_prefix(prefix)
    if sharing.events is not None:
        # Imported here, because zmq belongs to the optional extra "events".
        import zmq

        # Imported here, because kv_events imports zmq and msgspec, which are optional.
        from tonnage.server.engines.kv_events import KVEventPublisher

        try:
            publisher = KVEventPublisher.of(sharing.events)
        except zmq.ZMQError as error:
            raise DeploymentError(
                f"cannot bind {sharing.events.endpoint} or its replay endpoint: {error}",
                field="kv_events_config",
            ) from None
        manager.subscribe(publisher.publish)


def engine_stats(
    manager: KVCacheManager, scheduler: Scheduler[S], generation_tokens: int, *, ready: bool = True
) -> EngineStats:
    """Return the statistics of scheduler and KV block pool, without measured memory.

    This takes tens of microseconds.
    """
    counters = scheduler.counters
    return EngineStats(
        ready=ready,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        pool=pool_stats(manager),
        admissions=tuple((*key, count) for key, count in counters.admissions.items()),
        refused_blocks=tuple((*key, count) for key, count in counters.missing_blocks.items()),
        preemptions=counters.preemptions,
        preempted_tokens=counters.preempted_tokens,
        prompt_tokens=counters.prompt_tokens,
        generation_tokens=generation_tokens,
        prefix_hit_tokens=counters.prefix_hit_tokens,
        shared_hit_tokens=counters.shared_hit_tokens,
        invariant_violations=manager.violations,
        auto=stats_of_auto(manager.admission.auto),
    )


def pool_stats(manager: KVCacheManager) -> PoolStats:
    """Return a snapshot of the KV block pool's statistics; this takes tens of microseconds."""
    stats, rows = manager.stats(), manager.rows
    # Token slots of used blocks that hold no token. Every KV cache group has blocks for the same positions, so
    # the number for one group is multiplied by the number of groups. Unused array rows are zero.
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
        committed=manager.admission.committed(),
        tail_waste_slots=waste,
    )
