"""``tonnage watch`` on recorded pages of each server type, and on a Tonnage server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pages import Stored, recorded
from watched import LLAMA, QWEN, SGLANG, VLLM, llama, look, sglang, vllm

from tonnage.cache.disk.store import DiskCounts
from tonnage.planner.errors import TonnageError
from tonnage.planner.plans import Plan
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.engines.stats import TierStats
from tonnage.server.observe.memory_report import planned_components
from tonnage.server.observe.metrics.families import Page
from tonnage.server.observe.metrics.headroom import Headroom
from tonnage.server.observe.metrics.tier import tier_families
from tonnage.server.watch.client import Client, WatchError
from tonnage.server.watch.export import _tier as exported_tier
from tonnage.server.watch.records import Counters, TierReading
from tonnage.server.watch.samples import Samples
from tonnage.server.watch.servers.tonnage import _tier as tonnage_tier
from tonnage.server.watch.servers.vllm import _tier as vllm_tier
from tonnage.server.watch.text import tier_line
from tonnage.server.watch.watcher import Watcher


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(QWEN.read_text())
    return str(tmp_path)


# -- vLLM


def test_full_kv_pool_of_a_watched_vllm_server_is_read_from_its_metrics() -> None:
    """The pool of 64 MiB has 22 blocks of 128 tokens, one of them the null block."""
    with vllm() as server:
        found = look(server)
    assert (found.facts.title, found.facts.version, found.facts.served) == ("vLLM", "0.32.0", "demo")
    (replica,) = found.reading.replicas
    assert (replica.running, replica.waiting) == (7, 23)
    assert replica.pool is not None
    assert (replica.pool.num_blocks, replica.pool.usable, replica.pool.used) == (22, 21, 21)
    assert replica.pool.cached is None  # vLLM does not tell
    assert found.planned is not None
    assert (found.planned.num_blocks, found.planned.tokens) == (22, 2816)  # kv_cache_size_tokens of the page
    assert found.measured == {"kv_pool": 22 * 128 * 30 * 2 * 3 * 64 * 2} == {"kv_pool": 64_880_640}
    assert found.planned.components["kv_pool"] == found.measured["kv_pool"]
    assert found.headroom is not None
    assert (found.headroom.blocks, found.headroom.requests, found.headroom.prompt_tokens) == (0, 0, 0)


def test_headroom_of_a_watched_vllm_counts_requests_of_the_average_finished_size() -> None:
    """30 requests of 12 + 400 tokens hold 4 blocks of 128 tokens each."""
    with vllm("after") as server:
        found = look(server)
    assert found.reading.counters.preemptions == 38
    assert (found.reading.counters.finished, found.reading.counters.finished_generation) == (30, 12_000)
    assert found.headroom is not None
    assert (found.headroom.blocks, found.headroom.requests) == (21, 21 // 4)
    assert found.headroom.prompt_tokens == 2047  # max_model_len less one to generate


def test_headroom_of_a_watched_vllm_before_its_first_request_counts_requests_of_the_longest_size() -> None:
    with vllm("idle") as server:
        found = look(server)
    assert found.headroom is not None
    assert found.headroom.requests == 21 // 16  # 2,048 tokens are 16 blocks
    assert found.change is None


def test_plan_for_a_server_on_an_unknown_device_has_only_weights_and_kv_pool() -> None:
    with vllm() as server:
        bare = look(server)
        named = look(server, gpu="h100-80g")
        said = look(server, gpu="h100-80g", max_num_seqs=16)
    assert bare.planned is not None
    assert named.planned is not None
    assert set(bare.planned.components) == {"weights", "kv_pool"}
    assert any("--gpu" in note for note in bare.notes)
    assert {"activations", "framework", "cuda_graphs", "free"} <= named.planned.components.keys()
    assert any("--max-num-seqs" in note for note in named.notes)  # assumed
    assert not any("--max-num-seqs" in note for note in said.notes)


def test_vllm_server_info_completes_the_plan() -> None:
    """With VLLM_SERVER_DEV_MODE=1, vLLM reports its device, batch limits and parallel sizes."""
    with vllm(server_info=recorded(VLLM, "server_info.json")) as server:
        found = look(server)
        assert found.facts.flags["max_num_seqs"] == 16
        assert found.facts.flags["device"] == "cpu"
        assert found.planned is not None
        assert "framework" in found.planned.components
        assert not any("--max-num-seqs" in note for note in found.notes)
        with pytest.raises(
            TonnageError, match=r"--max-num-seqs: vLLM runs with 16, not with 32 \(leave it out\)"
        ):
            look(server, max_num_seqs=32)
        with pytest.raises(TonnageError, match="contradicts --gpu"):
            look(server, gpu="h100-80g")


def test_values_of_vllm_replicas_are_added_up() -> None:
    page = recorded(VLLM, "metrics_after.txt")
    with vllm() as server:
        server.paths["/metrics"] = Stored(page + page.replace('engine="0"', 'engine="1"'))
        found = look(server, gpu="h100-80g")
    assert len(found.reading.replicas) == 2
    assert found.facts.flags["data_parallel_size"] == 2
    assert found.reading.blocks("usable") == 42
    assert found.headroom is not None
    assert (found.headroom.requests, found.headroom.prompt_tokens) == (10, 2047)  # one prompt fits one replica
    assert found.measured["kv_pool"] == 64_880_640  # of one


def test_disabled_vllm_metrics_are_reported(tmp_path: Path) -> None:
    with vllm() as server:
        server.paths["/metrics"] = Stored("# nothing of vLLM\n")
        with pytest.raises(WatchError, match=r"vLLM, but its metrics are off \(start it without --disable-log"):
            look(server)


def test_vllm_with_tonnage_plugin_exports_its_plan() -> None:
    """The plan is in the metrics of docs/vllm.md; planner flags are neither needed nor accepted."""
    ours = """
