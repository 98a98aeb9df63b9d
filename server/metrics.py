"""/metrics: one collector over snapshots (plan, engine stats, counts of the API). Own registry for each app.

Everything is built at the scrape from values that are there already, so a scrape never waits for the engine.
Clean snake case, base units, every label value present from the start; what is not measured is absent, not
zero. The families are made by hand, which also leaves out the ``_created`` series.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tonnage.cache.admission import NeverReason, WaitReason
from tonnage.server.accounts import Histogram
from tonnage.server.report import measured_components, planned_components, promised_unused
from tonnage.server.state import ServerState

# Decisions that can occur; (wait, max_num_queued_reqs) and (never, max_num_queued_reqs) are made at the door.
ADMISSIONS: tuple[tuple[str, str], ...] = (
    ("admit", "fits"),
    *(("wait", str(reason)) for reason in WaitReason),
    ("wait", "max_num_queued_reqs"),
    *(("never", str(reason)) for reason in NeverReason),
    ("never", "max_num_queued_reqs"),
)


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

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are checked by promtool in the tests, and a registration must not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._memory()
        yield from self._pool()
        yield from self._requests()
        yield from self._latencies()

    def _memory(self) -> Iterator[Metric]:
        plan, stats = self._state.plan, self._state.engine.stats()
        memory = stats.memory
        yield self._gauges(
            "tonnage_memory_planned_bytes",
            "Bytes planned before the load (revision 0), by component; they add up to the device.",
            "component",
            planned_components(plan),
        )
        yield self._gauges(
            "tonnage_memory_measured_bytes",
            "Bytes the server really holds, by component; absent where not measured.",
            "component",
            measured_components(plan, memory),
        )
        if memory.process is not None:
            yield self._gauge(
                "tonnage_process_memory_bytes",
                "Anonymous plus shared memory of all processes of the server now.",
                memory.process,
            )
        if memory.process_peak is not None:
            yield self._gauge(
                "tonnage_process_memory_peak_bytes",
                "Largest anonymous plus shared memory of all processes of the server.",
                memory.process_peak,
            )
        info = GaugeMetricFamily(
            "tonnage_plan_info",
            "The plan the pool is sized by; always 1.",
            labels=("model", "plan_id", "revision", "engine", "architecture", "quantization"),
        )
        info.add_metric(
            (
                self._state.model_name,
                plan.plan_id,
                str(plan.revision),
                plan.deployment.engine,
                plan.model.architecture,
                plan.deployment.quantization or "none",
            ),
            1,
        )
        yield info
        yield self._gauge(
            "tonnage_engine_ready",
            "1 when the engine can serve, 0 while it loads or when it is dead.",
            int(self._state.started and stats.ready),
        )

    def _pool(self) -> Iterator[Metric]:
        stats = self._state.engine.stats()
        pool, layout = stats.pool, self._state.plan.kv_cache.layout
        states = {"used": pool.used, "cached": pool.cached, "free": pool.free}
        unused = promised_unused(pool)
        yield self._gauges(
            "tonnage_pool_blocks", "KV blocks by state; they add up to the usable blocks.", "state", states
        )
        yield self._gauges(
            "tonnage_pool_bytes",
            "Bytes of the KV blocks by state.",
            "state",
            {state: blocks * layout.bytes_per_block for state, blocks in states.items()},
        )
        yield self._gauge(
            "tonnage_pool_promised_unused_blocks",
            "KV blocks promised to admitted requests, not yet held.",
            unused,
        )
        yield self._gauge(
            "tonnage_pool_promised_unused_bytes",
            "Bytes of the KV blocks promised to admitted requests, not yet held.",
            unused * layout.bytes_per_block,
        )
        yield self._gauge(
            "tonnage_pool_usable_blocks", "KV blocks that can hold tokens (the null block is not).", pool.usable
        )
        yield self._gauge("tonnage_pool_block_size_tokens", "Tokens in a KV block.", layout.block_size)
        yield self._counter("tonnage_evictions", "Cached KV blocks given to new tokens.", pool.evictions)

    def _requests(self) -> Iterator[Metric]:
        stats, accounts = self._state.engine.stats(), self._state.accounts
        yield self._gauges(
            "tonnage_requests",
            "Requests in the engine by state.",
            "state",
            {"running": stats.running, "waiting": stats.waiting},
        )
        decisions = dict.fromkeys(ADMISSIONS, 0)
        for outcome, reason, count in stats.admissions:
            key = (outcome, str(reason))
            decisions[key] = decisions.get(key, 0) + count
        for key, count in accounts.refused.items():
            decisions[key] = decisions.get(key, 0) + count
        family = CounterMetricFamily(
            "tonnage_admission_decisions",
            "Admission decisions; a request that waits is counted as wait once and as admit when it runs.",
            labels=("model", "outcome", "reason"),
        )
        for (outcome, reason), count in decisions.items():
            family.add_metric((self._state.model_name, outcome, reason), count)
        yield family
        yield self._counter(
            "tonnage_requests_received",
            "Requests to generating endpoints; equals the sum of tonnage_requests_total plus those in flight.",
            accounts.received,
        )
        yield self._gauge(
            "tonnage_requests_in_flight", "Requests received that have no outcome yet.", accounts.in_flight
        )
        outcomes = CounterMetricFamily(
            "tonnage_requests", "Requests by their one outcome.", labels=("model", "outcome")
        )
        for outcome, count in accounts.outcomes.items():
            outcomes.add_metric((self._state.model_name, outcome), count)
        yield outcomes
        yield self._counter("tonnage_prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens)
        yield self._counter("tonnage_generation_tokens", "Tokens generated.", stats.generation_tokens)
        yield self._counter(
            "tonnage_prefix_hit_tokens",
            "Prompt tokens whose K/V came from the prefix cache.",
            stats.prefix_hit_tokens,
        )
        yield self._counter("tonnage_preemptions", "Running requests put back to waiting.", stats.preemptions)

    def _latencies(self) -> Iterator[Metric]:
        accounts = self._state.accounts
        yield self._histogram(
            "tonnage_time_to_first_token_seconds",
            "Seconds from the arrival of a request to its first token.",
            accounts.time_to_first_token,
        )
        yield self._histogram(
            "tonnage_inter_token_latency_seconds",
            "Seconds between two tokens of a sequence.",
            accounts.inter_token_latency,
        )
        yield self._histogram(
            "tonnage_request_duration_seconds",
            "Seconds from the arrival of a request to its end (outcomes stop and length).",
            accounts.request_duration,
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model",))
        family.add_metric((self._state.model_name,), value)
        return family

    def _gauges(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model", label))
        for key, value in values.items():
            family.add_metric((self._state.model_name, key), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model",))
        family.add_metric((self._state.model_name,), value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        borders = [*map(str, map(float, histogram.borders)), "+Inf"]
        family = HistogramMetricFamily(name, text, labels=("model",))
        counts = list(accumulate(histogram.counts))
        family.add_metric((self._state.model_name,), list(zip(borders, counts, strict=True)), histogram.total)
        return family
