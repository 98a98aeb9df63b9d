"""Metrics of the KV pool: blocks by state, evictions, preemptions and prefix hits."""

from __future__ import annotations

from tonnage.cache.results import EVICTION_CAUSES
from tonnage.planner.model.layout import KVLayout
from tonnage.planner.plans import Plan
from tonnage.server.engines.stats import EngineStats
from tonnage.server.observe.memory_report import reserved_unused
from tonnage.server.observe.metrics.families import Page


def difference_families(page: Page, plan: Plan, num_blocks: int) -> None:
    """Write the difference between the KV blocks that the engine has and the planned ones.

    Args:
        page: the metrics page to write to.
        plan: the plan of the deployment.
        num_blocks: number of blocks that the engine has, including the null block.
    """
    difference = num_blocks - plan.kv_cache.num_blocks
    page.gauge(
        "tonnage_pool_difference_blocks",
        "KV blocks that the engine has minus planned KV blocks.",
        difference,
    )
    page.gauge(
        "tonnage_pool_difference_bytes",
        "Bytes of the KV blocks that the engine has minus planned bytes.",
        difference * plan.kv_cache.layout.bytes_per_block,
    )


def pool_families(page: Page, layout: KVLayout | None, stats: EngineStats) -> None:
    """Write the KV pool's blocks by state, evictions, preemptions and prefix hits.

    Args:
        page: the metrics page to write to.
        layout: layout of the KV cache. None when there is no plan; then only numbers of blocks are written, no
            bytes.
        stats: statistics of the engine.
    """
    pool = stats.pool
    states = {
        ("used",): pool.used,
        ("cached",): pool.cached,
        ("free",): pool.free,
        ("reserved",): pool.num_blocks - pool.usable,
    }
    units = [("blocks", 1, "KV blocks")]
    if layout is not None:
        units.append(("bytes", layout.bytes_per_block, "Bytes of the KV blocks"))
        units.append(("tokens", layout.block_size, "Token slots of the KV blocks"))
    for unit, factor, text in units:
        page.gauges(
            f"tonnage_pool_{unit}",
            f"{text} by state: used by running requests, cached (reclaimable prefixes), free, reserved (never "
            "given out); they add up to the pool.",
            ("state",),
            {key: blocks * factor for key, blocks in states.items() if blocks is not None},
        )
    page.gauge("tonnage_pool_usable_blocks", "KV blocks that can hold tokens.", pool.usable)
    page.gauge(
        "tonnage_pool_usage_ratio",
        "Used blocks over usable blocks; cached blocks do not count as used.",
        pool.used / pool.usable if pool.usable else 0.0,
    )
    unused = reserved_unused(pool)
    page.gauge(
        "tonnage_pool_promised_unused_blocks",
        "KV blocks reserved to admitted requests, not yet held.",
        unused,
    )
    if layout is not None:
        page.gauge(
            "tonnage_pool_promised_unused_bytes",
            "Bytes of the KV blocks reserved to admitted requests, not yet held.",
            unused * layout.bytes_per_block,
        )
    if pool.tail_waste_slots is not None:
        page.gauge(
            "tonnage_pool_tail_waste_tokens",
            "Token slots in used blocks that hold no token yet: the unfilled ends of the sequences.",
            pool.tail_waste_slots,
        )
        if layout is not None:
            page.gauge(
                "tonnage_pool_tail_waste_bytes",
                "Bytes of the token slots in used blocks that hold no token yet.",
                pool.tail_waste_slots * layout.bytes_per_block // layout.block_size,
            )
    if pool.evictions_by_cause:
        page.counters(
            "tonnage_evictions",
            "Cached KV blocks evicted, by cause: K/V of prompts (prefill), of outputs (decode), a copy of a "
            "block that sequences had shared (copy_on_write), or a reset of the whole cache.",
            ("cause",),
            {(name,): count for name, count in zip(EVICTION_CAUSES, pool.evictions_by_cause, strict=True)},
        )
    page.counter("tonnage_preemptions", "Running requests put back to waiting.", stats.preemptions)
    page.counter(
        "tonnage_preempted_tokens",
        "Computed tokens that preemptions discarded and that are computed again.",
        stats.preempted_tokens,
    )
    page.counter(
        "tonnage_prefix_query_tokens",
        "Prompt tokens that were looked up in the prefix cache.",
        stats.prompt_tokens,
    )
    page.counters(
        "tonnage_prefix_hit_tokens",
        "Prompt tokens whose K/V was cached, by the block's visibility: only requests with the same salt "
        "(salt), or all requests (shared); unknown where the engine does not report it.",
        ("source",),
        {("unknown",): stats.prefix_hit_tokens}
        if stats.shared_hit_tokens is None
        else {
            ("salt",): stats.prefix_hit_tokens - stats.shared_hit_tokens,
            ("shared",): stats.shared_hit_tokens,
        },
    )
