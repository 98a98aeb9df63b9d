"""Tests of the stat logger's page, with hand-made statistics of vLLM and a real VllmConfig.

It has our server's metrics, without unknown values, and its exceptions never reach vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from metric_families import AUTO_LEARNED_FAMILIES, FAMILIES
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rehearsed import busy
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, PrefixCacheStats, SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tonnage.planner.errors import DeploymentError
from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines.stats import AutoStats, stats_of_auto
from tonnage.server.engines.vllm.stats_transport import AdmissionStats, write_stats
from tonnage.server.observe.vllm import logger as module
from tonnage.server.observe.vllm.logger import TonnageStatLogger
from tonnage.server.watch.samples import Samples
from tonnage.server.watch.servers.families import read_auto

BLOCKS = 22  # of 128 tokens in 64 MiB, 2,949,120 bytes each


def config(**flags: Any) -> Any:
    made = EngineArgs(
        model=str(ensure_demo()), served_model_name="demo", max_model_len=1024, max_num_seqs=8,
        kv_cache_memory_bytes=64 * 2**20, enforce_eager=True, **flags,
    ).create_engine_config()  # fmt: skip
    made.cache_config.num_gpu_blocks = BLOCKS
    return made


@pytest.fixture(scope="module")
def made() -> Any:
    return config()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    shown = TonnageStatLogger._registered
    if shown is not None:
        REGISTRY.unregister(shown)
        TonnageStatLogger._registered = None
        if shown._sampler is not None:
            shown._sampler.stop()


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Return the lines that the plug-in logs, whatever vLLM's logging configuration is."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    kept = Kept()
    level = module.logger.level
    module.logger.addHandler(kept)
    module.logger.setLevel(logging.INFO)
    yield lines
    module.logger.setLevel(level)
    module.logger.removeHandler(kept)


def page() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return our metrics in the registry that vLLM serves; all of them have the label model."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(REGISTRY).decode()):
        for sample in family.samples:
            if sample.name.startswith("tonnage_"):
                labels = dict(sample.labels)
                assert labels.pop("model") == "demo"
                key = sample.name, frozenset(labels.items())
                assert key not in found
                found[key] = sample.value
    return found


def value(samples: dict[Any, float], name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def iteration(*finished: FinishedRequestStats) -> IterationStats:
    stats = IterationStats()
    stats.finished_requests = list(finished)
    return stats


def finished(reason: FinishReason, prompt: int, output: int, most: int | None = 100) -> FinishedRequestStats:
    return FinishedRequestStats(
        reason, e2e_latency=2.0, num_prompt_tokens=prompt, num_generation_tokens=output, max_tokens_param=most,
        queued_time=0.5,
    )  # fmt: skip


def test_metrics_of_the_stat_logger_equal_the_statistics_of_a_step(made: Any) -> None:
    logger = TonnageStatLogger(made, [0])
    logger.log_engine_initialized()
    stats = iteration(finished(FinishReason.LENGTH, 100, 7), finished(FinishReason.REPETITION, 50, 3))
    stats.num_preempted_reqs = 2
    stats.num_generation_tokens = 10
    stats.prompt_token_stats.total, stats.prompt_token_stats.cached_tokens = 150, 128
    stats.time_to_first_tokens_iter, stats.inter_token_latencies_iter = [0.2], [0.02, 0.04]
    found = PrefixCacheStats(preempted_requests=2, preempted_queries=60, preempted_hits=32)
    logger.record(
        SchedulerStats(
            num_running_reqs=3, num_waiting_reqs=4, num_skipped_waiting_reqs=1, kv_cache_usage=7 / 21,
            prefix_cache_stats=found,
        ),
        stats,
    )  # fmt: skip
    seen = page()
    assert value(seen, "tonnage_pool_blocks", state="used") == 7
    assert value(seen, "tonnage_pool_blocks", state="free") == 14
    assert value(seen, "tonnage_pool_blocks", state="reserved") == 1
    assert value(seen, "tonnage_pool_bytes", state="used") == 7 * 2_949_120
    assert value(seen, "tonnage_engine_requests", state="running") == 3
    assert value(seen, "tonnage_engine_requests", state="waiting") == 5
    assert value(seen, "tonnage_requests_in_flight") == 8
    assert value(seen, "tonnage_preemptions_total") == 2
    assert value(seen, "tonnage_preempted_tokens_total") == 60 - 32 - 2
    assert value(seen, "tonnage_prefix_query_tokens_total") == 150
    assert value(seen, "tonnage_prefix_hit_tokens_total", source="unknown") == 128
    assert value(seen, "tonnage_requests_total", outcome="length") == 1
    assert value(seen, "tonnage_requests_total", outcome="stop") == 1
    assert value(seen, "tonnage_tenant_prompt_tokens_total", tenant="none") == 150
    assert value(seen, "tonnage_tenant_generation_tokens_total", tenant="none") == 10
    assert value(seen, "tonnage_inter_token_latency_seconds_count") == 2
    assert value(seen, "tonnage_queue_wait_seconds_sum") == 1.0
    # 14 free blocks; two blocks (200 tokens) and one (150) were asked for, and 5 seats are left.
    assert value(seen, "tonnage_headroom_blocks") == 14
    assert value(seen, "tonnage_headroom_requests") == 5
    assert value(seen, "tonnage_plugin_errors_total") == 0


def test_stat_logger_exports_the_plan_and_a_pool_difference_of_zero(made: Any) -> None:
    TonnageStatLogger(made, [0])
    seen = page()
    assert value(seen, "tonnage_config_num_blocks") == BLOCKS
    assert value(seen, "tonnage_pool_difference_blocks") == 0
    assert value(seen, "tonnage_memory_measured_to_planned_ratio", device="cpu", component="kv_pool") == 1.0
    planned = {labels: size for (name, labels), size in seen.items() if name == "tonnage_memory_planned_bytes"}
    assert sum(planned.values()) == value(seen, "tonnage_config_device_memory_bytes")


def test_stat_logger_exports_the_difference_between_vllms_pool_and_the_plan(made: Any) -> None:
    made.cache_config.num_gpu_blocks = BLOCKS - 3
    try:
        TonnageStatLogger(made, [0])
    finally:
        made.cache_config.num_gpu_blocks = BLOCKS
    seen = page()
    assert value(seen, "tonnage_pool_difference_blocks") == -3
    assert value(seen, "tonnage_pool_difference_bytes") == -3 * 2_949_120
    assert value(seen, "tonnage_pool_usable_blocks") == BLOCKS - 4


def test_metrics_of_two_engines_are_distinguished_by_an_engine_label(made: Any) -> None:
    logger = TonnageStatLogger(made, [0, 1])
    logger.record(SchedulerStats(num_running_reqs=1), None, engine_idx=0)
    logger.record(SchedulerStats(num_running_reqs=2), None, engine_idx=1)
    logger.record(SchedulerStats(num_running_reqs=9), None, engine_idx=7)  # of an unknown engine
    seen = page()
    running = [value(seen, "tonnage_engine_requests", state="running", engine_index=str(at)) for at in (0, 1)]
    assert running == [1, 2]
    assert value(seen, "tonnage_pool_usable_blocks", engine_index="1") == BLOCKS / 2 - 1


def test_metrics_that_plain_vllm_does_not_report_are_absent(made: Any) -> None:
    TonnageStatLogger(made, [0])
    names = {name for name, _ in page()}
    assert not names & {
        "tonnage_evictions_total", "tonnage_admission_decisions_total", "tonnage_pool_tail_waste_tokens",
        "tonnage_requests_received_total", "tonnage_tenant_asked_bytes", "tonnage_invariant_violations_total",
    }  # fmt: skip
    assert ("tonnage_pool_blocks", frozenset({("state", "cached")})) not in page()
    assert ("tonnage_requests_total", frozenset({("outcome", "aborted")})) not in page()


TOLD = AdmissionStats(
    "predictive", received=9, unfinished=4, failures=0, reserved=12, committed=15, asked=18, waste=300,
    broken=0, cached=5, evictions={("blocks", "decode"): 8},
    decisions={("admit", "fits"): 7, ("wait", "blocks"): 2}, missing_blocks={("wait", "blocks"): 5},
)  # fmt: skip


def over_the_wire(stats: SchedulerStats) -> SchedulerStats:
    """Return the statistics as the API process decodes them from the engine core's message."""
    sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    got = MsgpackDecoder(EngineCoreOutputs).decode(sent).scheduler_stats
    assert isinstance(got, SchedulerStats)
    return got