tonnage_plan_info{model="demo",plan_id="abc",revision="0",engine="vllm",architecture="L",quantization="none"} 1
tonnage_plan_info{model="demo",plan_id="def",revision="1",engine="vllm",architecture="L",quantization="none"} 1
tonnage_memory_planned_bytes{model="demo",device="cuda:0",component="weights"} 7
tonnage_memory_planned_bytes{model="demo",device="cuda:1",component="weights"} 8
tonnage_memory_measured_bytes{model="demo",device="cuda:1",component="kv_pool"} 64880640
tonnage_config_block_bytes{model="demo"} 2949120
tonnage_config_block_size_tokens{model="demo"} 128
tonnage_config_num_blocks{model="demo"} 22
tonnage_headroom_blocks{model="demo"} 3
tonnage_headroom_requests{model="demo"} 1
tonnage_headroom_prompt_tokens{model="demo"} 200
"""
    with vllm() as server:
        server.paths["/metrics"] = Stored(recorded(VLLM, "metrics_full.txt") + ours)
        found = look(server)
        beside = look(server, gpu="cpu")
    assert beside.planned == found.planned
    assert beside.notes == ("--gpu is not used: vLLM with Tonnage in it reports its own plan",)
    assert found.planned is not None
    assert (found.planned.plan_id, found.planned.device, found.planned.num_blocks) == ("abc", "cuda:1", 22)
    assert found.planned.components == {"weights": 8}
    assert found.measured == {"kv_pool": 64_880_640}
    assert found.headroom == Headroom(3, 1, 200)
    assert found.notes == ()


# -- llama.cpp


def test_llama_cpp_slots_with_separate_caches_are_read(gguf: str) -> None:
    with llama("split", "load") as server:
        found = look(server, gguf, kv_unified=False)
    assert found.facts.title == "llama.cpp"
    assert len(found.reading.replicas) == 4
    assert (found.reading.sum_of("running"), found.reading.sum_of("waiting")) == (4, 2)
    assert (found.reading.blocks("usable"), found.reading.blocks("used")) == (4096, 15 + 15 + 15 + 16)
    assert found.planned is not None
    assert found.planned.components["weights"] == found.measured["weights"] == 96_576_768
    # -c 4096 of 30 layers, K and V of 3 heads of 64 values in f16
    assert found.planned.components["kv_pool"] == 4096 * 30 * 2 * 3 * 64 * 2 == found.measured["kv_pool"]
    assert found.headroom is not None
    assert found.headroom.requests == 0


def test_llama_cpp_slots_with_unified_cache_are_read(gguf: str) -> None:
    with llama("default", "after") as server:
        found = look(server, gguf, kv_unified=True)
    (replica,) = found.reading.replicas
    assert replica.pool is not None
    assert replica.seats == 4
    assert (replica.pool.used, replica.pool.cached) == (0, 100)  # two prompts are kept
    assert found.headroom is not None
    assert (found.headroom.requests, found.headroom.prompt_tokens) == (4, 4095)


def test_llama_cpp_pool_is_unknown_without_kv_unified_option(gguf: str) -> None:
    with llama("split", "load") as server:
        found = look(server, gguf)
    assert found.planned is not None
    assert set(found.planned.components) == {"weights"}
    assert found.headroom is None
    assert found.reading.blocks("used") is None
    assert (found.reading.sum_of("running"), found.reading.sum_of("waiting")) == (4, 2)
    assert any("--no-kv-unified" in note for note in found.notes)


def test_llama_cpp_with_disabled_slots_or_metrics_is_reported(gguf: str) -> None:
    with llama("split", "idle") as server:
        server.paths["/slots"] = Stored(recorded(LLAMA, "slots_off.json"), 501)
        found = look(server, gguf, kv_unified=False)
        assert found.reading.sum_of("running") == 0
        assert found.reading.blocks("used") is None
        server.paths["/metrics"] = Stored(recorded(LLAMA, "metrics_off.json"), 501)
        with pytest.raises(WatchError, match=r"cpp, but its metrics are off \(start it with --metrics\)"):
            look(server, gguf)


def test_model_path_of_another_machine_is_rejected() -> None:
    with (
        llama("split", "idle") as server,
        pytest.raises(TonnageError, match=r"^--model: the server's model") as told,
    ):
        look(server)
    assert "a .gguf file or a hub id" in str(told.value)


# -- SGLang


def test_kv_pool_plan_and_counters_of_a_watched_sglang_server_are_read(qwen: str) -> None:
    """The model needs 12,288 bytes per token; SGLang reports 0.23 GiB for 20,480 tokens."""
    with sglang() as server:
        found = look(server, qwen, gpu="h100-80g")
    (replica,) = found.reading.replicas
    assert (replica.running, replica.waiting) == (3, 2)  # the sum over the priorities is there beside them
    assert replica.pool is not None
    assert (replica.pool.num_blocks, replica.pool.used, replica.pool.cached) == (
        20_480,
        7000,
        4096,
    )  # not twice
    assert found.facts.flags["mem_fraction_static"] == 0.836
    assert found.planned is not None
    assert found.planned.tokens == 20_480  # --max-total-tokens, though more would fit
    assert found.planned.components["kv_pool"] == found.measured["kv_pool"] == 251_658_240
    assert round(found.measured["kv_pool"] / 2**30, 2) == 0.23
    assert found.measured["weights"] == int(0.98 * 2**30)
    assert found.reading.counters == Counters(
        preemptions=5, prompt_tokens=10_000, generation_tokens=2000, prefix_query_tokens=10_000,
        prefix_hit_tokens=2500, finished=100, finished_prompt=10_000, finished_generation=2000,
    )  # fmt: skip
    assert found.headroom is not None
    assert found.headroom.requests == 13_480 // 120  # 100 + 20 tokens each


HICACHE = """
sglang:hicache_host_used_tokens{tp_rank="0"} 30720
sglang:hicache_host_used_tokens{tp_rank="1"} 30720
sglang:hicache_host_total_tokens{tp_rank="0"} 40960
sglang:hicache_host_total_tokens{tp_rank="1"} 40960
sglang:load_back_tokens_total{tp_rank="0"} 1000
sglang:load_back_tokens_total{tp_rank="1"} 1000
sglang:load_back_duration_seconds_sum{tp_rank="0"} 1.5
"""


def test_sglang_hicache_metrics_are_read_once_although_every_rank_repeats_them(qwen: str) -> None:
    """Names and types are those of SGLang's metrics_collector.py."""
    with sglang() as server:
        assert look(server, qwen).reading.tier is None
        server.paths["/metrics"] = Stored(recorded(SGLANG, "metrics_0.5.txt") + HICACHE)
        tier = look(server, qwen).reading.tier
    assert tier is not None
    assert (tier.used_share, tier.hit_tokens, tier.spent_seconds) == (0.75, 1000, 1.5)
    assert tier_line(tier) == "KV tier host 75 % full, 1,000 tokens hit, 1.5 s spent"


