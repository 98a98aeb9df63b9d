"""Tests of /metrics and /memory: promtool, invariants between series, and every label value from the start."""

from __future__ import annotations

import asyncio
import shutil
from asyncio.subprocess import PIPE, STDOUT

import pytest
from components import check_components
from metric_families import FAMILIES
from prometheus_client.parser import text_string_to_metric_families

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.cache.results import EVICTION_CAUSES
from tonnage.planner.deployment import Deployment
from tonnage.planner.output.json import plan_to_dict
from tonnage.planner.planning.build import make_plan
from tonnage.server.engines.capacity import limits_of
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.engines.stats import MeasuredMemory
from tonnage.server.observe.metrics.headroom import FOREVER_SECONDS, Trend
from tonnage.server.observe.metrics.requests import ADMISSIONS
from tonnage.server.observe.metrics.usage import MAX_TENANTS, OTHER_TENANTS, Usage
from tonnage.server.requests.accounts import Accounts
from tonnage.server.security.tenants import Tenant

MEASURED = MeasuredMemory(
    weights=269_030_016,
    kv_pool=94_371_840,
    framework=200_000_000,
    process=600_000_000,
    process_peak=610_000_000,
)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape(server) -> tuple[str, Samples]:
    response = await server.http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples: Samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model") == "demo"
            key = (sample.name, frozenset(labels.items()))
            assert key not in samples
            samples[key] = sample.value
    return response.text, samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def total(samples: Samples, name: str) -> float:
    return sum(number for (found, _), number in samples.items() if found == name)


async def test_metric_families_have_documented_names_types_and_labels(run_server, small_plan) -> None:
    async with run_server(FakeEngine(small_plan(), memory=MEASURED)) as server:
        text, samples = await scrape(server)
        types = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
        assert types == {name: kind for name, (kind, _) in FAMILIES.items()}
        assert "_created" not in text
        for (name, labels), _ in samples.items():
            family = next(f for f in (name, name.rpartition("_")[0]) if f in FAMILIES)
            assert {label for label, _ in labels} - {"le"} == FAMILIES[family][1]


async def test_promtool_accepts_every_metric_family(run_server, small_plan) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package prometheus): /metrics was NOT linted")
    async with run_server(FakeEngine(small_plan(), memory=MEASURED)) as server:
        await server.complete(max_tokens=5, n=2)
        text, _ = await scrape(server)
    process = await asyncio.create_subprocess_exec(
        promtool, "check", "metrics", stdin=PIPE, stdout=PIPE, stderr=STDOUT
    )
    output, _ = await process.communicate(text.encode())
    assert (process.returncode, output.decode()) == (0, "")


async def test_every_metric_series_exists_with_value_zero_from_the_start(server) -> None:
    _, samples = await scrape(server)
    for outcome, reason in ADMISSIONS:
        assert value(samples, "tonnage_admission_decisions_total", outcome=outcome, reason=reason) == 0
    for outcome in ("stop", "length", "aborted", "rejected", "error"):
        assert value(samples, "tonnage_requests_total", outcome=outcome) == 0
    for state in ("running", "waiting"):
        assert value(samples, "tonnage_engine_requests", state=state) == 0
    series = set(samples)
    await server.complete(max_tokens=3)
    await server.complete(temperature=9)
    _, samples = await scrape(server)
    assert set(samples) == series


async def test_metrics_that_are_not_measured_are_absent_instead_of_zero(run_server, small_plan) -> None:
    async with run_server(FakeEngine(small_plan())) as server:
        _, samples = await scrape(server)
        names = {name for name, _ in samples}
        assert "tonnage_memory_measured_bytes" not in names
        assert "tonnage_process_memory_bytes" not in names
        measured = (await server.http.get("/memory")).json()["measured"]
        assert set(measured.values()) == {None}


async def test_memory_component_metrics_add_up_to_the_device_total(run_server, small_plan) -> None:
    async with run_server(FakeEngine(small_plan(), memory=MEASURED)) as server:
        plan = server.state.plan
        _, samples = await scrape(server)
        for name in ("planned", "measured"):
            assert total(samples, f"tonnage_memory_{name}_bytes") == plan.rank.total_bytes
        assert (
            value(samples, "tonnage_memory_planned_bytes", device="cpu", component="weights")
            == plan.rank.weights_bytes
        )
        assert (
            value(samples, "tonnage_memory_measured_bytes", device="cpu", component="kv_pool")
            == MEASURED.kv_pool
        )
        ratio = "tonnage_memory_measured_to_planned_ratio"
        assert value(samples, ratio, device="cpu", component="kv_pool") == 1
        assert value(samples, ratio, device="cpu", component="process") == pytest.approx(
            MEASURED.process_peak / plan.rank.used_bytes
        )
        assert total(samples, "tonnage_weights_planned_bytes") == plan.rank.weights_bytes
        assert value(samples, "tonnage_process_memory_peak_bytes") == MEASURED.process_peak
        report = (await server.http.get("/memory")).json()
        assert report["plan"] == plan_to_dict(plan)
        assert report["difference"]["weights_bytes"] == MEASURED.weights - plan.rank.weights_bytes
        assert report["difference"]["kv_pool_bytes"] == 0
        assert report["difference"]["process_peak_bytes"] == MEASURED.process_peak - plan.rank.used_bytes
        assert report["measured"]["process_peak_bytes"] == MEASURED.process_peak


