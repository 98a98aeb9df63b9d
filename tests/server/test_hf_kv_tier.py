"""The hf engine's KV tier behind the real scheduler, block manager and pool, with a stand-in for the model.

The stand-in writes into every position of the pool a value that depends on all tokens up to it and on the salt.
Before each step, every computed position of every sequence must have its own value (`check_contents`). So a
block of another prefix, another salt or a damaged file would be found.
"""

from __future__ import annotations

import random
import select
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_steps import finish, publish_and_fork
from invariants import check_invariants

from tonnage.cache.disk import DiskError, DiskStore
from tonnage.cache.disk.pace import ReadRule
from tonnage.cache.prefix.content import ContentKeys
from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError
from tonnage.planner.planning.build import make_plan
from tonnage.planner.plans import Plan
from tonnage.server.commands.launch import make_engine
from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines.chunk import Chunk
from tonnage.server.engines.hf import kv_tier
from tonnage.server.engines.hf.kv_tier import KVTier, tier_of
from tonnage.server.engines.hf.pool import PagedPool
from tonnage.server.engines.hf.scheduler import HFScheduler
from tonnage.server.engines.hf.sequence import HFSequence
from tonnage.server.engines.request import GenerationRequest, SamplingParams
from tonnage.server.engines.sharing import Sharing
from tonnage.server.engines.stats import TierStats
from tonnage.server.settings import load_settings

BLOCK = 16
PER_BLOCK = BLOCK * 30 * 2 * 3 * 64 * 4  # tokens x layers x K and V x KV heads x head size x float32


def plan_for(blocks: int, host: int, disk: str | None = None, **changes: Any) -> Plan:
    ensure_demo()
    settings: dict[str, Any] = {
        "max_model_len": 512,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        **changes,
    }
    flags = Deployment(
        dtype="float32",
        kv_cache_memory_bytes=(blocks + 1) * PER_BLOCK,
        kv_offloading_bytes=host * PER_BLOCK,
        kv_offloading_disk=disk,
        **settings,
    )
    return make_plan("demo", flags)


def value_of(salt: str, tokens: list[int]) -> float:
    """Return the value of the last of these tokens' positions; float32 has it exactly."""
    return float(zlib.crc32(repr((salt, tokens)).encode()) % (1 << 24))


