"""Tests of the statistics that are collected from the messages of vLLM's engine cores."""

from __future__ import annotations

from vllm.v1.engine import FinishReason
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, SchedulerStats

from tonnage.cache.admission.cost import StepCost
from tonnage.server.engines.stats import AutoStats, EngineStats, MeasuredMemory
from tonnage.server.engines.vllm.core_stats import EngineCores
from tonnage.server.engines.vllm.stats_transport import AdmissionStats, write_stats

BLOCKS = 101


def step(told: AdmissionStats | None = None, **said: float) -> SchedulerStats:
    stats = SchedulerStats(**said)  # type: ignore[arg-type]
    if told is not None:
        write_stats(told, stats.waiting_lora_adapters)
    return stats


def cores(engines: int = 1, mode: str = "guaranteed") -> EngineCores:
    made = EngineCores(BLOCKS, mode, caching=True)
    for index in range(engines):
        made.join(index, BLOCKS)
    return made


def now(made: EngineCores, *, idle: bool = False) -> EngineStats:
    stats = made.stats(MeasuredMemory(process=7), idle=idle)
    assert stats.memory.process == 7
    pool = stats.pool
    assert pool.used + (pool.cached or 0) + pool.free == pool.usable
    return stats


TOLD = AdmissionStats(
    "predictive", received=9, unfinished=5, reserved=60, committed=44, asked=80, waste=30, broken=0, cached=20,
    decisions={("admit", "fits"): 4, ("wait", "blocks"): 1}, missing_blocks={("wait", "blocks"): 3},
    evictions={("blocks", "decode"): 6},
)  # fmt: skip


def test_no_blocks_are_reported_as_reserved_before_the_first_step_of_vllm() -> None:
    for made in (EngineCores(BLOCKS, "no_evict", caching=True), cores(mode="no_evict")):
        stats = now(made)
        assert stats.admission_mode == "no_evict"
        assert (stats.pool.usable, stats.pool.headroom, stats.pool.reserved) == (100, 100, 0)
        assert stats.invariant_violations == 0


def test_engine_statistics_have_the_values_of_tonnages_scheduler() -> None:
    made = cores()
    made.record(0, step(TOLD, num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.4), None)
    stats = now(made)
    assert (stats.running, stats.waiting) == (3, 2)
    assert stats.admission_mode == "predictive"
    pool = stats.pool
    assert (pool.used, pool.cached, pool.free, pool.reserved, pool.headroom) == (40, 20, 40, 60, 100 - 44)
    assert (pool.evictions, pool.tail_waste_slots) == (6, 30)
    assert stats.admissions == (("admit", "fits", 4), ("wait", "blocks", 1))
    assert stats.refused_blocks == (("wait", "blocks", 3),)
    made.record(0, step(num_running_reqs=3), None)  # it has fallen silent
    assert now(made).pool.reserved == 60


def test_idle_vllm_engine_reports_no_used_or_reserved_blocks() -> None:
    made = cores()
    made.record(0, step(TOLD, num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.4), None)
    stats = now(made, idle=True)
    assert (stats.running, stats.waiting, stats.pool.used, stats.pool.reserved) == (0, 0, 0, 0)
    assert (stats.pool.headroom, stats.pool.tail_waste_slots) == (100, 0)
    assert stats.pool.evictions == 6


def test_auto_mode_statistics_of_several_engine_cores_are_merged() -> None:
    made = cores(2, mode="auto")
    assert now(made).auto is None  # nothing is told before the first step
    for index, share in ((0, 0.9), (1, 0.6)):
        auto = AutoStats(StepCost(0.017, 0.001, 0.0, 3e-9), share, gain=1.1, fallbacks=index)
        made.record(index, step(AdmissionStats("auto", auto=auto)), None)
    assert now(made).auto == AutoStats(StepCost(0.017, 0.001, 0.0, 3e-9), 0.6, gain=1.1, fallbacks=1)


def test_statistics_of_vllms_own_scheduler_report_used_blocks_as_the_reserved_ones() -> None:
    made = cores()
    made.record(0, step(num_running_reqs=3, kv_cache_usage=0.4), None)
    stats = now(made)
    assert stats.admission_mode == "greedy"
    assert (stats.pool.reserved, stats.pool.headroom, stats.pool.cached) == (40, 60, None)
    assert stats.invariant_violations is None


def test_statistics_of_several_engine_cores_are_added_up() -> None:
    made = cores(2)
    for index, usage in ((0, 0.4), (1, 0.1)):
        preempted = IterationStats()
        preempted.num_preempted_reqs = 1 + index
        made.record(index, step(TOLD, num_running_reqs=3, kv_cache_usage=usage), preempted)
    stats = now(made)
    assert (stats.running, stats.pool.num_blocks, stats.pool.usable) == (6, 202, 200)
    assert (stats.pool.used, stats.pool.reserved, stats.pool.committed) == (50, 120, 88)
    assert (stats.preemptions, made.messages) == (3, 2)
    assert sum(count for _, _, count in stats.admissions) == 10
    made.record(1, step(), None)
    assert now(made).admission_mode == "predictive"


def test_queue_time_of_a_vllm_request_is_recorded_only_if_our_server_sent_the_request() -> None:
    made, iteration = cores(), IterationStats()
    made.queued["mine"] = None
    iteration.finished_requests = [
        FinishedRequestStats(FinishReason.LENGTH, request_id=name, queued_time=2.5)
        for name in ("mine", "other")
    ]
    made.record(0, None, iteration)
    assert made.queued == {"mine": 2.5}