@pytest.mark.parametrize(
    "flags",
    [{"enable_lora": True, "max_loras": 4}, {"speculative_model": "demo", "num_speculative_tokens": 3}],
    ids=["LoRA", "draft"],
)
async def test_memory_component_metrics_with_lora_or_draft_add_up_to_the_device_total(
    run_server, flags
) -> None:
    deployment = Deployment(engine="vllm", gpu="t4", max_model_len=1024, max_num_seqs=8, **flags)
    async with run_server(FakeEngine(make_plan("demo", deployment), memory=MEASURED)) as server:
        rank = server.state.plan.rank
        _, samples = await scrape(server)
        name = "tonnage_memory_planned_bytes"
        planned = {dict(labels)["component"]: int(v) for (each, labels), v in samples.items() if each == name}
        check_components(planned, rank)
        assert (planned["lora"], planned["draft"]) == (rank.lora_bytes, rank.draft_bytes)
        assert planned["lora"] + planned["draft"] > 0
        report = (await server.http.get("/memory")).json()
        shown = report["plan"]["ranks"][0]
        assert (shown["lora_bytes"], shown["draft_bytes"]) == (rank.lora_bytes, rank.draft_bytes)
        for part in ("measured", "difference"):
            assert set(report[part]) >= {"lora_bytes", "draft_bytes"}


async def test_pool_metrics_of_busy_server_equal_engine_state(run_server, small_plan) -> None:
    engine = FakeEngine(small_plan(), token_rate=50, policy=Policy(AdmissionMode.NO_EVICT))
    async with run_server(engine) as server:
        tasks = [asyncio.create_task(server.complete(prompt=[9] * 40, max_tokens=100)) for _ in range(2)]
        await server.until(lambda: engine.stats().running == 2)
        _, samples = await scrape(server)
        stats = engine.stats()
        bytes_per_block = server.state.plan.kv_cache.layout.bytes_per_block
        assert value(samples, "tonnage_engine_requests", state="running") == 2
        assert value(samples, "tonnage_pool_usable_blocks") == 255
        assert value(samples, "tonnage_pool_blocks", state="reserved") == 1
        assert total(samples, "tonnage_pool_blocks") == 256
        assert total(samples, "tonnage_pool_bytes") == 256 * bytes_per_block
        assert total(samples, "tonnage_pool_tokens") == 256 * 16
        used = value(samples, "tonnage_pool_blocks", state="used")
        assert used >= 3
        assert value(samples, "tonnage_pool_usage_ratio") == pytest.approx(used / 255)
        assert 0 <= value(samples, "tonnage_pool_tail_waste_tokens") <= 2 * 15
        # 140 tokens are reserved to each: 9 blocks
        assert value(samples, "tonnage_pool_promised_unused_blocks") == 18 - used
        assert value(samples, "tonnage_pool_promised_unused_bytes") == (18 - used) * bytes_per_block
        assert value(samples, "tonnage_headroom_blocks") == 255 - 18
        assert value(samples, "tonnage_headroom_requests") == (255 - 18) // 9
        # the largest prompt and 16 tokens, default_max_tokens, in what is left: 2,048 tokens at the most
        assert value(samples, "tonnage_headroom_prompt_tokens") == 2048 - 16
        assert value(samples, "tonnage_tenant_asked_bytes", tenant="none") == 18 * bytes_per_block
        assert value(samples, "tonnage_tenant_requests_in_flight", tenant="none") == 2
        report = (await server.http.get("/memory")).json()
        assert report["pool"]["blocks"]["promised"] == 18
        assert report["headroom"]["blocks"] == 255 - 18
        assert report["headroom"]["bytes"] == (255 - 18) * bytes_per_block
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.until(lambda: server.state.accounts.outcomes["aborted"] == 2)
        assert stats.pool.reserved == 18