def test_statistics_of_tonnages_scheduler_reach_the_stat_logger_in_vllms_messages(made: Any) -> None:
    stats = SchedulerStats(num_running_reqs=3, num_waiting_reqs=1, kv_cache_usage=9 / 21)
    write_stats(TOLD, stats.waiting_lora_adapters)
    stats.waiting_lora_adapters["an adapter"] = 1
    got = over_the_wire(stats)
    logger = TonnageStatLogger(made, [0])
    logger.record(got, iteration(finished(FinishReason.STOP, 10, 2), finished(FinishReason.LENGTH, 10, 2)))
    assert got.waiting_lora_adapters == {"an adapter": 1}  # vLLM's own loggers come after
    assert logger._engines[0].totals.admission == TOLD
    seen = page()
    assert value(seen, "tonnage_admission_info", mode="predictive") == 1
    assert value(seen, "tonnage_admission_decisions_total", outcome="admit", reason="fits") == 7
    assert value(seen, "tonnage_admission_decisions_total", outcome="never", reason="blocks") == 0
    assert value(seen, "tonnage_admission_refused_blocks_total", outcome="wait", reason="blocks") == 5
    assert value(seen, "tonnage_pool_promised_unused_blocks") == 12 - 9
    assert value(seen, "tonnage_pool_tail_waste_tokens") == 300
    assert value(seen, "tonnage_invariant_violations_total") == 0
    assert value(seen, "tonnage_evictions_total", cause="decode") == 8
    assert value(seen, "tonnage_evictions_total", cause="prefill") == 0
    states = {state: value(seen, "tonnage_pool_blocks", state=state) for state in ("used", "cached", "free")}
    assert states == {"used": 9, "cached": 5, "free": 7}
    assert value(seen, "tonnage_headroom_blocks") == 21 - 15
    assert value(seen, "tonnage_tenant_asked_bytes", tenant="none") == 18 * 2_949_120
    # Nine were received, two ended and four are unfinished, so three were aborted.
    assert value(seen, "tonnage_requests_received_total") == 9
    assert value(seen, "tonnage_requests_total", outcome="aborted") == 3
    assert value(seen, "tonnage_requests_in_flight") == 4
    # A step without our values changes nothing of them. A request that the front end rejects is one more.
    logger.record_admission_rejection("max_num_queued_reqs")
    logger.record(SchedulerStats(num_running_reqs=3), None)
    seen = page()
    assert value(seen, "tonnage_requests_received_total") == 10
    assert value(seen, "tonnage_requests_total", outcome="rejected") == 1
    assert value(seen, "tonnage_requests_in_flight") == 4
    assert value(seen, "tonnage_admission_decisions_total", outcome="wait", reason="max_num_queued_reqs") == 1


