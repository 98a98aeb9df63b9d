"""The /metrics page of one app, written from its plan, its engine's statistics and the API's counts.

A scrape reads only values that exist already, so it never waits for the engine. Names are in snake case with
base units. Every label value is present from the start. A value that is not measured is absent, not zero. There
are no ``_created`` series.

============== ===============================================================================
``families``   the writer of the Prometheus text format
``memory``     planned and measured bytes by component and device
``config``     the plan, and the settings as numbers
``pool``       KV blocks by state, evictions, preemptions, prefix hits
``headroom``   requests and tokens that still fit, time to full, time to drain
``requests``   admission, outcomes, latencies, tenants
``usage``      average size of requests, use by tenant
``auto``       step costs and the rule of the admission mode ``auto``
``tier``       blocks, bytes and hits of the hf engine's KV tier
``vllm_names`` vLLM's names for these metrics (``--metrics-compat vllm``)
============== ===============================================================================
"""

from __future__ import annotations

import time

from tonnage.server.engines.capacity import limits_of
from tonnage.server.engines.stats import EngineStats
from tonnage.server.observe.memory_report import CapacityForecast
from tonnage.server.observe.metrics.auto import auto_families
from tonnage.server.observe.metrics.config import engine_families, plan_families
from tonnage.server.observe.metrics.families import Page
from tonnage.server.observe.metrics.headroom import (
    FOREVER_SECONDS,
    Headroom,
    Trend,
    drain_seconds,
    headroom,
    headroom_families,
)
from tonnage.server.observe.metrics.memory import memory_families
from tonnage.server.observe.metrics.pool import difference_families, pool_families
from tonnage.server.observe.metrics.requests import (
    admission_families,
    engine_request_families,
    latency_families,
    request_families,
    tenant_families,
)
from tonnage.server.observe.metrics.tier import tier_families
from tonnage.server.observe.metrics.usage import Usage
from tonnage.server.observe.metrics.vllm_names import vllm_families
from tonnage.server.state import ServerState


class Metrics:
    """The /metrics page of one app; it counts the app's requests from the moment it is created."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._limits = limits_of(state.plan)
        self._usage = Usage(state.accounts, self._limits)
        self._trend = Trend()
        self._page = Page(model=state.model_name)
        self._vllm = Page(model_name=state.model_name, engine="0")

    def capacity_forecast(self) -> CapacityForecast:
        """Forecast how many requests and tokens still fit, and when the KV pool will be full or drained."""
        stats, counts = self._state.engine.stats(), self._state.accounts
        found = self._headroom(stats)
        self._trend.observe(time.monotonic(), stats.pool.usable - found.blocks)
        full = self._trend.seconds_to(found.blocks)
        return CapacityForecast(
            found.requests,
            found.prompt_tokens,
            None if full >= FOREVER_SECONDS else full,
            drain_seconds(counts),
        )

    def _headroom(self, stats: EngineStats) -> Headroom:
        tokens = self._state.settings.default_max_tokens
        return headroom(stats.pool, stats.running, self._usage.mix, self._limits, tokens)

    def render(self) -> bytes:
        """Return the current /metrics page in the Prometheus text format 0.0.4."""
        state, page = self._state, self._page
        stats = state.engine.stats()
        plan, settings, counts = state.plan, state.settings, state.accounts
        pool, layout = stats.pool, plan.kv_cache.layout
        ready = state.started and stats.ready
        memory_families(page, plan, stats.memory)
        plan_families(
            page, [plan, state.engine.capacity().plan] if ready else [plan], settings.max_num_queued_reqs
        )
        engine_families(page, stats, stats.admission_mode or settings.admission_mode, ready=ready)
        pool_families(page, layout, stats)
        difference_families(page, plan, pool.num_blocks)
        headroom_families(page, self._headroom(stats), pool.usable, layout.bytes_per_block, self._trend, counts)
        engine_request_families(page, stats)
        admission_families(page, stats, counts.refused)
        auto_families(page, stats.auto)
        tier_families(page, stats.tier, layout.block_size)
        request_families(page, counts)
        latency_families(page, counts)
        tenant_families(page, self._usage.tenants, layout.bytes_per_block)
        text = page.take()
        if state.settings.metrics_compat == "vllm":
            vllm_families(self._vllm, state, stats)
            text += self._vllm.take()
        return text.encode()
