"""A second cache tier on disk: KV blocks by key, in a folder that never exceeds its size limit.

Damage to the folder costs only cache hits. A missing, truncated or damaged block is not read. A block that
cannot be written, because the disk is full or has failed, is dropped and counted.

`DiskStore.contains`, `announce` and `finish` take no lock and access no file, so that the scheduler's thread
can call them. `store` and `load` wait for the disk and are called from other threads of the engine. A
`DiskStore` has a thread of its own, which lists the folder at the start and updates the eviction order when
requests end.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from tonnage.cache.disk.block_file import read_block, write_block
from tonnage.cache.disk.counts import DiskCounts
from tonnage.cache.disk.folder import NAMESPACE_BYTES, Folder, file_of
from tonnage.planner.model.tier import file_bytes

if TYPE_CHECKING:
    from tonnage.cache.disk.order import LearnedBlocks

log = logging.getLogger("tonnage.cache")

_DESCRIPTION = "namespace.json"
# Upper bound of the block keys of ended requests that the index thread has not yet processed. A key takes about
# 80 bytes.
_MOST_WAITING = 1 << 17
# Seconds between two listings of the folder by a server that only reads. Listing a million files takes about
# ten seconds.
_READ_AGAIN_SECONDS = 60.0
# Errors of open(2) that do not mean that the file is bad: no file descriptor or memory is left.
_NOT_THE_FILE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class _Ended(NamedTuple):
    """A request that has ended: the keys of its KV blocks in prefix order, and the keys of the reused ones."""

    keys: Sequence[bytes]
    reused: Collection[bytes]


class DiskStore:
    """A disk tier: the KV blocks of one namespace in a folder of bounded size.

    Args:
        path: The folder. One server writes it, others may read it.
        size: Upper bound of the folder in bytes, including files that were in it before.
        namespace: The facts that the bytes of a block depend on, such as model, revision, dtype and layout.
            Blocks of another namespace are never read, but may be removed to make room.
        read_only: Whether another server writes the folder.
        learned: Bytes of a block, if blocks are evicted in the learned order. None: the least recently used
            block is evicted first.

    Raises:
        DiskError: the folder cannot be used, or another server writes it.
    """

    def __init__(
        self, path: Path, size: int, namespace: Mapping[str, Any], read_only: bool = False,
        learned: int | None = None,
    ) -> None:  # fmt: skip
        self._folder = Folder(path, size, read_only)
        described = json.dumps(dict(namespace), sort_keys=True, default=str)
        self._namespace = hashlib.sha256(described.encode()).digest()[:NAMESPACE_BYTES]
        self._described = described
        self._counts = DiskCounts(size)
        # The lock protects the folder's index and the counts. It is held while files are deleted.
        self._lock = threading.Lock()
        self._dropped = self._declined = 0  # counts changed by the scheduler's thread only, without the lock
        self._block_bytes = learned
        self._learned: LearnedBlocks | None = None
        self._events: SimpleQueue[_Ended | None] = SimpleQueue()
        self._waiting = 0  # approximate number of keys in `_events`: two threads change it without a lock
        self._announced: set[bytes] = set()
        self._writing: set[bytes] = set()
        self._complained = False
        self._indexed, self._closed = threading.Event(), threading.Event()
        self._index = threading.Thread(target=self._keep_index, name="tonnage-disk-index", daemon=True)
        self._index.start()

    # -- the scheduler's thread ------------------------------------------------------------------------------

    def contains(self, key: bytes) -> bool:
        """Return whether the disk tier's index has the KV block ``key``, without opening a file."""
        return self._namespace + key in self._folder.blocks

    def announce(self, keys: Collection[bytes]) -> None:
        """Record that the engine will write the KV blocks ``keys`` to disk; call `settle` afterwards."""
        self._announced.update(keys)

    def finish(self, keys: Sequence[bytes], reused: Collection[bytes]) -> None:
        """Record which KV blocks a request that ended has used; this updates the disk tier's eviction order.

        If blocks of the request were passed to `announce`, the update waits until all of them have been passed
        to `settle`.

        Args:
            keys: Keys of the blocks that the request used, in prefix order.
            reused: Keys of the blocks in ``keys`` that the request did not compute.
        """
        if keys and not self._folder.read_only:
            self._waiting += len(keys)
            self._events.put(_Ended(keys, reused))

    def counts(self) -> DiskCounts:
        """Return the disk tier's size and number of blocks, and counters of its operations since the start."""
        now, folder = self._counts, self._folder
        return replace(
            now, used=folder.used, blocks=len(folder.blocks), dropped=now.dropped + self._dropped,
            declined=self._declined,
        )  # fmt: skip

    def drop(self, blocks: int) -> None:
        """Count KV blocks that the engine did not write to disk, because too many writes were queued."""
        self._dropped += blocks

    def decline(self) -> None:
        """Count a request whose KV blocks the engine computed, because reading them from disk was slower."""
        self._declined += 1

    # -- the engine's own threads ----------------------------------------------------------------------------

    def settle(self, keys: Collection[bytes]) -> None:
        """Record that KV blocks passed to `announce` have been written to disk or dropped."""
        self._announced.difference_update(keys)
        self._events.put(None)

    def admits(self, prefix: Sequence[bytes], new: Sequence[bytes]) -> bool:
        """Return whether to write a request's new KV blocks to disk, by their forecast reuse.

        If the result is False, the blocks are counted as left out.

        Args:
            prefix: Keys of the request's blocks in prefix order.
            new: Keys of the blocks in ``prefix`` that would be written.
        """
        with self._lock:
            found = self._learned is None or self._learned.admits(self._ids(prefix), self._ids(new))
            if not found:
                self._count(left_out=len(new))
        return found

    def store(self, key: bytes, block: memoryview) -> bool:
        """Write a KV block to disk, removing others to make room; return whether the folder has it now."""
        own, taken = self._namespace + key, file_bytes(len(block))
        with self._lock:
            if own in self._folder.blocks:
                self._folder.touch(own)
                return True
            if own in self._writing or self._folder.read_only:
                return False
            evicted = self._make_room(file_of(own), taken) if self._counts.ready else None
            if evicted is None:
                self._count(dropped=1)
                return False
            self._count(evicted=evicted)
            self._writing.add(own)
            if self._learned is not None:
                self._learned.insert(own)
        since = time.perf_counter()
        try:
            path = self._folder.path / file_of(own)
            if not path.parent.exists():
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_block(path, key, block)
        except OSError as error:
            self._complain(error)
            with self._lock:
                self._writing.discard(own)
                self._folder.not_written(own, taken)
                if self._learned is not None:
                    self._learned.remove(own)
                self._count(dropped=1)
            return False
        with self._lock:
            self._writing.discard(own)
            self._folder.written(own, taken)
            seconds = time.perf_counter() - since
            self._count(stored=1, written_bytes=len(block), write_seconds=seconds)
        return True

    def load(self, key: bytes, into: memoryview) -> bool:
        """Read a KV block from disk into ``into``; return whether its file exists and is undamaged.

        After False, ``into`` has undefined bytes, and the index no longer has the block. A damaged file is
        deleted.
        """
        own, since = self._namespace + key, time.perf_counter()
        path, bad_file = self._folder.path / file_of(own), True
        try:
            found = read_block(path, key, into)
        except OSError as error:
            found, bad_file = False, error.errno not in _NOT_THE_FILE
        with self._lock:
            if found:
                self._folder.touch(own)
                seconds = time.perf_counter() - since
                self._count(loaded=1, read_bytes=len(into), read_seconds=seconds)
            else:
                self._folder.forget(own, delete=bad_file)
                self._count(lost=1)
        if found and not self._folder.read_only:
            with contextlib.suppress(OSError):
                os.utime(path)
        return found

    def wait_until_ready(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until the index lists the folder's KV blocks; return whether it does."""
        return self._indexed.wait(seconds) and self._counts.ready

    def close(self) -> None:
        """Unlock the disk tier's folder. No other method may run at the same time or afterwards."""
        self._closed.set()
        self._events.put(None)
        self._index.join()
        self._folder.close()

    # ---------------------------------------------------------------------------------------------------------

    def _keep_index(self) -> None:
        """List the folder's KV blocks in the index, then update the eviction order as requests end.

        Blocks are read as soon as the index has them, and written once the learned order is compiled.
        """
        while True:
            found = self._folder.scan()
            with self._lock:
                self._folder.adopt(found)
                if self._folder.read_only:
                    self._counts = replace(self._counts, ready=True)
            if not self._folder.read_only:
                self._compile()
                with self._lock:
                    self._begin()
            self._indexed.set()
            if not self._folder.read_only:
                break
            if self._closed.wait(_READ_AGAIN_SECONDS):
                return
        ended: deque[_Ended] = deque()
        while not self._closed.is_set():
            if (event := self._events.get()) is not None:
                ended.append(event)
            while ended and not self._announced.intersection(ended[0].keys):
                self._use(ended.popleft())
            if self._waiting > _MOST_WAITING:  # The disk hangs: writes do not end.
                ended.clear()
                self._waiting = 0
                with self._lock:
                    self._start_order()

    def _compile(self) -> None:
        """Compile the learned eviction order (some seconds), or read its machine code from disk."""
        if self._block_bytes is not None:
            from tonnage.cache.disk import order  # imported here, because it imports numba

            order.compile_order()

    def _use(self, ended: _Ended) -> None:
        """Update the disk tier's eviction order with the blocks of a request that has ended."""
        self._waiting -= len(ended.keys)
        blocks, reused = self._ids(ended.keys), set(self._ids(ended.reused))
        with self._lock:
            # The first block is touched last, so that later blocks, useless without it, are removed before it.
            for block in reversed(blocks):
                self._folder.touch(block)
            held = [block for block in blocks if block in self._folder.blocks]
            if self._learned is not None:
                self._learned.finish(blocks, held, reused)

    def _start_order(self) -> None:
        """Start a new learned eviction order; blocks already in the folder are evicted in LRU order."""
        if self._learned is not None and self._learned.failed:
            self._learned = self._block_bytes = None
        if self._block_bytes is not None:
            from tonnage.cache.disk.order import LearnedBlocks

            capacity = self._folder.room(self._namespace) // file_bytes(self._block_bytes)
            self._learned = LearnedBlocks(max(1, capacity), self._folder.blocks)

    def _begin(self) -> None:
        """Make the disk tier's folder ready for writing blocks, unless files other than blocks fill it."""
        note = f"{self._namespace.hex()}/{_DESCRIPTION}"
        evicted = self._folder.make_room(note, file_bytes(len(self._described)))
        if evicted is None:
            log.warning(
                "the disk tier %s stores nothing: other files take its %d bytes",
                self._folder.path, self._folder.size,
            )  # fmt: skip
            return
        self._count(evicted=evicted)
        path = self._folder.path / note
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.write_text(self._described + "\n", encoding="utf-8")
        except OSError as error:
            self._complain(error)
        self._start_order()
        self._counts = replace(self._counts, ready=True)

    def _make_room(self, path: str, taken: int) -> int | None:
        """Remove KV blocks until a file of ``taken`` bytes fits; return their number, None if it cannot fit."""
        learned = self._learned
        if learned is None:
            return self._folder.make_room(path, taken)
        more, asked = 0, list[bytes | None]()

        def victim() -> bytes | None:
            asked.append(learned.victim())
            return asked[-1]

        if learned.full and (block := victim()) is not None:
            more = int(self._folder.remove(block))
        found = self._folder.make_room(path, taken, victim)
        if asked and asked[-1] is None:  # Running requests wrote all blocks: the learned order can evict none.
            self._start_order()
            found = self._folder.make_room(path, taken)
        # The file of the last victim could not be deleted, so its block stays in the folder.
        elif asked and (last := asked[-1]) and last in self._folder.blocks:
            learned.put_back(last)
        return None if found is None else found + more

    def _ids(self, keys: Iterable[bytes]) -> list[bytes]:
        return [self._namespace + key for key in keys]

    def _count(self, **added: float) -> None:
        new: dict[str, Any] = {name: getattr(self._counts, name) + more for name, more in added.items()}
        self._counts = replace(self._counts, **new)

    def _complain(self, error: OSError) -> None:
        """Log the first error of the disk; later errors are only counted."""
        if not self._complained:
            self._complained = True
            log.warning(
                "the disk tier %s cannot write (%s): such blocks are dropped and counted",
                self._folder.path, error.strerror,
            )  # fmt: skip