def test_auto_mode_statistics_reach_the_stat_logger_as_integers_in_vllms_messages(made: Any) -> None:
    """A plain ``vllm serve`` has the metrics of mode auto, and watch reads the same values."""
    auto = busy()
    auto.rule(64)
    known = stats_of_auto(auto)
    assert known is not None
    assert known.cost is not None
    assert known.share is not None
    stats = SchedulerStats(num_running_reqs=3)
    write_stats(replace(TOLD, mode="auto", auto=known), stats.waiting_lora_adapters)
    assert {type(count) for count in stats.waiting_lora_adapters.values()} == {int}
    TonnageStatLogger(made, [0]).record(over_the_wire(stats), None)
    seen = page()
    assert value(seen, "tonnage_admission_info", mode="auto") == 1
    assert value(seen, "tonnage_admission_holding") == 1
    assert value(seen, "tonnage_admission_fallbacks_total") == 0
    found = read_auto(Samples(generate_latest(REGISTRY).decode()))
    assert found is not None
    assert found.cost is not None
    assert found.gain == pytest.approx(known.gain, abs=0.0005)
    assert found.parts == pytest.approx(known.parts, abs=1e-9)
    assert found.cost.context == pytest.approx(known.cost.context, abs=1e-12)
    assert (found.share, found.fallbacks) == (known.share, 0)


def test_auto_mode_without_fitted_costs_exports_no_step_costs(made: Any) -> None:
    stats = SchedulerStats()
    write_stats(AdmissionStats("auto", auto=AutoStats()), stats.waiting_lora_adapters)
    TonnageStatLogger(made, [0]).record(over_the_wire(stats), None)
    seen = page()
    assert value(seen, "tonnage_admission_holding") == 0
    assert not {name for name, _ in seen} & AUTO_LEARNED_FAMILIES.keys()


def test_request_ended_by_a_stop_string_is_not_counted_as_aborted(made: Any) -> None:
    """vLLM's front end, which sees the text, ends the request a step before its scheduler does."""
    logger = TonnageStatLogger(made, [0])

    def step(received: int, unfinished: int, *ended: FinishedRequestStats) -> tuple[float, float, float]:
        stats = SchedulerStats()
        write_stats(
            AdmissionStats("guaranteed", received=received, unfinished=unfinished), stats.waiting_lora_adapters
        )
        logger.record(stats, iteration(*ended))
        seen = page()
        names = ("tonnage_requests_received_total", "tonnage_requests_in_flight")
        assert value(seen, names[0]) == value(seen, names[1]) + sum(
            count for (name, _), count in seen.items() if name == "tonnage_requests_total"
        )
        return (
            value(seen, names[0]),
            value(seen, names[1]),
            value(seen, "tonnage_requests_total", outcome="aborted"),
        )

    assert step(2, 2) == (2, 2, 0)
    assert step(2, 2, finished(FinishReason.STOP, 10, 2)) == (2, 1, 0)
    assert step(2, 1) == (2, 1, 0)
    assert step(2, 0) == (2, 0, 1)  # that one did
    assert step(3, 1) == (3, 1, 1)