def test_older_sglang_metrics_are_read(qwen: str) -> None:
    """The metric names are from SGLang's documentation; its arguments are under /get_server_info."""
    with sglang("0.4", get_server_info=recorded(SGLANG, "server_info.json")) as server:
        del server.paths["/server_info"]
        found = look(server, qwen)
    (replica,) = found.reading.replicas
    assert (replica.running, replica.waiting) == (162, 2826)
    assert found.reading.counters.preemptions is None
    assert found.reading.counters.prompt_tokens == 8_128_902


def test_disabled_sglang_metrics_are_reported(qwen: str) -> None:
    with sglang() as server:
        del server.paths["/metrics"]
        with pytest.raises(
            WatchError, match=r"SGLang, but its metrics are off \(start it with --enable-metrics\)"
        ):
            look(server, qwen)


# -- KV tiers


def test_saved_seconds_of_a_kv_tier_never_decrease_when_prefill_becomes_faster() -> None:
    """Each increase of the hits is valued at the pace of its time."""
    first = TierReading(hit_tokens=100, token_seconds=0.5).after(None)
    second = TierReading(hit_tokens=110, token_seconds=0.1).after(first)
    assert (first.saved_seconds, second.saved_seconds) == (50.0, 51.0)
    unknown = TierReading(hit_tokens=120).after(second)
    assert unknown.saved_seconds is None  # no prompt was computed
    reported = TierReading(hit_tokens=120, saved_seconds=3.0)
    assert reported.after(second) is reported