class Bench:
    """A scheduler with a pool and a tier, and the stand-in for the model."""

    def __init__(self, plan: Plan, sharing: Sharing | None = None) -> None:
        self.pool = PagedPool(plan.kv_cache.layout, plan.kv_cache.num_blocks, torch.device("cpu"))
        tier = tier_of(plan, self.pool)
        assert tier is not None
        self.tier: KVTier = tier
        self.shared = () if sharing is None else sharing.prefixes
        self.scheduler = HFScheduler(plan, sharing=sharing, tier=tier)
        self.computed = 0  # positions that the stand-in has computed

    def stats(self) -> TierStats:
        found = self.scheduler.stats().tier
        assert found is not None
        return found

    def value(self, sequence: HFSequence, at: int) -> float:
        """Return the value that a position must have; shared prefixes have one for all salts."""
        tokens = sequence.tokens[: at + 1]
        salt = sequence.request.cache_salt
        if any(list(prefix[: at + 1]) == tokens for prefix in self.shared):
            salt = ""
        return value_of(salt, tokens)

    def check_contents(self) -> None:
        """Assert that every computed position of every running sequence has its value in the whole pool row."""
        manager = self.scheduler.manager
        for sequence in self.scheduler.running.values():
            table = manager.tables[0][manager.row(sequence.id)]
            for at in range(sequence.computed):
                part = self.pool.tensor[int(table[at // BLOCK]), :, :, at % BLOCK]
                expected = self.value(sequence, at)
                assert part[0, 0, 0, 0] == expected, (sequence.request.request_id, at)
                if at % 5 == 0:
                    assert bool((part == expected).all())

    def step(self) -> list[Chunk]:
        batch, picked, chunks = self.scheduler.schedule()
        if batch is not None:
            self.pool.copy_blocks(*_copies(batch))
        self.check_contents()
        if batch is not None:
            manager = self.scheduler.manager
            for sequence in picked:
                table = manager.tables[0][manager.row(sequence.id)]
                for at in range(sequence.computed, sequence.computed + sequence.chunk):
                    self.pool.tensor[int(table[at // BLOCK]), :, :, at % BLOCK] = self.value(sequence, at)
                    self.computed += 1
            draws = publish_and_fork(self.scheduler, picked)
            tokens = [3 + int(value_of("", d.sequence.tokens)) % 40_000 + d.sequence.index for d in draws]
            chunks += finish(self.scheduler, draws, tokens)
        check_invariants(self.scheduler.manager)
        check_tier(self.tier)
        return chunks

    def run(
        self, requests: list[GenerationRequest], *, in_step: bool = False
    ) -> dict[tuple[str, int], list[int]]:
        """Return the tokens of each sequence; ``in_step``: reads and writes end before the next step."""
        said: dict[tuple[str, int], list[int]] = {}
        for request in requests:
            self.scheduler.add(request)
        until = time.monotonic() + 120
        while not self.scheduler.idle or self.scheduler.fetching:
            assert time.monotonic() < until
            while in_step and len(self.tier._ended) < len(self.tier._reading) + len(self.tier._writing):
                assert time.monotonic() < until
                time.sleep(0.001)
            if (
                self.scheduler.idle
            ):  # as the engine does; a loop without a pause would hold up the reading threads
                select.select([self.tier], [], [], 1.0)
            for chunk in self.step():
                assert chunk.error is None
                said.setdefault((chunk.request_id, chunk.index), []).extend(chunk.token_ids)
        return said

    def ask(self, prompt: list[int], **more: Any) -> tuple[list[int], int]:
        """Return the tokens of one request, and the positions that were computed for it."""
        before = self.computed
        (tokens,) = self.run([request(prompt, **more)]).values()
        return tokens, self.computed - before


def check_tier(tier: KVTier) -> None:
    """Assert that each slot of the host memory has one use, and that the memory is the planned one."""
    slots = [*tier._free, *tier._slots.values(), *tier._reading.values()]
    assert sorted(slots) == list(range(len(tier._memory)))
    assert tier._writing <= set(tier._slots)
    assert tier.nbytes == len(tier._memory) * tier.block_bytes


def _copies(batch: Any) -> tuple[Any, Any]:
    return np.array([c.src for c in batch.copies], np.int64), np.array([c.dst for c in batch.copies], np.int64)


def request(prompt: list[int], name: str = "r", n: int = 1, **more: Any) -> GenerationRequest:
    salt = more.pop("salt", "")
    return GenerationRequest(
        name,
        tuple(prompt),
        SamplingParams(**{"max_tokens": 5, "temperature": 0.0, **more}),
        n=n,
        cache_salt=salt,
    )


def words(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 40_000) for _ in range(count)]


def written(bench: Bench) -> None:
    """Wait until no block waits to be written."""
    until = time.monotonic() + 60
    while bench.tier._writing:
        assert time.monotonic() < until
        time.sleep(0.002)
        bench.tier.collect()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    """Yield a folder in memory where the machine has room there: a slow disk drops blocks."""
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > 1 << 30
    with tempfile.TemporaryDirectory(dir=memory if has_room else tmp_path) as path:
        yield f"{path}/kv,1GiB"


def opened(plan: Plan, sharing: Sharing | None = None) -> Bench:
    """Return a bench whose tier has the blocks of earlier processes in its index."""
    bench = Bench(plan, sharing)
    if bench.tier._store is not None:
        assert bench.tier._store.wait_until_ready(60)
    return bench


def test_prefix_evicted_from_the_pool_is_loaded_from_the_host_memory_tier() -> None:
    bench = opened(plan_for(blocks=12, host=40))
    first, computed = bench.ask(words(1, 100))
    assert computed == 104  # prompt and answer, without the last token
    for seed in (2, 3):  # push the first prompt out of the pool
        bench.ask(words(seed, 150))
    again, computed = bench.ask(words(1, 100))
    assert again == first
    assert computed == 104 - 96
    assert bench.stats().host_hit_blocks == 6


def test_seconds_saved_by_the_kv_tier_are_hit_blocks_times_measured_prefill_time() -> None:
    bench = opened(plan_for(blocks=12, host=40))
    bench.tier.computed(10 * BLOCK, 5.0, BLOCK)  # half a second for each block
    for seed in (1, 2, 3, 1):
        bench.ask(words(seed, 100 if seed == 1 else 150))
    stats = bench.stats()
    assert stats.host_hit_blocks == 6
    pace = bench.tier._rule.compute_seconds  # the steps of this test count, too
    assert pace is not None
    assert stats.saved_seconds == pytest.approx(6 * pace, rel=0.2)
    assert 0 < stats.host_load_seconds < stats.spent_seconds < 60  # stores take time, too


def test_time_waiting_for_disk_tier_reads_counts_as_seconds_spent_by_the_tier(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(blocks=12, host=40, disk=folder)
    bench = opened(plan)
    bench.ask(words(1, 100))
    written(bench)
    bench.tier.close()
    bench = opened(plan)
    read = DiskStore.load

    def slow(store: DiskStore, key: bytes, into: memoryview) -> bool:
        time.sleep(0.05)
        return read(store, key, into)

    monkeypatch.setattr(DiskStore, "load", slow)
    bench.ask(words(1, 100))
    assert bench.stats().host_hit_blocks == 6
    assert bench.stats().spent_seconds > 0.05
    bench.tier.close()


def test_random_sessions_generate_equal_tokens_with_and_without_a_kv_tier(folder: str) -> None:
    """Sessions of several turns with two salts, forks and more KV than pool and host memory hold."""
    draw = random.Random(5)
    sessions = [(words(90 + s, draw.randrange(20, 120)), draw.choice(["", "x", "y"])) for s in range(12)]
    asked: list[list[GenerationRequest]] = []
    for turn in range(4):
        asked.append([])
        for number in draw.sample(range(len(sessions)), 8):
            prompt, salt = sessions[number]
            prompt += words(1000 + 20 * turn + number, draw.randrange(1, 60))
            asked[-1].append(request(prompt, f"{turn}-{number}", n=draw.choice([1, 1, 2]), salt=salt))
    found: list[list[dict[tuple[str, int], list[int]]]] = []
    for host, disk in ((1, None), (90, None), (40, folder)):
        bench = opened(plan_for(blocks=40, host=host, disk=disk))
        bench.tier._rule = ReadRule(compute_seconds=3600.0)  # however slow the disk is, blocks are read
        found.append([])
        for batch in asked:
            found[-1].append(bench.run(batch, in_step=True))
            written(bench)  # a slow disk would have few blocks of earlier turns
        assert (bench.stats().host_hit_blocks > 10) == (host > 1)
        assert bench.stats().host_evicted > 10
        if disk:
            disk_counts = bench.stats().disk
            assert disk_counts is not None
            assert disk_counts.loaded > 10
        bench.tier.close()
    assert found[0] == found[1] == found[2]


def test_known_prompt_is_read_from_the_disk_tier_after_a_restart(folder: str) -> None:
    prompt = words(1, 400)
    plan = plan_for(blocks=32, host=30, disk=folder)
    bench = opened(plan)
    first, _ = bench.ask(prompt)
    bench.tier.close()
    bench = opened(plan)
    again, computed = bench.ask(prompt)
    assert again == first
    assert computed == 404 - 400 + 16  # the last token of the prompt is computed, with its block
    counts = bench.stats().disk
    assert counts is not None
    assert (counts.loaded, counts.lost) == (24, 0)
    bench.tier.close()


def test_requests_with_a_common_prompt_read_its_disk_blocks_only_once(folder: str) -> None:
    plan = plan_for(blocks=60, host=40, disk=folder)
    bench = opened(plan)
    bench.ask(words(1, 300))
    bench.tier.close()
    bench = opened(plan)
    asked = [request(words(1, 300) + words(at, 20), str(at)) for at in range(2, 5)]
    bench.run(asked)
    counts = bench.stats().disk
    assert counts is not None
    assert counts.loaded == 18
    bench.tier.close()


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_damaged_block_of_the_disk_tier_is_computed_again(folder: str, damage: str) -> None:
    plan = plan_for(blocks=32, host=30, disk=folder)
    bench = opened(plan)
    first, _ = bench.ask(words(1, 200))
    bench.tier.close()
    key = ContentKeys(b"", 0, BLOCK).first(6, words(1, 200))[5].hex()
    (file,) = Path(folder.partition(",")[0]).glob(f"*/*/{key}.kv")
    whole = file.read_bytes()
    if damage == "flipped":
        file.write_bytes(whole[:50_000] + bytes([whole[50_000] ^ 1]) + whole[50_001:])
    elif damage == "cut":
        file.write_bytes(whole[: len(whole) // 2])
    bench = opened(plan)
    if damage == "missing":
        file.unlink()
    again, computed = bench.ask(words(1, 200))
    assert again == first
    assert computed == 204 - 5 * BLOCK
    counts = bench.stats().disk
    assert counts is not None
    assert (counts.lost, counts.loaded) == (1, 11)
    bench.tier.close()


def test_requests_with_different_cache_salts_share_no_block_of_the_kv_tier(folder: str) -> None:
    plan = plan_for(blocks=32, host=60, disk=folder)
    bench = opened(plan)
    bench.ask(words(1, 200), salt="a")
    _, computed = bench.ask(words(1, 200), salt="b")
    assert computed == 204
    bench.tier.close()
    bench = opened(plan)
    assert bench.ask(words(1, 200), salt="c")[1] == 204
    assert bench.stats().host_hit_blocks == 0
    assert bench.ask(words(1, 200), salt="b")[1] == 204 - 192
    bench.tier.close()


def test_shared_system_prompt_is_read_from_disk_for_every_cache_salt(folder: str) -> None:
    plan = plan_for(blocks=32, host=60, disk=folder)
    prefix = words(1, 160)
    sharing = Sharing(prefixes=(tuple(prefix),))
    bench = opened(plan, sharing)
    bench.ask(prefix + words(2, 60), salt="a")
    bench.tier.close()
    bench = opened(plan, sharing)
    assert bench.ask(prefix + words(2, 60), salt="b")[1] == 224 - 160
    assert bench.stats().host_hit_blocks == 10
    bench.tier.close()


def test_prompt_with_prompt_logprobs_is_neither_stored_in_nor_loaded_from_the_kv_tier() -> None:
    bench = opened(plan_for(blocks=32, host=30))
    bench.ask(words(1, 100), prompt_logprobs=0)
    assert bench.stats().host_stored == 0
    bench.ask(words(1, 100))
    assert bench.ask(words(1, 100), prompt_logprobs=0)[1] == 104
    assert bench.stats().host_hit_blocks == 0


def test_first_blocks_of_a_prompt_longer_than_the_host_memory_tier_stay_in_it() -> None:
    bench = opened(plan_for(blocks=20, host=8))
    bench.ask(words(1, 250))
    bench.ask(words(2, 40))
    bench.ask(words(3, 310))
    assert bench.stats().host_blocks == 8
    assert bench.ask(words(3, 310))[1] <= 314 - 8 * BLOCK


def test_slow_disk_tier_drops_writes_and_delays_no_request(folder: str) -> None:
    plan = plan_for(blocks=32, host=30, disk=folder)
    bench = opened(plan)
    tier = bench.tier
    tier._most_waiting = 3 * PER_BLOCK
    store = tier._store
    assert store is not None
    real = store.store

    def slow(key: bytes, block: memoryview) -> bool:
        time.sleep(0.05)
        return real(key, block)

    store.store = slow  # type: ignore[method-assign]
    bench.ask(words(1, 300))
    counts = store.counts()
    assert counts.dropped >= 10
    written(bench)
    bench.tier.close()


def test_hanging_disk_tier_delays_a_request_only_for_a_limited_time(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(blocks=32, host=60, disk=folder)
    bench = opened(plan)
    asked = [words(seed, 200) for seed in (1, 2)]
    expected = [bench.ask(prompt)[0] for prompt in asked]
    bench.tier.close()
    bench = opened(plan)
    store, hangs = bench.tier._store, threading.Event()
    assert store is not None
    load = store.load
    monkeypatch.setattr(store, "load", lambda key, into: hangs.wait() and load(key, into))
    monkeypatch.setattr(kv_tier, "MOST_SECONDS", 0.5)
    tokens, computed = bench.ask(asked[0])
    assert (tokens, computed) == (expected[0], 204)
    # The measured time of the first request's reads is longer than computing, so the second does not wait.
    assert bench.ask(asked[1]) == (expected[1], 204)
    assert store.counts().declined == 1
    hangs.set()
    bench.tier.close()


def test_request_cancelled_during_its_disk_reads_leaves_nothing_behind(folder: str) -> None:
    plan = plan_for(blocks=32, host=30, disk=folder)
    bench = opened(plan)
    bench.ask(words(1, 300))
    bench.tier.close()
    bench = opened(plan)
    bench.scheduler.add(request(words(1, 300), "gone"))
    assert [s.request.request_id for s in bench.scheduler.fetching] == ["gone"]
    assert bench.scheduler.stats().waiting == 1
    assert [chunk.finish_reason for chunk in bench.scheduler.abort("gone")] == ["abort"]
    assert bench.run([request(words(1, 300), "next")])
    assert bench.scheduler.stats().waiting == 0
    bench.tier.close()


def test_disk_tier_folder_in_use_by_another_server_is_rejected(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonnage.cache.disk.folder.LOCK_SECONDS", 0.1)
    plan = plan_for(blocks=32, host=30, disk=folder)
    bench = opened(plan)
    with pytest.raises(DiskError, match="belongs to another server"):
        Bench(plan)
    bench.tier.close()


def test_disk_blocks_are_not_read_after_the_weight_files_changed(folder: str, tmp_path: Path) -> None:
    plan = plan_for(blocks=32, host=30, disk=folder)
    bench = opened(plan)
    bench.ask(words(1, 100))
    bench.tier.close()
    for other in (
        replace(plan, model=replace(plan.model, path=str(tmp_path))),
        replace(plan, deployment=replace(plan.deployment, quantization="int8")),
    ):
        bench = opened(other)
        assert bench.ask(words(1, 100))[1] == 104
        bench.tier.close()


def test_learned_eviction_of_the_host_memory_tier_keeps_returning_prompts() -> None:
    """Prompts return after others that never do and that take the pool and the host memory."""
    found = {}
    for policy in ("lru", "learned"):
        bench = opened(plan_for(blocks=12, host=18, kv_offloading_policy=policy))
        for turn in range(100):
            bench.ask(words(turn % 3, 50), max_tokens=1)
            bench.ask(words(1_000 + turn, 150), max_tokens=1)
        assert bench.stats().host_blocks == 18
        found[policy] = bench.stats().host_hit_blocks
    assert found["lru"] == 0
    assert found["learned"] > 100  # of 291


def test_host_memory_blocks_of_aborted_and_preempted_requests_can_be_evicted() -> None:
    bench = opened(plan_for(blocks=12, host=18))
    for turn in range(60):
        bench.scheduler.add(request(words(turn, 150), f"gone-{turn}", max_tokens=20))
        for _ in range(4):
            bench.step()
        bench.scheduler.abort(f"gone-{turn}")
        bench.step()
    assert bench.stats().host_evicted + bench.stats().host_left_out > 400


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enable_prefix_caching": False}, "prefix caching is off"),
        ({"device": "cuda", "device_memory": 80 << 30}, "only when it runs on a CPU"),
        ({"kv_offloading_bytes": 1000}, "hold no block of 737,280 bytes"),
        ({"kv_offloading_disk": "kv,1MiB"}, "hold no block"),
        ({"kv_offloading_disk": "1GiB"}, "not a folder and a size"),
    ],
)
def test_contradicting_kv_tier_settings_are_rejected(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DeploymentError, match=words):
        make_plan("demo", Deployment(**{"dtype": "float32", "kv_offloading_bytes": 1 << 30, **changes}))


@pytest.mark.parametrize("backend", ["vllm", "fake"])
def test_kv_tier_setting_is_rejected_with_other_backends_than_hf(backend: str) -> None:
    settings = load_settings(model="demo", backend=backend, kv_offloading_bytes="1")
    assert settings.deployment().kv_offloading_bytes == 1 << 30
    with pytest.raises(DeploymentError, match=f"no KV tier with the {backend} backend"):
        make_engine(settings, make_plan("demo", settings.deployment()))


def test_kv_tier_is_rejected_for_a_model_with_sliding_windows(tmp_path: Path) -> None:
    config = Path(__file__).parents[1] / "data" / "configs" / "google__gemma-2-2b.json"
    (tmp_path / "config.json").write_text(config.read_text())
    with pytest.raises(DeploymentError, match="this model has sliding windows"):
        make_plan(str(tmp_path), Deployment(dtype="float32", kv_offloading_bytes=1 << 30))


def test_plan_includes_the_host_memory_tier_in_whole_blocks() -> None:
    without = make_plan("demo", Deployment(dtype="float32"))
    made = make_plan("demo", Deployment(dtype="float32", kv_offloading_bytes=(1 << 30) - 1))
    assert made.rank.kv_tier_bytes == ((1 << 30) - 1) // PER_BLOCK * PER_BLOCK
    assert made.rank.used_bytes - made.rank.kv_pool_bytes == (
        without.rank.used_bytes - without.rank.kv_pool_bytes + made.rank.kv_tier_bytes
    )
    (tier,) = made.tiers
    assert tier.value == made.rank.kv_tier_bytes
    pool = PagedPool(made.kv_cache.layout, 2, torch.device("cpu"))
    assert KVTier(pool, 3).nbytes == 3 * PER_BLOCK


@pytest.mark.parametrize(("policy", "each"), [("learned", 425), ("lru", 206)])
def test_plan_includes_the_in_memory_index_of_the_disk_tier(tmp_path: Path, policy: str, each: int) -> None:
    host = {"dtype": "float32", "kv_offloading_bytes": 1 << 30, "kv_offloading_policy": policy}
    without = make_plan("demo", Deployment(**host))
    made = make_plan("demo", Deployment(**host, kv_offloading_disk=f"{tmp_path},100GiB"))
    disk = made.tiers[1]
    assert disk.chunks is not None
    assert made.rank.framework_bytes - without.rank.framework_bytes == disk.chunks * each
    assert made.rank.kv_tier_bytes == without.rank.kv_tier_bytes


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
