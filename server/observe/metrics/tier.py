"""Metrics of the hf engine's KV tier, which keeps evicted blocks in host memory and on disk.

The metrics of the disk have the names that Tonnage's disk tier inside vLLM uses, too. `tonnage watch` exports
the KV tier of a watched server under the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from tonnage.cache.disk.metrics import GAUGES, METRICS
from tonnage.server.engines.stats import TierStats
from tonnage.server.observe.metrics.families import Page

# Names and descriptions of the metrics of host memory, and of the time that the whole tier saves and costs. The
# names lack the prefix ``tonnage_tier_``.
HOST_GAUGES = ("host_size", "host_used", "host_blocks")
HOST_METRICS = {
    "host_size": "Planned bytes of the KV tier's host memory.",
    "host_used": "Bytes of the blocks in the KV tier's host memory.",
    "host_blocks": "Blocks in the KV tier's host memory.",
    "host_stored": "Blocks copied from the pool to host memory.",
    "host_evicted": "Blocks removed from host memory to make room.",
    "host_left_out": "Blocks not copied to host memory, because they were not worth their bytes.",
    "host_hit_tokens": "Tokens loaded from the KV tier instead of being computed; those read from disk, too.",
    "host_load_seconds": "Seconds of copies from host memory to the pool.",
    "saved_seconds": "Estimated seconds of prefill that blocks loaded from the KV tier saved.",
    "spent_seconds": "Seconds that the KV tier took: copies, and reads that requests waited for.",
}


def host_metric_name(name: str) -> str:
    """Return the Prometheus name of `name`, a KV tier's metric in `HOST_METRICS`; a counter gets ``_total``."""
    return f"tonnage_tier_{name}" if name in HOST_GAUGES else f"tonnage_tier_{name}_total"


def tier_families(page: Page, tier: TierStats | None, block_size: int) -> None:
    """Write the metrics of a KV tier (blocks, bytes, hits in host memory and on disk); none without a tier.

    Args:
        page: the metrics page to write to.
        tier: statistics of the tier.
        block_size: tokens of a block.
    """
    if tier is None:
        return
    values = {**asdict(tier), "host_hit_tokens": tier.host_hit_blocks * block_size}
    write_tier(page, {name: values[name] for name in HOST_METRICS} | (values["disk"] or {}))


def write_tier(page: Page, values: Mapping[str, float | None]) -> None:
    """Write metrics of a KV tier.

    Args:
        page: the metrics page to write to.
        values: values by name in `HOST_METRICS` or `tonnage.cache.disk.metrics.METRICS`; None writes nothing.
    """
    texts = HOST_METRICS | METRICS
    for name, value in values.items():
        write = page.gauge if name in (*HOST_GAUGES, *GAUGES) else page.counter
        write(f"tonnage_tier_{name}", texts[name], value)
