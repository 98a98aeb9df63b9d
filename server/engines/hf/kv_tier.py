"""The KV tier of the Hugging Face engine: blocks in host memory, and a bounded folder of blocks behind it.

A block is copied to host memory when it is full and the model's logits after it were finite. The copy is also
written to the folder, if there is one. A request's blocks are read from the folder into host memory before the
request is queued, and copied into the pool when it is admitted. A block that is missing or damaged is computed.

All methods are called in the thread of the step loop. Reads and writes of files have threads of their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tonnage.cache.disk import DiskStore
from tonnage.cache.disk.files import files_of
from tonnage.cache.disk.order import LearnedBlocks, compile_order
from tonnage.cache.disk.pace import ReadRule
from tonnage.planner.model.tier import disk_tier
from tonnage.planner.plans import Plan
from tonnage.server.engines.hf.pool import PagedPool
from tonnage.server.engines.hf.sequence import HFSequence
from tonnage.server.engines.stats import TierStats

log = logging.getLogger("tonnage.server")

# Numbers of threads that read KV blocks from disk and that write them. Writes have a thread of their own,
# because otherwise they would delay reads, for which requests wait.
_READERS, _WRITERS = 2, 1
# Upper bound of the bytes of KV blocks that wait to be written to the disk tier. Such blocks cannot be evicted
# from host memory.
WAITING_BYTES = 256 << 20
# A request waits at most this many seconds for its blocks, then the missing blocks are computed. An engine
# process without progress for a minute is killed (watchdog.HANG_CHECKS), so a disk that hangs must not stop it.
MOST_SECONDS = 10.0
# Number of blocks that one job of a reader thread reads.
_BLOCKS_PER_READ = 8
# Seconds that `KVTier.close` waits for writes. The API process kills an engine process that does not end within
# 5 seconds (HFEngine.stop).
_SECONDS_TO_CLOSE = 3.0


@dataclass(slots=True, eq=False)
class _Fetch:
    """A request that waits until its KV blocks are read from the disk tier's folder.

    Attributes:
        sequence: the request's first sequence.
        missing: keys of the blocks that are not read yet.
        since: time at which the reads were requested, in seconds.
        read: number of blocks read for this request.
    """

    sequence: HFSequence
    missing: set[bytes]
    since: float = field(default_factory=time.monotonic)
    read: int = 0


class KVTier:
    """A second-level KV cache behind one KV pool: host memory, and optionally a folder on disk.

    Args:
        pool: the KV pool, in host memory.
        blocks: number of blocks that the host memory holds.
        store: the disk tier (a folder) behind the host memory, or None.
        most_waiting: upper bound of the bytes that wait to be written; further blocks are dropped.
        learned: whether host memory evicts in an order learned from the blocks' reuse (`LearnedBlocks`) instead
            of LRU order. It should be False if there is a folder, because all blocks of the folder pass through
            host memory.
    """

    def __init__(
        self, pool: PagedPool, blocks: int, store: DiskStore | None = None, most_waiting: int = WAITING_BYTES,
        *, learned: bool = False,
    ) -> None:  # fmt: skip
        parts = [pool.tensor] if pool.scales is None else [pool.tensor, pool.scales]
        # Blocks are copied by numpy, in this thread. torch would use several threads, and waiting for a core
        # may take longer than copying a block.
        self._pool = [part.view(len(part), -1).view(torch.uint8).numpy() for part in parts]
        self._widths = [part.shape[1] for part in self._pool]
        self.block_bytes = sum(self._widths)
        self._memory = np.empty((blocks, self.block_bytes), np.uint8)
        self._memory.fill(0)  # touch every page, so that the planned memory is resident
        self._parts = np.split(self._memory, np.cumsum(self._widths)[:-1], axis=1)
        self._bytes = self._memory.data.cast("B")
        # The slot of each block, the least recently used block first.
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(blocks - 1, -1, -1))
        self._learned = LearnedBlocks(blocks) if learned else None
        if learned:
            compile_order()
        self._writing: set[bytes] = set()
        self._reading: dict[bytes, int] = {}
        self._fetches: list[_Fetch] = []
        self._rule = ReadRule()
        self._most_waiting = most_waiting
        # Transfers that have ended: the block's key, whether it was a read, and whether it succeeded.
        self._ended: deque[tuple[bytes, bool, bool]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = threading.Event()
        self._store = store
        self._readers = ThreadPoolExecutor(_READERS, "kv-tier-read")
        self._writers = ThreadPoolExecutor(_WRITERS, "kv-tier-write")
        self._stored = self._evicted = self._left_out = self._hit_blocks = 0
        self._load_seconds = self._saved_seconds = self._spent_seconds = 0.0

    def fileno(self) -> int:
        """Return a file descriptor that is readable when disk reads or writes have ended, until `collect`."""
        return self._wake

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the KV tier takes."""
        return self._memory.nbytes

    @property
    def fetching(self) -> list[HFSequence]:
        """The sequences that wait until their KV blocks are read from disk."""
        return [fetch.sequence for fetch in self._fetches]

    def stats(self) -> TierStats:
        """Return the number and bytes of the KV tier's blocks, and counters of its operations."""
        return TierStats(
            host_size=self.nbytes,
            host_used=len(self._slots) * self.block_bytes,
            host_blocks=len(self._slots),
            host_stored=self._stored,
            host_evicted=self._evicted,
            host_left_out=self._left_out,
            host_hit_blocks=self._hit_blocks,
            host_load_seconds=self._load_seconds,
            saved_seconds=self._saved_seconds,
            spent_seconds=self._spent_seconds,
            disk=None if self._store is None else self._store.counts(),
        )

    # -- from the pool to the tier -----------------------------------------------------------------------------

    def keep(self, keys: Sequence[bytes], start: int, blocks: Sequence[int]) -> None:
        """Copy a sequence's KV blocks from the pool to host memory; write them to the disk folder later.

        Of a sequence longer than the host memory, only the beginning is copied, because a prefix hit needs it.

        Args:
            keys: keys of the sequence's blocks, from its first token on.
            start: number of leading blocks that were kept before.
            blocks: pool block ids of the blocks with the keys ``keys[start:]``.
        """
        since, own, written = time.perf_counter(), set(keys), []
        if self._learned is not None:
            new = [key for key in keys[start:] if key not in self._slots]
            if new and not self._learned.admits(keys, new):
                self._left_out += len(new)
                return
        for key, block in zip(keys[start:], blocks, strict=True):
            if key in self._slots:
                self._slots.move_to_end(key)
                continue
            if key in self._reading:
                continue
            slot = self._take_slot(own)
            if slot is None:
                break
            for host, part in zip(self._parts, self._pool, strict=True):
                host[slot] = part[block]
            self._slots[key] = slot
            self._stored += 1
            if self._learned is not None:
                self._learned.insert(key)
            if self._store is not None and not self._store.contains(key):
                if (len(self._writing) + 1) * self.block_bytes > self._most_waiting:
                    self._store.drop(1)
                    continue
                self._writing.add(key)
                written.append((key, slot))
        if written:
            assert self._store is not None
            self._store.announce([key for key, _ in written])
            self._writers.submit(self._write, keys, written)
        self._spent_seconds += time.perf_counter() - since

    def finish(self, keys: Sequence[bytes], reused: int) -> None:
        """Record a sequence's end in the tier's eviction order; its first block becomes the most recently used.

        Args:
            keys: keys of the sequence's blocks that were offered to the tier, from its first token on.
            reused: number of leading blocks that the sequence did not compute.
        """
        for key in reversed(keys):
            if key in self._slots:
                self._slots.move_to_end(key)
        if self._learned is not None:
            self._learned.finish(keys, [key for key in keys if key in self._slots], set(keys[:reused]))
        if self._store is not None:
            self._store.finish(keys, keys[:reused])

    def _take_slot(self, kept: set[bytes]) -> int | None:
        """Return a free block slot of host memory, evicting a block if needed; None if none can be evicted."""
        if self._free:
            return self._free.pop()
        if self._learned is not None and not self._learned.failed:
            block = self._learned.victim()
            self._evicted += block is not None
            return None if block is None else self._slots.pop(block)
        for key in self._slots:
            if key not in self._writing and key not in kept:
                self._evicted += 1
                return self._slots.pop(key)
        return None

    # -- from the tier to the pool -----------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> int:
        """Return how many leading KV blocks of ``keys`` are in host memory."""
        for count, key in enumerate(keys):
            if key not in self._slots:
                return count
        return len(keys)

    def load(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Copy KV blocks that `match` has found in host memory to the blocks ``blocks`` of the pool."""
        since = time.perf_counter()
        for key, block in zip(keys, blocks, strict=True):
            slot = self._slots[key]
            for host, part in zip(self._parts, self._pool, strict=True):
                part[block] = host[slot]
        seconds = time.perf_counter() - since
        self._hit_blocks += len(keys)
        self._load_seconds += seconds
        self._spent_seconds += seconds
        self._saved_seconds += len(keys) * (self._rule.compute_seconds or 0.0)

    # -- from the folder to host memory ------------------------------------------------------------------------

    def fetch(self, sequence: HFSequence, keys: Sequence[bytes]) -> bool:
        """Begin to read a request's KV blocks from disk; return whether the request waits for them.

        `collect` returns the sequence when it need not wait any longer.

        Args:
            sequence: the request's first sequence.
            keys: keys of the request's blocks, from the first block that is not in the pool on. The reads stop
                at the first block that is in neither host memory nor the folder.
        """
        if self._store is None:
            return False
        kept, missing = set(keys), set[bytes]()
        new: list[tuple[bytes, int]] = []
        allowed: int | None = None
        asked = False
        for key in keys:
            if key in self._slots:
                continue
            if key not in self._reading and not self._store.contains(key):
                break
            if not asked:
                asked, allowed = True, self._rule.blocks_to_read()
                if allowed is not None:
                    self._store.decline()
            if allowed is not None and len(missing) >= allowed:
                break
            if key in self._reading:
                missing.add(key)
                continue
            slot = self._take_slot(kept)
            if slot is None:
                break
            self._reading[key] = slot
            missing.add(key)
            new.append((key, slot))
        for at in range(0, len(new), _BLOCKS_PER_READ):
            self._readers.submit(self._run, self._store.load, new[at : at + _BLOCKS_PER_READ], True)
        if missing:
            self._fetches.append(_Fetch(sequence, missing))
        return bool(missing)

    def computed(self, tokens: int, seconds: float, block_size: int) -> None:
        """Record that a step with ``tokens`` prompt tokens took ``seconds``.

        `fetch` compares the time to compute a block with the time to read it from disk.
        """
        if tokens >= block_size:
            self._rule.computed(tokens // block_size, seconds)

    def forget(self, sequence: HFSequence) -> None:
        """Forget a cancelled request that waits until its KV blocks are read from disk."""
        self._fetches = [fetch for fetch in self._fetches if fetch.sequence is not sequence]

    def collect(self) -> list[HFSequence]:
        """Add KV blocks read from disk to host memory; return the sequences that need not wait any longer.

        The sequence that waited longest comes first.
        """
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._ended:
            key, was_read, success = self._ended.popleft()
            if not was_read:
                self._writing.discard(key)
                continue
            slot = self._reading.pop(key)
            if success:
                self._slots[key] = slot
            else:
                self._free.append(slot)
            for fetch in self._fetches:
                if key in fetch.missing:
                    fetch.missing.remove(key)
                    fetch.read += success
        if not self._fetches:
            return []
        now = time.monotonic()
        ready = [fetch for fetch in self._fetches if not fetch.missing or now > fetch.since + MOST_SECONDS]
        for fetch in ready:
            self._fetches.remove(fetch)
            self._spent_seconds += now - fetch.since
            if fetch.read or fetch.missing:
                self._rule.read(max(1, fetch.read), now - fetch.since)
        return [fetch.sequence for fetch in ready]

    def _write(self, prefix: Sequence[bytes], jobs: list[tuple[bytes, int]]) -> None:
        """Write KV blocks to disk, or drop them if the disk tier does not admit them (``DiskStore.admits``).

        A writer thread runs this method.
        """
        assert self._store is not None
        keys = [key for key, _ in jobs]
        try:
            worth = self._store.admits(prefix, keys)
            self._run(self._store.store if worth else _leave_out, jobs, False)
        finally:
            self._store.settle(keys)

    def _run(
        self, work: Callable[[bytes, memoryview], bool], jobs: list[tuple[bytes, int]], reads: bool
    ) -> None:
        """Read or write KV blocks in a thread; report the end of each block's transfer, even after an error."""
        for key, slot in jobs:
            success = False
            try:
                if not self._closed.is_set():
                    at = slot * self.block_bytes
                    success = work(key, self._bytes[at : at + self.block_bytes])
            except Exception:
                log.exception("a block of the KV tier was neither read nor written")
            finally:
                self._ended.append((key, reads, success))
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Wait some seconds for KV blocks that are being written to disk, and release the disk tier."""
        if self._store is None:
            return
        until = time.monotonic() + _SECONDS_TO_CLOSE
        while self._writing and time.monotonic() < until:
            time.sleep(0.005)
            self.collect()
        self._closed.set()
        for threads in (self._readers, self._writers):
            threads.shutdown(cancel_futures=True)
        self._store.close()


def _leave_out(key: bytes, block: memoryview) -> bool:
    """Return False without writing the KV block to disk; a stand-in for `DiskStore.store`."""
    return False


def tier_of(plan: Plan, pool: PagedPool) -> KVTier | None:
    """Create the KV tier that a memory plan has, or return None if the plan has no KV tier.

    Raises:
        DiskError: the folder of the disk tier cannot be used, or another server writes to it.
    """
    flags = plan.deployment
    if not flags.kv_offloading_bytes:
        return None
    store, block = None, plan.kv_cache.layout.bytes_per_block
    learned = flags.kv_offloading_policy == "learned"
    if flags.kv_offloading_disk is not None:
        folder, size = disk_tier(flags.kv_offloading_disk, "kv_offloading_disk")
        store = DiskStore(Path(folder), size, namespace_of(plan), learned=block if learned else None)
    return KVTier(pool, plan.rank.kv_tier_bytes // block, store, learned=learned and store is None)


def namespace_of(plan: Plan) -> Mapping[str, Any]:
    """Return the facts that a KV block's bytes depend on: weights, dtypes, quantization and layout."""
    flags = plan.deployment
    return {
        "engine": "hf 1",  # increase this number when the meaning of a block's bytes changes
        "architecture": plan.model.architecture,
        "files": files_of(plan.model.path),
        "dtype": flags.dtype,
        "quantization": flags.quantization,
        "layout": asdict(plan.kv_cache.layout),
    }
