"""A folder of KV blocks on disk: its size, damaged files, killed writers, and who may use it."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from serving import PATIENCE

from tonnage.cache.disk import DiskError, DiskStore
from tonnage.cache.disk.block_file import read_block, write_block
from tonnage.cache.eviction.chunk_order import LearnedChunkOrder
from tonnage.planner.model.tier import HEADER_BYTES, blocks_on_disk

MODEL = {"model": "demo", "dtype": "bfloat16"}


@contextmanager
def opened(
    path: Path, size: int = 4 << 20, namespace: dict[str, str] = MODEL, **more: Any
) -> Iterator[DiskStore]:
    store = DiskStore(path, size, namespace, **more)
    try:
        store.wait_until_ready(PATIENCE)
        yield store
    finally:
        store.close()


def block(number: int, size: int) -> memoryview:
    """Return a block's bytes, which follow from its number."""
    return memoryview(random.Random(number).randbytes(size))


def key(number: int) -> bytes:
    return number.to_bytes(36, "big")


def read(store: DiskStore, number: int, size: int) -> bytes | None:
    into = memoryview(bytearray(size))
    return bytes(into) if store.load(key(number), into) else None


def du(path: Path) -> int:
    """Return the bytes that a folder takes, as ``du`` counts them."""
    done = subprocess.run(["du", "-sB1", str(path)], capture_output=True, text=True)  # 1: a file ends meanwhile
    return int(done.stdout.split()[0])


def files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.kv"))


def test_disk_blocks_can_be_read_before_the_learned_eviction_order_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, compiled = 100_000, threading.Event()
    with opened(tmp_path, learned=size) as store:
        assert store.store(key(1), block(1, size))
    monkeypatch.setattr("tonnage.cache.disk.order.compile_order", lambda: compiled.wait(PATIENCE))
    store = DiskStore(tmp_path, 4 << 20, MODEL, learned=size)
    try:
        until = time.monotonic() + PATIENCE / 2
        while not store.contains(key(1)) and time.monotonic() < until:
            time.sleep(0.01)
        assert store.contains(key(1))
        assert read(store, 1, size) == block(1, size)
        assert not store.store(key(2), block(2, size))
        assert store.counts().dropped == 1
        compiled.set()
        assert store.wait_until_ready(PATIENCE)
        assert store.store(key(2), block(2, size))
    finally:
        compiled.set()
        store.close()


def test_disk_blocks_and_their_lru_order_survive_a_restart(tmp_path: Path) -> None:
    size = 100_000
    with opened(tmp_path, 1 << 20) as store:
        for number in range(9):
            assert store.store(key(number), block(number, size))
            time.sleep(0.01)  # modification times differ
        assert read(store, 0, size) == block(0, size)
    with opened(tmp_path, 1 << 20) as store:
        held = [number for number in range(9) if store.contains(key(number))]
        assert 0 in held
        for number in range(100, 100 + len(held) - 1):
            assert store.store(key(number), block(number, size))
        assert store.contains(key(0))  # it was read last
        assert not any(store.contains(key(number)) for number in range(1, 9))
        assert read(store, 0, size) == block(0, size)


def test_disk_folder_never_exceeds_its_configured_size(tmp_path: Path) -> None:
    """Ten times the folder's size is written by four threads, beside files and blocks from before."""
    limit, chance = 8 << 20, random.Random(0)
    path = tmp_path / "kv"
    with opened(path, 64 << 20, {"model": "another"}) as store:
        for number in range(40):
            store.store(key(number), block(number, 100_000))
    (path / "notes.txt").write_bytes(b"x" * 1_000_000)
    most, end = [0], threading.Event()
    with opened(path, limit) as store:

        def watch() -> None:
            while not end.wait(0.05):
                most[0] = max(most[0], du(path))

        def write(first: int) -> None:
            for number in range(first, first + 200):
                size = chance.choice((1, 4_096, 70_000, 300_000))
                store.store(key(number), block(number, size))

        watcher = threading.Thread(target=watch)
        watcher.start()
        writers = [threading.Thread(target=write, args=(1000 * at,)) for at in range(1, 5)]
        for each in writers:
            each.start()
        for each in writers:
            each.join()
        end.set()
        watcher.join()
        counts = store.counts()
        assert counts.written_bytes > 9 * limit
        assert counts.stored + counts.dropped == 800
        assert counts.dropped == 0
        assert 0 < most[0] <= limit
        assert du(path) <= counts.used <= limit
        assert counts.blocks == len(files(path))
    assert (path / "notes.txt").stat().st_size == 1_000_000