def test_failure_of_tonnages_scheduler_is_counted_in_the_metrics(made: Any) -> None:
    logger = TonnageStatLogger(made, [0])
    stats = SchedulerStats()
    write_stats(AdmissionStats("greedy", failures=1), stats.waiting_lora_adapters)
    logger.record(stats, None)
    assert value(page(), "tonnage_plugin_errors_total") == 1


def test_stat_logger_exports_the_other_metrics_for_a_model_that_the_planner_rejects(
    made: Any, monkeypatch: Any, said: list[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise DeploymentError("is not understood", field="quantization")

    monkeypatch.setattr(module, "make_plan", refuse)
    TonnageStatLogger(made, [0]).record(SchedulerStats(num_running_reqs=2, kv_cache_usage=1 / 21), None)
    seen = page()
    names = {name for name, _ in seen}
    planned = ("tonnage_plan_", "tonnage_config_", "tonnage_pool_difference_", "tonnage_headroom_")
    assert not [name for name in names if "planned" in name or name.startswith(planned)]
    assert value(seen, "tonnage_pool_blocks", state="used") == 1
    assert value(seen, "tonnage_engine_requests", state="running") == 2
    assert value(seen, "tonnage_plugin_errors_total") == 0
    (line,) = [line for line in said if "no plan" in line]
    assert "quantization" in line


def test_exception_in_our_stat_logger_does_not_reach_vllm(made: Any, monkeypatch: Any, said: list[str]) -> None:
    logger = TonnageStatLogger(made, [0])
    logger.record(object(), object())
    logger.record(object(), object())
    logger.record(SchedulerStats(num_running_reqs=1), None)
    assert value(page(), "tonnage_plugin_errors_total") == 2
    assert value(page(), "tonnage_engine_requests", state="running") == 1
    assert sum("Tonnage failed" in line for line in said) == 1
    monkeypatch.setattr(module, "pool_families", None)
    assert value(page(), "tonnage_plugin_errors_total") >= 3


def test_stat_logger_exports_the_other_metrics_after_an_exception_in_the_planner(
    made: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "make_plan", None)
    TonnageStatLogger(made, [0])
    seen = page()
    assert value(seen, "tonnage_plugin_errors_total") == 1
    assert value(seen, "tonnage_pool_usable_blocks") == BLOCKS - 1


def test_stat_logger_created_again_is_registered_only_once(made: Any) -> None:
    TonnageStatLogger(made, [0])
    second = TonnageStatLogger(made, [0])
    second.record(SchedulerStats(num_running_reqs=5), None)
    assert value(page(), "tonnage_engine_requests", state="running") == 5


def test_stat_logger_exports_nothing_in_a_vllm_that_tonnages_own_server_started(made: Any) -> None:
    before = made.parallel_config.worker_extension_cls
    made.parallel_config.worker_extension_cls = "tonnage.server.engines.vllm.worker.WorkerExtension"
    try:
        TonnageStatLogger(made, [0]).record(SchedulerStats(), IterationStats())
    finally:
        made.parallel_config.worker_extension_cls = before
    assert page() == {}


def test_stat_logger_warns_and_exports_nothing_with_several_api_servers(
    made: Any, monkeypatch: Any, said: list[str]
) -> None:
    monkeypatch.setattr(made.parallel_config, "_api_process_count", 2)
    TonnageStatLogger(made, [0]).record(SchedulerStats(), IterationStats())
    assert page() == {}
    assert any("--api-server-count 1" in line for line in said)


def test_plugin_metric_names_and_types_equal_our_own_servers(made: Any) -> None:
    """Each metric of the plug-in is part of the contract of our own /metrics."""
    TonnageStatLogger(made, [0])
    text = generate_latest(REGISTRY).decode()
    types = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE tonnage_"))
    assert types.pop("tonnage_plugin_errors_total") == "counter"
    assert types == {name: kind for name, (kind, _) in FAMILIES.items() if name in types}
    for (name, labels), _ in page().items():
        if name != "tonnage_plugin_errors_total":
            family = next(f for f in (name, name.rpartition("_")[0]) if f in FAMILIES)
            assert {label for label, _ in labels} - {"le"} == FAMILIES[family][1]
