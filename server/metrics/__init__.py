"""/metrics: one collector over snapshots (plan, engine stats, counts of the API). Own registry for each app.

Everything is built at the scrape from values that are there already, so a scrape never waits for the engine.
Clean snake case, base units, every label value present from the start; what is not measured is absent, not
zero. The families are made by hand, which also leaves out the ``_created`` series.

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

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tonnage.server.engines.base import limits_of
from tonnage.server.metrics.config import config_families
from tonnage.server.metrics.families import Families
from tonnage.server.metrics.headroom import Trend, headroom_families
from tonnage.server.metrics.memory import memory_families
from tonnage.server.metrics.pool import pool_families
from tonnage.server.metrics.requests import (
    ADMISSIONS,
    latency_families,
    request_families,
    tenant_families,
)
from tonnage.server.metrics.usage import Usage
from tonnage.server.metrics.vllm_names import vllm_families
from tonnage.server.state import ServerState

__all__ = ["ADMISSIONS", "Metrics", "StateCollector"]


class Metrics:
    """The registry of one app."""

    def __init__(self, state: ServerState) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(StateCollector(state))

    def render(self) -> bytes:
        """Prometheus text format 0.0.4."""
        return generate_latest(self.registry)


class StateCollector(Collector):
    """Reads one ServerState."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._limits = limits_of(state.plan)
        self._usage = Usage(state.accounts, self._limits)
        self._trend = Trend()
        self._make = Families(state.model_name)

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are checked by promtool in the tests, and a registration must not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        state, make = self._state, self._make
        stats = state.engine.stats()
        yield from memory_families(make, state, stats)
        yield from config_families(make, state, stats)
        yield from pool_families(make, state, stats)
        yield from headroom_families(make, state, stats, self._usage, self._limits, self._trend)
        yield from request_families(make, state, stats)
        yield from latency_families(make, state)
        yield from tenant_families(make, state, self._usage)
        if state.settings.metrics_compat == "vllm":
            yield from vllm_families(state, stats)