def test_disk_usage_counts_directories_that_stay_large_after_files_are_removed(tmp_path: Path) -> None:
    """ext4 does not shrink a directory when its files are removed; all keys here are in one directory."""
    with opened(tmp_path / "kv", 8 << 20) as store:
        for number in range(1_500):
            assert store.store(key(number), block(number, 1))
        for number in range(1_500, 1_600):
            assert store.store(key(number), block(number, 300_000))
        assert len(files(tmp_path)) < 30
        assert du(tmp_path / "kv") <= store.counts().used <= 8 << 20


@pytest.mark.parametrize("size", [4_000, 20_000])
def test_full_disk_folder_holds_the_planned_number_of_blocks(tmp_path: Path, size: int) -> None:
    limit = 12 << 20
    with opened(tmp_path / "kv", limit) as store:
        for number in range(4_000):
            digest = hashlib.sha256(key(number)).digest()  # vLLM's keys are hashes, so all directories are used
            assert store.store(digest, block(number, size))
        assert store.counts().blocks == blocks_on_disk(limit, size)


def test_disk_folder_is_shrunk_at_start_when_its_configured_size_is_lowered(tmp_path: Path) -> None:
    with opened(tmp_path, 8 << 20) as store:
        for number in range(60):
            store.store(key(number), block(number, 100_000))
    assert du(tmp_path) > 2 << 20
    with opened(tmp_path, 2 << 20) as store:
        assert du(tmp_path) <= 2 << 20
        assert store.counts().evicted > 0


def test_foreign_files_in_the_disk_folder_count_towards_its_size_and_are_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"x" * (2 << 20))
    with opened(tmp_path, 1 << 20) as store:
        assert not store.store(key(1), block(1, 1000))
        assert store.counts().dropped == 1
    assert (tmp_path / "mine").stat().st_size == 2 << 20


def test_disk_block_larger_than_the_folder_limit_is_dropped_and_evicts_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, 1 << 20) as store:
        assert store.store(key(1), block(1, 1000))
        assert not store.store(key(2), block(2, 2 << 20))
        assert store.contains(key(1))


@pytest.mark.parametrize("damage", ["cut off", "longer", "one bit", "header", "gone", "another block", "empty"])
def test_damaged_disk_block_is_a_cache_miss(tmp_path: Path, damage: str) -> None:
    with opened(tmp_path) as store:
        assert store.store(key(1), block(1, 50_000))
        assert store.store(key(2), block(2, 50_000))
        path = next(each for each in files(tmp_path) if each.stem == key(1).hex())
        data = bytearray(path.read_bytes())
        if damage == "gone":
            path.unlink()
        else:
            if damage == "cut off":
                del data[-1:]
            elif damage == "longer":
                data += b"x"
            elif damage == "one bit":
                data[HEADER_BYTES + 40_000] ^= 1
            elif damage == "header":
                data[20] ^= 1
            elif damage == "empty":
                data = bytearray()
            else:
                data = bytearray(next(each for each in files(tmp_path) if each != path).read_bytes())
            path.write_bytes(data)
        assert store.contains(key(1))
        assert read(store, 1, 50_000) is None
        assert not store.contains(key(1))
        assert store.counts().lost == 1
        assert store.store(key(1), block(1, 50_000))  # it is computed and written again
        assert read(store, 1, 50_000) == block(1, 50_000)