def test_kv_tiers_of_vllm_are_read_from_its_metrics() -> None:
    """18 prompts of six sessions: 3,848 tokens computed in 18.9 s of prefill, 5,568 loaded in 1.3 s."""
    with vllm("full") as server:
        assert look(server).reading.tier is None
    with vllm("tiers") as server:
        tier = look(server, gpu="cpu").reading.tier
    assert tier is not None
    assert (tier.hit_tokens, tier.loaded_bytes, tier.stored_bytes) == (5568, 5568 * 46_080, 159_252_480)
    assert (tier.disk_used, tier.disk_size) == (160_120_320, 1 << 30)
    assert tier.used_share is None  # vLLM does not report how full its host memory is
    assert tier_line(tier) == (
        "KV tier disk 152.7 MiB of 1.00 GiB, 5,568 tokens hit, 27.3 s of prefill saved, 1.4 s spent: +25.9 s"
    )


LMCACHE = """
lmcache:local_cache_usage{model_name="m",worker_id="%d",role="worker",served_model_name=""} 1073741824
lmcache:local_storage_usage{model_name="m",worker_id="%d",role="worker",served_model_name=""} 2147483648
lmcache:time_to_retrieve_sum{model_name="m",worker_id="%d",role="worker",served_model_name=""} %g
lmcache:time_to_retrieve_count{model_name="m",worker_id="%d",role="worker",served_model_name=""} 4
"""


def test_lmcache_metrics_inside_vllm_are_combined_over_its_ranks() -> None:
    """Add the bytes of two ranks, and take the longer of their times, since both load at the same time.

    Names, types and labels are those of LMCache's lmcache/observability.py (0353be82 of LMCache/LMCache).
    """
    ranks = "".join(LMCACHE % (rank, rank, rank, seconds, rank) for rank, seconds in ((0, 1.5), (1, 1.25)))
    hits = "vllm:external_prefix_cache_hits_total 4096\n"
    prefill = "vllm:request_prefill_time_seconds_sum 8\nvllm:request_prefill_kv_computed_tokens_sum 4096\n"
    tier = vllm_tier(Samples(ranks + hits + prefill))
    assert tier is not None
    assert (tier.host_used, tier.disk_used, tier.hit_tokens) == (2 << 30, 4 << 30, 4096)
    assert tier.spent_seconds == 1.5
    assert tier_line(tier.after(None)) == (
        "KV tier host 2.00 GiB, disk 4.00 GiB, 4,096 tokens hit, 8.0 s of prefill saved, 1.5 s spent: +6.5 s"
    )


