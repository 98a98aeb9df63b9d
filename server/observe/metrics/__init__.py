"""/metrics: one page over snapshots (plan, engine stats, counts of the API), one Metrics for each app.

Everything is built at the scrape from values that are there already, so a scrape never waits for the engine.
Clean snake case, base units, every label value present from the start; what is not measured is absent, not
zero. There are no ``_created`` series.

============== ===============================================================================
``memory``     planned and measured bytes by component and device
``config``     which plan, and the settings as numbers
``pool``       KV blocks by state, evictions, preemptions, prefix hits
``headroom``   what still fits, time to full, time to drain
``requests``   admission, outcomes, latencies, tenants
``vllm_names`` vLLM's names for all this (``--metrics-compat vllm``)
============== ===============================================================================
"""

from __future__ import annotations

from tonnage.server.engines.capacity import limits_of
from tonnage.server.observe.metrics.config import config_families
from tonnage.server.observe.metrics.families import Page
from tonnage.server.observe.metrics.headroom import Trend, headroom_families
from tonnage.server.observe.metrics.memory import memory_families
from tonnage.server.observe.metrics.pool import pool_families
from tonnage.server.observe.metrics.requests import (
    ADMISSIONS,
    latency_families,
    request_families,
    tenant_families,
)
from tonnage.server.observe.metrics.usage import Usage
from tonnage.server.observe.metrics.vllm_names import vllm_families
from tonnage.server.state import ServerState

__all__ = ["ADMISSIONS", "Metrics"]


class Metrics:
    """The page of one app; listens to its accounts from the start."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._limits = limits_of(state.plan)
        self._usage = Usage(state.accounts, self._limits)
        self._trend = Trend()
        self._page = Page(model=state.model_name)
        self._vllm = Page(model_name=state.model_name, engine="0")

    def render(self) -> bytes:
        """Prometheus text format 0.0.4."""
        state, page = self._state, self._page
        stats = state.engine.stats()
        memory_families(page, state, stats)
        config_families(page, state, stats)
        pool_families(page, state, stats)
        headroom_families(page, state, stats, self._usage, self._limits, self._trend)
        request_families(page, state, stats)
        latency_families(page, state)
        tenant_families(page, state, self._usage)
        text = page.take()
        if state.settings.metrics_compat == "vllm":
            vllm_families(self._vllm, state, stats)
            text += self._vllm.take()
        return text.encode()
