"""Creation of the block manager from a plan, and statistics of manager and scheduler (hf and fake engines)."""

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

# Steps between two checks of the invariants. One takes 2 ms with all of 262,144 blocks cached (test machine).
LAWS_EVERY = 1024


def new_manager(plan: Plan, policy: Policy | None, *, kv_events: bool = False) -> KVCacheManager:
    """Create the block manager of the plan's pool. ``policy`` None means guaranteed mode.

    Raises:
        DeploymentError: the plan leaves a limit open.
    """
    limits = limits_of(plan)
    return KVCacheManager(
        limits.layout,
        plan.kv_cache.num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        enable_prefix_caching=bool(plan.deployment.enable_prefix_caching),  # make_plan has filled it in
        policy=policy or Policy(),
        kv_events=kv_events,
    )


def sample_laws(manager: KVCacheManager, step: int) -> None:
    """Check the block manager's invariants at regular steps; log and count a violation."""
    if step % LAWS_EVERY == 0 and (law := manager.sample_invariants()) is not None:
        log.error("the block manager's invariant %s does not hold; restart this engine and report it", law)


def share(manager: KVCacheManager, sharing: Sharing) -> None:
    """Connect the manager to the configured event publisher and shared prefixes.

    Raises:
        DeploymentError: an endpoint cannot be bound.
    """
    for prefix in sharing.prefixes:
        manager.allow_prefix(prefix)
    if sharing.events is not None:
        # The extra `events` is optional.
        import zmq

        # This module imports zmq and msgspec at its top.
        from tonnage.server.engines.kv_events import KVEventPublisher

        try:
            publisher = KVEventPublisher.of(sharing.events)
        except zmq.ZMQError as error:
            raise DeploymentError(
                f"cannot bind {sharing.events.endpoint} or its replay endpoint: {error}",
                field="kv_events_config",
            ) from None
        manager.subscribe(publisher.publish)


def engine_stats(scheduler: Scheduler[S], generation_tokens: int, *, ready: bool = True) -> EngineStats:
    """Return the engine's statistics without measured memory; takes tens of microseconds."""
    counters = scheduler.counters
    return EngineStats(
        ready=ready,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        pool=pool_stats(scheduler.manager),
        admissions=tuple((*key, count) for key, count in counters.admissions.items()),
        refused_blocks=tuple((*key, count) for key, count in counters.missing_blocks.items()),
        preemptions=counters.preemptions,
        preempted_tokens=counters.preempted_tokens,
        prompt_tokens=counters.prompt_tokens,
        generation_tokens=generation_tokens,
        prefix_hit_tokens=counters.prefix_hit_tokens,
        shared_hit_tokens=counters.shared_hit_tokens,
        invariant_violations=scheduler.manager.stats().violations,
        auto=stats_of_auto(scheduler.admission.auto),
    )


def pool_stats(manager: KVCacheManager) -> PoolStats:
    """Return a snapshot of the block pool; takes tens of microseconds."""
    stats, rows = manager.stats(), manager.rows
    # Each group has its own blocks for the same positions; unused rows are all zeros.
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