def test_watched_kv_tier_size_of_vllm_is_the_value_of_its_flag() -> None:
    page = 'vllm:kv_offload_load_time_total 0\nvllm:cache_config_info{kv_offloading_size="%s",engine="%d"} 1\n'
    for text, size in (("64.0", 64 << 30), ("0.5", 1 << 29), ("None", None), ("x", None), ("1e400", None)):
        tier = vllm_tier(Samples(page % (text, 0)))
        assert tier is not None
        assert tier.host_size == size, text
    two = vllm_tier(Samples(page % ("8", 0) + (page % ("8", 1)).split("\n", 1)[1]))
    assert two is not None
    assert two.host_size == 16 << 30  # each data-parallel engine has its own


def test_kv_tier_of_a_tonnage_server_is_read_and_exported() -> None:
    """The page is written by the server's own function, and the exported one names the same values."""
    disk = DiskCounts(**{part.name: 0 for part in fields(DiskCounts)} | {"size": 1 << 40, "used": 1 << 30})
    stats = TierStats(64 << 30, 16 << 30, 10, 12, 2, 1, 3, 0.5, 9.0, 1.25, disk)
    page = Page(model="m")
    tier_families(page, stats, 16)
    served = page.take()
    tier = tonnage_tier(Samples(served))
    assert tier == TierReading(
        64 << 30, 16 << 30, None, 1 << 40, 1 << 30, hit_tokens=48, spent_seconds=1.25, saved_seconds=9.0
    )
    assert tier_line(tier) == (
        "KV tier host 16.00 GiB of 64.00 GiB, disk 1.00 GiB of 1,024.00 GiB, 48 tokens hit, "
        "9.0 s of prefill saved, 1.2 s spent: +7.8 s"
    )
    page = Page(model="m")
    exported_tier(page, tier)
    lines = set(page.take().splitlines())
    assert lines <= set(served.splitlines())
    assert len([line for line in lines if not line.startswith("#")]) == 7


# -- our own server


async def test_tonnage_server_plan_is_read_unchanged(
    run_server: Callable[..., Any], small_plan: Callable[..., Plan]
) -> None:
    """The server exports its plan, also with vLLM's metric names beside its own."""
    plan = small_plan()
    async with run_server(FakeEngine(plan), metrics_compat="vllm") as running:
        for number in range(3):
            await running.complete(prompt=f"Story {number}", max_tokens=8)
        watcher = Watcher(Client(running.url), {}, None)
        found = await asyncio.to_thread(watcher.observe)
        page = Samples((await running.http.get("/metrics")).text)
        memory = (await running.http.get("/memory")).json()
    assert found.facts.title == "Tonnage"
    assert found.planned is not None
    assert found.planned.plan_id == plan.plan_id
    assert found.planned.components == planned_components(plan)
    assert found.reading.blocks("usable") == memory["pool"]["blocks"]["usable"] == 255
    assert found.reading.blocks("cached") == memory["pool"]["blocks"]["cached"]
    assert found.headroom is not None
    assert found.headroom.requests == page.count("tonnage_headroom_requests")
    assert found.headroom.blocks == page.count("tonnage_headroom_blocks")
    assert found.reading.counters.generation_tokens == 24
    assert (found.reading.sum_of("running"), found.reading.sum_of("waiting")) == (0, 0)


async def test_watching_a_tonnage_server_needs_no_flag_but_the_api_key(
    run_server: Callable[..., Any], small_plan: Callable[..., Plan]
) -> None:
    async with run_server(FakeEngine(small_plan()), api_key="watch-secret", key="watch-secret") as running:
        with pytest.raises(WatchError, match="--api-key"):
            await asyncio.to_thread(Watcher(Client(running.url), {}, None).observe)
        known = Client(running.url, api_key="watch-secret")
        for given, model in (({}, "demo"), ({"gpu": "h100-80g"}, None)):
            noted = await asyncio.to_thread(Watcher(known, given, model).observe)
            assert noted.notes[-1].endswith("is not used: Tonnage reports its own plan")
        found = await asyncio.to_thread(Watcher(known, {}, None).observe)
    assert found.facts.title == "Tonnage"