async def test_metric_of_received_requests_equals_outcomes_plus_requests_in_flight(
    run_server, small_plan
) -> None:
    async with run_server(FakeEngine(small_plan()), max_num_queued_reqs=8) as server:
        # What the first has computed the others hit.
        await server.complete(prompt=[3] * 32, max_tokens=10, n=2, ignore_eos=True)
        await asyncio.gather(
            *(
                server.complete(prompt=[3] * 32, max_tokens=10, n=2, stream=bool(i % 2), ignore_eos=True)
                for i in range(11)
            )
        )
        await server.complete(max_tokens=10**6)
        await server.complete(n=9)
        _, samples = await scrape(server)
        outcomes = {o: value(samples, "tonnage_requests_total", outcome=o) for o in ("length", "rejected")}
        assert value(samples, "tonnage_requests_received_total") == sum(outcomes.values()) == 14
        assert value(samples, "tonnage_requests_in_flight") == 0
        done, full = outcomes["length"], outcomes["rejected"] - 2
        assert done >= 4
        assert value(samples, "tonnage_admission_decisions_total", outcome="admit", reason="fits") == done
        for outcome, reason, count in (
            ("wait", "max_num_queued_reqs", full),
            ("never", "max_num_queued_reqs", 1),
            ("never", "max_model_len", 1),
        ):
            assert value(samples, "tonnage_admission_decisions_total", outcome=outcome, reason=reason) == count
        assert value(samples, "tonnage_prompt_tokens_total") == 32 * done
        assert value(samples, "tonnage_generation_tokens_total") == 20 * done
        assert value(samples, "tonnage_time_to_first_token_seconds_count") == done
        assert value(samples, "tonnage_request_duration_seconds_count") == done
        assert value(samples, "tonnage_inter_token_latency_seconds_count") == 18 * done
        assert 0 < total(samples, "tonnage_prefix_hit_tokens_total") < 32 * done
        assert value(samples, "tonnage_prefix_query_tokens_total") == 32 * done
        assert value(samples, "tonnage_queue_wait_seconds_count") == done
        assert value(samples, "tonnage_tenant_requests_total", tenant="none", outcome="length") == done
        assert value(samples, "tonnage_tenant_requests_total", tenant="none", outcome="rejected") == full + 2
        assert value(samples, "tonnage_tenant_prompt_tokens_total", tenant="none") == 32 * done
        assert value(samples, "tonnage_tenant_generation_tokens_total", tenant="none") == 20 * done
        assert value(samples, "tonnage_tenant_asked_bytes", tenant="none") == 0
        assert value(samples, "tonnage_headroom_requests") == 64 // 2  # the batch is tighter than the pool


async def test_metric_of_evictions_is_split_by_cause(run_server, small_plan) -> None:
    async with run_server(FakeEngine(small_plan(33, max_model_len=512))) as server:
        _, samples = await scrape(server)
        for cause in EVICTION_CAUSES:
            assert value(samples, "tonnage_evictions_total", cause=cause) == 0
        for number in range(4):
            await server.complete(prompt=[number + 1] * 256, max_tokens=2, ignore_eos=True)
        _, samples = await scrape(server)
        # 32 blocks; each prompt leaves 16 behind. The second finds 16 free ones for itself and evicts one for
        # its answer, which is free again when the third comes.
        assert value(samples, "tonnage_evictions_total", cause="prefill") == 2 * (16 - 1)
        assert value(samples, "tonnage_evictions_total", cause="decode") == 3
        await server.complete(prompt=[9] * 16, max_tokens=400, ignore_eos=True)
        _, samples = await scrape(server)
        assert value(samples, "tonnage_evictions_total", cause="decode") == 3 + 400 // 16
        engine = server.state.engine
        assert total(samples, "tonnage_evictions_total") == engine.stats().pool.evictions


async def test_prefix_hit_metrics_distinguish_shared_blocks_from_those_of_a_cache_salt(server) -> None:
    for _ in range(2):
        await server.complete(prompt=[5] * 64, max_tokens=2)
        await server.complete(prompt=[5] * 64, max_tokens=2, cache_salt="mine")
        await server.complete(prompt=[5] * 64, max_tokens=2, cache_salt="yours")
    _, samples = await scrape(server)
    assert value(samples, "tonnage_prefix_hit_tokens_total", source="shared") == 48
    assert value(samples, "tonnage_prefix_hit_tokens_total", source="salt") == 2 * 48


async def test_plan_metric_has_a_revision_before_and_one_after_the_load(server) -> None:
    _, samples = await scrape(server)
    infos = [dict(labels) for name, labels in samples if name == "tonnage_plan_info"]
    assert [info["revision"] for info in infos] == ["0", "1"]
    assert {info["plan_id"] for info in infos} == {server.state.plan.plan_id}


