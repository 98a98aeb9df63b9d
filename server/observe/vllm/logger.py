"""The stat logger that adds Tonnage's metrics to the `/metrics` page of a plain `vllm serve`.

vLLM loads it by its entry point (group `vllm.stat_logger_plugins`, name `tonnage`) when tonnage is installed in
its environment, unless `VLLM_PLUGINS` leaves that name out. It runs in vLLM's API process. The plan is made
from vLLM's own config. For a model that the planner rejects there is no plan, and only the metrics of the plan
are absent. An exception in this module is counted, logged once, and never reaches vLLM. Written against vLLM
0.30 to 0.33.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from prometheus_client import REGISTRY, Metric
from prometheus_client.registry import Collector
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from tonnage.cache.admission import Limits
from tonnage.planner.errors import TonnageError
from tonnage.planner.planning.build import make_plan
from tonnage.planner.plans import Plan
from tonnage.planner.units import gib
from tonnage.server.engines.capacity import limits_of
from tonnage.server.engines.process_memory import PeakSampler
from tonnage.server.engines.stats import EngineStats, MeasuredMemory
from tonnage.server.engines.vllm import figures
from tonnage.server.engines.vllm.client_errors import return_rejections
from tonnage.server.engines.vllm.deployment import read_config, served_name
from tonnage.server.engines.vllm.stats_transport import take_stats
from tonnage.server.observe.metrics.auto import auto_families
from tonnage.server.observe.metrics.config import engine_families, plan_families
from tonnage.server.observe.metrics.headroom import Trend, headroom, headroom_families
from tonnage.server.observe.metrics.memory import memory_families
from tonnage.server.observe.metrics.pool import difference_families, pool_families
from tonnage.server.observe.metrics.requests import (
    admission_families,
    engine_request_families,
    latency_families,
    request_families,
    tenant_families,
)
from tonnage.server.observe.metrics.usage import NO_TENANT
from tonnage.server.observe.vllm.engine_totals import EngineTotals
from tonnage.server.observe.vllm.page import CollectedPage

logger = init_logger(f"vllm.{__name__}")  # vLLM shows only messages of loggers whose names begin with "vllm."

# Default max_tokens of a /v1/completions request (vLLM's SamplingParams and OpenAI's API).
_DEFAULT_MAX_TOKENS = 16
# Seconds between two memory samples of vLLM's processes, long enough for sampling not to slow vLLM noticeably.
_SAMPLE_SECONDS = 0.25


class TonnageStatLogger(AggregateStatLoggerBase, Collector):
    """A vLLM stat logger for all engines of an API process, which is also their prometheus_client collector."""

    # the logger that is registered now; vLLM creates a new one when it changes the number of engines
    _registered: TonnageStatLogger | None = None

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        self._engines: dict[int, EngineMetrics] = {}
        self._errors = 0
        self._name = ""
        self._sampler: PeakSampler | None = None
        self._workers = figures.WorkerMemory()
        parallel = vllm_config.parallel_config
        if parallel.worker_extension_cls.startswith("tonnage."):
            return  # `tonnage serve --backend vllm` started this vLLM, and has the metrics on its own page
        with self._guarded("at start"):
            # This call lets vLLM's API process return Tonnage's rejections to the client. It stands here,
            # because the stat logger is the only code of Tonnage in the API process of a plain vLLM.
            return_rejections()
        if getattr(parallel, "_api_process_count", 1) > 1:
            logger.warning(
                "Tonnage shows no metrics: with several API servers vLLM builds its page from files of its "
                "own. Start vLLM with --api-server-count 1."
            )
            return
        plan = None
        with self._guarded("while planning"):
            plan = _plan(vllm_config)
        with self._guarded("at start"):
            self._name = served_name(vllm_config)
            self._register()
            # vLLM's workers have loaded the model and stored their measured bytes
            self._workers = figures.read()
            if vllm_config.device_config.device_type == "cpu":
                self._sampler = PeakSampler(interval=_SAMPLE_SECONDS)
                self._sampler.start()
            # num_gpu_blocks is the sum over all engines of this process; they have equally many blocks.
            blocks = (vllm_config.cache_config.num_gpu_blocks or 0) // max(1, len(engine_indexes))
            queued = getattr(vllm_config.scheduler_config, "max_num_queued_reqs", None)
            caching = bool(vllm_config.cache_config.enable_prefix_caching)
            for index in engine_indexes:
                self._engines[index] = EngineMetrics(plan, blocks, queued, caching=caching)
            if plan is not None:
                _log_difference(plan, blocks)

    # -- methods that vLLM calls -----------------------------------------------------------------------------

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Add vLLM's statistics of one scheduler step to an engine's totals."""
        engine = self._engines.get(engine_idx)
        with self._guarded("after a step"):
            if engine is not None:
                engine.totals.record(scheduler_stats, iteration_stats)
            elif scheduler_stats is not None:
                # Tonnage's scheduler put its values into this field; remove them, so that vLLM's own metrics
                # page does not show them
                take_stats(scheduler_stats.waiting_lora_adapters)

    def record_admission_rejection(self, reason: str) -> None:
        """Count a request that vLLM's front end rejected."""
        with self._guarded("at a rejection"):
            # A rejected request belongs to no engine. Add it to the first engine's metrics, so that it counts.
            for engine in [*self._engines.values()][:1]:
                engine.totals.rejected(reason)

    def log_engine_initialized(self) -> None:
        """Do nothing; vLLM's interface requires this method."""

    # -- methods that prometheus_client calls ----------------------------------------------------------------

    def describe(self) -> Iterable[Metric]:
        """Return no metrics: prometheus_client calls this at registration, before any statistics exist."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return the current metrics of all engines as prometheus_client's metric families."""
        families: dict[str, Metric] = {}
        with self._guarded("in a scrape"):
            memory = self._memory()
            for index, engine in self._engines.items():
                labels = {"engine_index": str(index)} if len(self._engines) > 1 else {}
                engine.write(CollectedPage(families, model=self._name, **labels), memory)
        page = CollectedPage(families, model=self._name)
        page.counter(
            "tonnage_plugin_errors",
            "Exceptions of Tonnage inside vLLM; they reach nothing of vLLM, but figures may be missing.",
            self._errors
            + sum(e.totals.admission.failures for e in self._engines.values() if e.totals.admission),
        )
        return families.values()

    # ---------------------------------------------------------------------------------------------------------

    def _register(self) -> None:
        if TonnageStatLogger._registered is not None:
            REGISTRY.unregister(TonnageStatLogger._registered)
        REGISTRY.register(self)
        TonnageStatLogger._registered = self

    def _memory(self) -> MeasuredMemory:
        sampler, workers = self._sampler, self._workers
        # The memory of vLLM's processes is sampled only on a CPU. With a GPU, it would not include GPU memory.
        if sampler is None:
            return MeasuredMemory(
                weights=workers.weights, framework=workers.framework, activation_peak=workers.activations,
                cuda_graphs=workers.cuda_graphs,
            )  # fmt: skip
        return MeasuredMemory(process=sampler.current or None, process_peak=sampler.peak or None)

    @contextmanager
    def _guarded(self, when: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._errors += 1
            if self._errors == 1:
                logger.exception("Tonnage failed %s; vLLM continues, and this is logged only once", when)


class EngineMetrics:
    """The metrics of one vLLM engine, written from its plan and its running totals.

    Args:
        plan: the plan, or None when the planner rejected the model.
        num_blocks: number of KV blocks that vLLM has, including the null block.
        max_num_queued_reqs: vLLM's limit of queued requests, None without a limit.
        caching: whether prompts are looked up in the prefix cache.
    """

    def __init__(self, plan: Plan | None, num_blocks: int, max_num_queued_reqs: int | None, *, caching: bool):
        self._plan, self._queued = plan, max_num_queued_reqs
        self._limits: Limits | None = None
        if plan is not None:
            self._limits = replace(limits_of(plan), usable_blocks=max(0, num_blocks - 1))
        self.totals = EngineTotals(num_blocks, self._limits, caching=caching)
        self._trend = Trend()

    def write(self, page: CollectedPage, memory: MeasuredMemory) -> None:
        """Write the engine's statistics and its measured memory to a metrics page."""
        plan, totals = self._plan, self.totals
        if plan is not None:
            pool = totals.num_blocks * plan.kv_cache.layout.bytes_per_block
            memory = replace(memory, kv_pool=pool)
        stats = totals.stats(memory)
        layout = None if plan is None else plan.kv_cache.layout
        if plan is not None:
            self._write_planned(page, plan, stats)
        admission = totals.admission
        engine_families(page, stats, admission.mode if admission else "greedy", ready=True)
        pool_families(page, layout, stats)
        engine_request_families(page, stats)
        if admission is not None:
            admission_families(page, stats, totals.counts.refused)
            auto_families(page, stats.auto)
        request_families(page, totals.counts, totals.outcomes)
        latency_families(page, totals.counts)
        size = (
            layout.bytes_per_block if layout is not None and admission and admission.asked is not None else None
        )
        tenant_families(page, {NO_TENANT: totals.tenant}, size, totals.outcomes)

    def _write_planned(self, page: CollectedPage, plan: Plan, stats: EngineStats) -> None:
        pool, size = stats.pool, plan.kv_cache.layout.bytes_per_block
        memory_families(page, plan, stats.memory)
        plan_families(page, [plan, _loaded(plan, stats)], self._queued)
        difference_families(page, plan, pool.num_blocks)
        assert self._limits is not None
        room = headroom(pool, stats.running, self.totals.mix, self._limits, _DEFAULT_MAX_TOKENS)
        headroom_families(page, room, pool.usable, size, self._trend, self.totals.counts)


def _plan(config: Any) -> Plan | None:
    """Return the plan of the model that vLLM loaded; warn and return None when the planner rejects it."""
    try:
        running = read_config(config)
        return make_plan(running.model, running.deployment)
    except TonnageError as error:
        logger.warning(
            "Tonnage: no plan for %s, metrics are shown without a plan: %s", served_name(config), error
        )
        return None


def _log_difference(plan: Plan, num_blocks: int) -> None:
    planned, size = plan.kv_cache.num_blocks, plan.kv_cache.layout.bytes_per_block
    logger.info(
        "Tonnage: plan %s: weights %s, KV pool %s in %d blocks; vLLM allocated %d blocks (%+d, %+d bytes)",
        plan.plan_id, gib(plan.rank.weights_bytes), gib(plan.rank.kv_pool_bytes), planned, num_blocks,
        num_blocks - planned, (num_blocks - planned) * size,
    )  # fmt: skip


def _loaded(plan: Plan, stats: EngineStats) -> Plan:
    """Return the plan's revision 1 (after the load), whose KV pool has the size that vLLM allocated."""
    pool = stats.pool
    cache = replace(plan.kv_cache, num_blocks=pool.num_blocks, usable_blocks=pool.usable)
    return replace(plan, revision=1, kv_cache=cache)
