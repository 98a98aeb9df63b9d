"""The disk tier behind vLLM's own manager of tiers, with the host region in shared memory."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm_tiers import CHUNK, bytes_of, fetch, key, manager, offload, offload_and_finish, until_idle

from tonnage.cache.disk import DiskError
from tonnage.planner.errors import DeploymentError


def test_chunks_are_read_from_disk_after_a_restart_that_emptied_the_host_tier(tmp_path: Path) -> None:
    with manager(tmp_path) as made:
        for number in range(40):
            offload(made, [number])
        for number in range(40):  # the host tier holds four
            data = fetch(made, number)
            assert data is not None
            assert np.array_equal(data, bytes_of(number))
        assert fetch(made, 99) is None
    with manager(tmp_path) as made:
        for number in range(40):
            data = fetch(made, number)
            assert data is not None
            assert np.array_equal(data, bytes_of(number))
        stats = made.get_stats().data["data"]
        assert stats["tonnage_tier_loaded_total"][()] == 40
        assert stats["tonnage_tier_read_bytes_total"][()] == 40 * CHUNK
        assert stats["tonnage_tier_size"][()] == 64 << 20
        assert 40 * CHUNK < stats["tonnage_tier_used"][()] < 41 * CHUNK + (1 << 20)
        assert made.get_stats().data["data"].get("tonnage_tier_loaded_total") is None


def test_damaged_disk_chunk_is_a_cache_miss_for_vllm(tmp_path: Path) -> None:
    with manager(tmp_path) as made:
        offload(made, [1, 2])
    (damaged,) = tmp_path.rglob(f"{key(1).hex()}.kv")
    data = bytearray(damaged.read_bytes())
    data[5000] ^= 1
    damaged.write_bytes(data)
    with manager(tmp_path) as made:
        assert fetch(made, 1) is None
        other = fetch(made, 2)
        assert other is not None
        assert np.array_equal(other, bytes_of(2))
        offload(made, [1])
        again = fetch(made, 1)
        assert again is not None
        assert np.array_equal(again, bytes_of(1))


@pytest.mark.parametrize("other", [{"dtype": "float16"}, {"model": "a/c"}, {"revision": "2"}])
def test_disk_chunks_of_another_model_dtype_or_revision_are_never_read(
    tmp_path: Path, other: dict[str, str]
) -> None:
    with manager(tmp_path) as made:
        offload(made, [1])
    with manager(tmp_path, **other) as made:
        assert fetch(made, 1) is None
    with manager(tmp_path) as made:
        assert fetch(made, 1) is not None


def test_disk_chunks_are_not_read_after_the_weights_of_a_local_model_changed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"x" * 100)
    with manager(tmp_path / "kv", model=str(model)) as made:
        offload(made, [1])
        assert fetch(made, 1) is not None
    (model / "model.safetensors").write_bytes(b"y" * 101)
    with manager(tmp_path / "kv", model=str(model)) as made:
        assert fetch(made, 1) is None


def test_slow_disk_drops_writes_and_blocks_only_few_chunks_of_the_host_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager(tmp_path, chunks=64, waiting=str(4 * CHUNK)) as made:
        store = made.secondary_tiers[0]._store
        plain = store.store

        def slow(*args: Any) -> bool:
            time.sleep(0.01)
            return bool(plain(*args))

        monkeypatch.setattr(store, "store", slow)
        context = ReqContext("many")
        made.on_new_request(context)
        for number in range(40):
            prepared = made.prepare_store([key(number)], context)
            assert prepared is not None
            made.complete_store(prepared.keys_to_store, context)
            waiting = made.secondary_tiers[0]._waiting
            assert waiting <= 4 * CHUNK
        made.on_request_finished(context)
        until_idle(made)
        counts = store.counts()
        assert counts.dropped > 20
        assert counts.stored + counts.dropped == 40


def test_chunks_hit_in_the_host_tier_are_not_evicted_from_disk(tmp_path: Path) -> None:
    with manager(tmp_path, chunks=4, size="2MiB") as made:
        offload(made, [0])
        for number in range(1, 60):
            if number % 3 == 0:
                context = ReqContext(f"again-{number}")
                made.on_new_request(context)
                assert made.lookup(key(0), context) is not LookupResult.MISS
                context.set_offload_key_position(key(0), 16)
                until_idle(made)
                made.on_request_finished(context)
            offload(made, [number])
        store = made.secondary_tiers[0]._store
        assert store.counts().evicted > 20
        assert store.contains(key(0))
        assert not store.contains(key(1))


def offload_computed(made: TieringOffloadingManager, numbers: list[int], seconds: float) -> None:
    """Miss chunks, compute them for some seconds, and offload them, as a request does."""
    context = ReqContext(f"compute-{numbers}")
    made.on_new_request(context)
    assert made.lookup(key(numbers[0]), context) is LookupResult.MISS
    time.sleep(seconds)
    offload_and_finish(made, [key(number) for number in numbers], context)


def declined(made: TieringOffloadingManager) -> int:
    count: int = made.secondary_tiers[0]._store.counts().declined
    return count


@pytest.mark.parametrize(("bytes_a_second", "compute"), [(10e6, 0.0), (1e12, 0.4)], ids=["slow", "fast"])
def test_disk_chunks_are_read_only_where_that_is_faster_than_computing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_a_second: float, compute: float
) -> None:
    """A chunk of 64 KiB takes 6.5 ms from a disk of 10 MB/s; four chunks are computed at once, or in 0.4 s."""
    with manager(tmp_path) as made:
        store = made.secondary_tiers[0]._store
        plain = store.load

        def paced(*args: Any) -> bool:
            time.sleep(CHUNK / bytes_a_second)
            return bool(plain(*args))

        monkeypatch.setattr(store, "load", paced)
        offload_computed(made, [0, 1, 2, 3], compute)
        offload_computed(made, [4, 5, 6, 7], compute)  # the host tier holds four
        for number in range(4):  # the first reads are measured
            fetch(made, number)
        offload_computed(made, [8, 9, 10, 11], compute)
        slow = bytes_a_second < 1e9
        assert (fetch(made, 1) is None) is slow
        assert (declined(made) > 0) is slow
        assert store.contains(key(1))  # a slow disk costs the hit, not the block


def test_configured_prefill_speed_decides_about_disk_reads_from_the_first_request(tmp_path: Path) -> None:
    """A chunk has 16 tokens: 1.6e-8 s at 1e9 tokens a second, less than any read takes."""
    with manager(tmp_path, prefill=1e9) as made:
        offload(made, [0, 1, 2, 3])
        offload(made, [4, 5, 6, 7])
        assert fetch(made, 0) is not None  # the first read is measured
        assert fetch(made, 1) is None
        assert declined(made) == 1


def test_scheduler_thread_of_vllm_never_reads_or_writes_disk_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call of vLLM takes microseconds, so it can have touched no file."""
    with manager(tmp_path, chunks=64) as made:
        offload(made, list(range(40)))
        tier = made.secondary_tiers[0]
        opened: list[str] = []
        here = threading.get_ident()

        def audit(event: str, args: tuple[Any, ...]) -> None:
            if event in ("open", "os.listdir", "os.scandir") and threading.get_ident() == here:
                opened.append(str(args[0]))

        sys.addaudithook(audit)
        context = ReqContext("again")
        opened.clear()
        for number in range(80):
            tier.lookup(key(number), context)
        tier.touch([key(1)], context)
        tier.get_finished_jobs()
        tier.get_stats()
        assert opened == []


def test_errors_name_the_disk_folder_in_use_or_the_invalid_disk_tier_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonnage.cache.disk.folder.LOCK_SECONDS", 0.1)
    with manager(tmp_path), pytest.raises(DiskError, match="belongs to another server"), manager(tmp_path):
        pass
    with (
        pytest.raises(DeploymentError, match="'1 TB of it' is not a size"),
        manager(tmp_path, size="1 TB of it"),
    ):
        pass
    with pytest.raises(DeploymentError, match="has no option 'sizes'"), manager(tmp_path, sizes="1TiB"):
        pass
    for wrong in (0, -1, "fast", True, float("nan")):
        with (
            pytest.raises(DeploymentError, match="is not a positive number of tokens a second"),
            manager(tmp_path, prefill=wrong),
        ):
            pass
    with (
        pytest.raises(DeploymentError, match="read_only: 'yes' is not true or false"),
        manager(tmp_path, read_only="yes"),
    ):
        pass