@pytest.mark.parametrize("planted", ["link", "pipe"])
def test_symbolic_link_or_pipe_in_place_of_a_disk_block_is_a_cache_miss(tmp_path: Path, planted: str) -> None:
    path, elsewhere = tmp_path / "block.kv", tmp_path / "elsewhere"
    content = memoryview(bytearray(b"a" * 4096))
    write_block(elsewhere, b"key", content)
    temporary = path.with_suffix(".tmp")
    if planted == "link":
        path.symlink_to(elsewhere)
        temporary.symlink_to(elsewhere)
    else:
        os.mkfifo(path)
        os.mkfifo(temporary)
    before = elsewhere.read_bytes()
    found: list[bool] = []

    def used() -> None:
        with suppress(OSError):
            found.append(read_block(path, b"key", content))
        with suppress(OSError):
            write_block(path, b"other", content)

    thread = threading.Thread(target=used, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert True not in found
    assert elsewhere.read_bytes() == before


def test_disk_blocks_of_another_model_or_dtype_are_never_read(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.store(key(1), block(1, 1000))
    with opened(tmp_path, namespace=MODEL | {"dtype": "float16"}) as store:
        assert not store.contains(key(1))
        assert read(store, 1, 1000) is None
    with opened(tmp_path) as store:
        assert read(store, 1, 1000) == block(1, 1000)


def test_one_server_writes_to_a_disk_folder_and_others_can_only_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonnage.cache.disk.folder.LOCK_SECONDS", 0.1)
    with opened(tmp_path) as writer:
        writer.store(key(1), block(1, 1000))
        with pytest.raises(DiskError, match=f"belongs to another server \\(process {os.getpid()}\\)"):
            DiskStore(tmp_path, 1 << 20, MODEL)
        with opened(tmp_path, read_only=True) as reader:
            assert read(reader, 1, 1000) == block(1, 1000)
            assert not reader.store(key(2), block(2, 1000))
            assert read(writer, 1, 1000) == block(1, 1000)
    with opened(tmp_path) as writer:
        assert writer.counts().blocks == 1


def test_server_waits_for_a_disk_folder_that_an_ending_server_still_locks(tmp_path: Path) -> None:
    with opened(tmp_path) as before:
        before.store(key(1), block(1, 1000))
        ending = threading.Timer(0.3, before._folder.close)
        ending.start()
        with opened(tmp_path) as after:
            assert read(after, 1, 1000) == block(1, 1000)
        ending.join()


@pytest.mark.parametrize(("mode", "warnings"), [(0o700, 0), (0o755, 0), (0o775, 1), (0o777, 1)])
def test_disk_folder_that_other_users_can_write_causes_a_warning(
    tmp_path: Path, mode: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(mode)
    with opened(tmp_path):
        pass
    assert caplog.text.count("change the blocks of this disk tier") == warnings


def test_block_stays_on_disk_when_a_read_fails_for_lack_of_file_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, 1 << 20) as store:
        store.store(key(1), block(1, 1000))
        used = store.counts().used
        with monkeypatch.context() as patch:

            def exhausted(*_: object) -> bool:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

            patch.setattr("tonnage.cache.disk.store.read_block", exhausted)
            assert read(store, 1, 1000) is None
        assert not store.contains(key(1))
        assert (store.counts().lost, store.counts().used) == (1, used)
    with opened(tmp_path, 1 << 20) as store:
        assert read(store, 1, 1000) == block(1, 1000)


def test_only_the_owner_has_permission_to_read_disk_blocks(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as store:
        store.store(key(1), block(1, 1000))
    (file,) = files(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700


def test_full_disk_drops_writes_but_reads_still_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of the file size stands for the disk: the kernel fails the write in the middle of a file."""
    code = f"""
import resource, signal, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from tests_disk import opened, block, key, read, files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with opened(Path({str(tmp_path)!r})) as store:
    assert store.store(key(1), block(1, 50_000))
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    for number in range(2, 9):
        assert not store.store(key(number), block(number, 50_000))
    assert store.counts().dropped == 7
    assert read(store, 1, 50_000) == block(1, 50_000)
    assert store.store(key(9), block(9, 10_000))
    assert store.counts().used < 200_000
assert len(files(Path({str(tmp_path)!r}))) == 2
assert not list(Path({str(tmp_path)!r}).rglob("*.tmp"))
"""
    helper = f"import importlib.util as u, sys; s = u.spec_from_file_location('tests_disk', {__file__!r}); "
    helper += "m = u.module_from_spec(s); sys.modules['tests_disk'] = m; s.loader.exec_module(m)\n"
    lines = code.strip().split("\n")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([lines[0], lines[1], helper, *lines[2:]])],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


WRITER = """
import random, sys
from pathlib import Path
from tonnage.cache.disk import DiskStore
store = DiskStore(Path(sys.argv[1]), 3 << 20, {"model": "demo", "dtype": "bfloat16"})
assert store.wait_until_ready(60)
print("ready", flush=True)
chance = random.Random(int(sys.argv[2]))
while True:
    number = chance.randrange(200)
    store.store(number.to_bytes(36, "big"), memoryview(random.Random(number).randbytes(60_000)))
"""


def test_killed_server_leaves_a_usable_disk_folder_without_wrong_blocks(tmp_path: Path) -> None:
    """Kills at random moments; after each the last writes are cut off, as a machine that loses power does."""
    chance, found = random.Random(1), 0
    for turn in range(int(os.environ.get("TONNAGE_KILLS", "12"))):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(turn)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(chance.random() * 0.2)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        assert du(tmp_path) <= 3 << 20
        newest = sorted(files(tmp_path), key=lambda each: each.stat().st_mtime)[-3:]
        for each in newest:
            os.truncate(each, chance.randrange(60_000))
        with opened(tmp_path, 3 << 20) as store:
            assert store.counts().ready
            for number in range(200):
                if store.contains(key(number)):
                    data = read(store, number, 60_000)
                    assert data is None or data == block(number, 60_000)
                    found += data is not None
            assert store.counts().lost == len(newest)
    assert found > 0


# -- the learned order -----------------------------------------------------------------------------------------

SIZE = 100_000  # bytes of a block


def ask(store: DiskStore, numbers: list[int]) -> int:
    """Let a request read the leading blocks that the folder holds and write the others; return those read."""
    keys = [key(number) for number in numbers]
    hits = 0
    while hits < len(keys) and store.contains(keys[hits]):
        assert read(store, numbers[hits], SIZE) == block(numbers[hits], SIZE)
        hits += 1
    new = [number for number in numbers if not store.contains(key(number))]
    store.announce([key(number) for number in new])
    store.finish(keys, keys[:hits])  # before its blocks are written, as behind a slow disk
    if store.admits(keys, [key(number) for number in new]):
        for number in new:
            store.store(key(number), block(number, SIZE))
    store.settle([key(number) for number in new])
    noted(store)
    return hits


def noted(store: DiskStore) -> None:
    """Wait until the store has noted the ends of all requests."""
    until = time.monotonic() + PATIENCE
    while store._waiting:
        assert time.monotonic() < until
        time.sleep(0.001)


def conversations_between_scans(store: DiskStore, turns: int = 400) -> int:
    """Ask for 4 prompts that return after 24 blocks that never do; return the blocks read."""
    found = 0
    for turn in range(turns):
        found += ask(store, [10 * (turn % 4) + place for place in range(3)])
        found += ask(store, [1_000 + 6 * turn + place for place in range(6)])
    return found


def test_learned_eviction_order_keeps_returning_prompts_on_disk_and_writes_less_than_lru(
    tmp_path: Path,
) -> None:
    limit = (1 << 20) + 18 * 102_656  # directories of all first bytes, and 18 blocks
    with opened(tmp_path / "lru", limit) as store:
        assert conversations_between_scans(store) == 0
        written = store.counts().stored
    with opened(tmp_path / "learned", limit, learned=SIZE) as store:
        assert conversations_between_scans(store) > 600  # of 1,200
        counts = store.counts()
        assert counts.stored < 0.8 * written
        assert du(tmp_path / "learned") <= limit


def test_learned_eviction_order_stays_consistent_after_damage_restart_and_model_change(tmp_path: Path) -> None:
    """The index, the order and the folder agree after thousands of random events."""
    limit, chance = (1 << 20) + 18 * 102_656, random.Random(4)
    for turn in range(4):
        namespace = MODEL | {"dtype": ("float16", "bfloat16")[turn % 2]}
        with opened(tmp_path, limit, namespace, learned=SIZE) as store:
            for _ in range(300):
                start = 50 * chance.randrange(12)
                numbers = list(range(start, start + chance.randrange(1, 8)))
                if chance.random() < 0.1 and files(tmp_path):
                    chance.choice(files(tmp_path)).unlink()
                keys = [key(number) for number in numbers]
                store.announce(keys)
                for number in numbers:
                    if chance.random() < 0.8:
                        store.store(key(number), block(number, SIZE))
                        data = read(store, number, SIZE)
                        assert data is None or data == block(number, SIZE)
                store.settle(keys)
                if chance.random() < 0.9:  # some requests never end
                    store.finish(keys, keys[: chance.randrange(4)])
                assert du(tmp_path) <= limit
            noted(store)
            counts = store.counts()
            assert store._learned is not None
            assert not store._learned.failed
            assert counts.stored > 500
            held = {bytes.fromhex(each.parts[-3] + each.stem) for each in files(tmp_path)}
            assert held <= set(store._folder.blocks)


def test_exception_in_the_learned_eviction_order_does_not_stop_the_disk_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, 3 << 20, learned=SIZE) as store:
        monkeypatch.setattr(LearnedChunkOrder, "finish", lambda *_: 1 / 0)
        for number in range(60):
            ask(store, [number])
        assert store.counts().stored == 60
        assert store.counts().evicted == 60 - store.counts().blocks
        assert store.contains(key(59))
        assert not store.contains(key(1))


def test_disk_block_whose_file_cannot_be_deleted_does_not_stop_eviction(tmp_path: Path) -> None:
    for learned in (None, SIZE):
        with opened(tmp_path / str(learned), 3 << 20, learned=learned) as store:
            ask(store, [0])
            (file,) = files(tmp_path / str(learned))
            file.unlink()
            file.mkdir()  # unlink(2) fails on a directory
            for number in range(1, 60):
                ask(store, [number])
            assert store.counts().stored > 50