def test_number_of_tenant_labels_in_the_metrics_is_bounded(small_plan) -> None:
    accounts = Accounts()
    usage = Usage(accounts, limits_of(small_plan()))
    for number in range(1000):
        accounts.receive("/v1/completions", str(number), Tenant(f"tenant-{number}")).finish("rejected")
    assert len(usage.tenants) == MAX_TENANTS + 1
    assert usage.tenants[OTHER_TENANTS].outcomes["rejected"] == 1000 - (MAX_TENANTS - 1)
    assert sum(one.outcomes.total() for one in usage.tenants.values()) == 1000


def test_metric_of_time_until_the_pool_is_full_follows_the_growth_of_reservations() -> None:
    trend = Trend()
    assert trend.seconds_to(100) == FOREVER_SECONDS
    for second in range(0, 60, 5):
        trend.observe(second, 2 * second)
    assert trend.seconds_to(100) == pytest.approx(50)
    assert trend.seconds_to(0) == 0
    for second in range(60, 300, 5):  # older than the window, the growth is forgotten
        trend.observe(second, 120)
    assert trend.seconds_to(100) == FOREVER_SECONDS


async def test_vllm_compatible_metric_names_match_vllm(run_server, small_plan) -> None:
    """Compare labels, types and values with the vLLM 0.32 metrics that KEDA, gateways and dashboards read."""
    async with run_server(FakeEngine(small_plan()), metrics_compat="vllm") as server:
        await server.complete(prompt=[3] * 32, max_tokens=10)
        text = (await server.http.get("/metrics")).text
    families = {f.name: f for f in text_string_to_metric_families(text) if f.name.startswith("vllm:")}
    expected = {
        "vllm:num_requests_running": ("gauge", set(), 0),
        "vllm:num_requests_waiting": ("gauge", set(), 0),
        "vllm:num_requests_waiting_by_reason": ("gauge", {"reason"}, 0),
        "vllm:kv_cache_usage_perc": ("gauge", set(), 0),
        "vllm:cache_config_info": (
            "gauge",
            {
                "block_size",
                "num_gpu_blocks",
                "cache_dtype",
                "enable_prefix_caching",
                "gpu_memory_utilization",
                "kv_cache_memory_bytes",
            },
            1,
        ),
        "vllm:prefix_cache_queries": ("counter", set(), 32),
        "vllm:prefix_cache_hits": ("counter", set(), 0),
        "vllm:num_preemptions": ("counter", set(), 0),
        "vllm:prompt_tokens": ("counter", set(), 32),
        "vllm:generation_tokens": ("counter", set(), 10),
        "vllm:request_success": ("counter", {"finished_reason"}, 1),
        "vllm:time_to_first_token_seconds": ("histogram", set(), None),
        "vllm:inter_token_latency_seconds": ("histogram", set(), None),
        "vllm:e2e_request_latency_seconds": ("histogram", set(), None),
        "vllm:request_queue_time_seconds": ("histogram", set(), None),
    }
    assert set(families) == set(expected)
    for name, (kind, labels, amount) in expected.items():
        family = families[name]
        assert family.type == kind
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == {"model_name", "engine"} | labels
        if amount is not None:
            assert sum(sample.value for sample in family.samples) == amount
        else:
            count = next(s.value for s in family.samples if s.name.endswith("_count"))
            assert count == (9 if "inter_token" in name else 1)


async def test_vllm_compatible_metrics_are_off_by_default(server) -> None:
    assert "vllm:" not in (await server.http.get("/metrics")).text


async def test_metric_of_missing_kv_blocks_distinguishes_waiting_from_rejected_requests(
    run_server, small_plan
) -> None:
    """In a pool of 63 blocks, a request of 50 blocks runs, a second one lacks 37, and one of 126 never fits."""
    engine = FakeEngine(small_plan(64), token_rate=100, policy=Policy(AdmissionMode.NO_EVICT))
    async with run_server(engine) as server:
        tasks = [asyncio.create_task(server.complete(prompt=[n + 1] * 400, max_tokens=400)) for n in range(2)]
        await server.until(lambda: engine.stats().waiting == 1)
        await server.complete(prompt=[7] * 1000, max_tokens=1016)
        _, samples = await scrape(server)
        name = "tonnage_admission_refused_blocks_total"
        assert value(samples, name, outcome="wait", reason="blocks") == 2 * 50 - 63
        assert value(samples, name, outcome="never", reason="blocks") == 126 - 63
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.until(lambda: server.state.accounts.in_flight == 0)
