"""A second cache tier on disk: blocks by key, in a folder that never exceeds its size.

Damage to the folder costs hits only. A missing, cut off or damaged block is not read, and a
block that cannot be written, because the disk is full or failed, is dropped and counted.

`DiskStore.contains` and `DiskStore.touch` read and write nothing on disk, for a scheduler's thread. `store` and
`load` block and are called from threads of the engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tonnage.cache.disk.block_file import read_block, write_block
from tonnage.cache.disk.folder import NAMESPACE_BYTES, Folder, file_of
from tonnage.planner.model.tier import file_bytes

log = logging.getLogger("tonnage.cache")

_DESCRIPTION = "namespace.json"
_MOST_TOUCHED = 1_000  # calls of `touch` that wait for the next write
# How often a server that only reads looks for new blocks. Listing a million files takes about ten seconds.
_READ_AGAIN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class DiskCounts:
    """The contents and the counters of a disk tier.

    Attributes:
        size: Upper bound of the folder in bytes.
        used: Bytes of the folder, by the index.
        blocks: Blocks in the index, of all namespaces.
        ready: Whether the blocks from before the start are in the index.
        stored: Blocks written.
        dropped: Blocks not written, because the disk was full, failed or too slow.
        evicted: Blocks removed to make room.
        loaded: Blocks read.
        lost: Blocks in the index that were missing, damaged or not readable.
        declined: Requests whose blocks were computed, because reading them was slower.
        written_bytes: Bytes of the blocks written.
        read_bytes: Bytes of the blocks read.
        write_seconds: Seconds spent writing them, over all threads.
        read_seconds: Seconds spent reading them, over all threads.
    """

    size: int
    used: int = 0
    blocks: int = 0
    ready: bool = False
    stored: int = 0
    dropped: int = 0
    evicted: int = 0
    loaded: int = 0
    lost: int = 0
    declined: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    write_seconds: float = 0.0
    read_seconds: float = 0.0


class DiskStore:
    """Blocks of one namespace in a folder of bounded size.

    Args:
        path: The folder. One server writes it, others may read it.
        size: Upper bound of the folder in bytes, whatever was in it before.
        namespace: The facts that the bytes of a block depend on, such as model, revision, dtype and layout.
            Blocks of another namespace are never read, but may be removed to make room.
        read_only: Whether another server writes the folder.

    Raises:
        DiskError: the folder cannot be used, or another server writes it.
    """

    def __init__(self, path: Path, size: int, namespace: Mapping[str, Any], read_only: bool = False) -> None:
        self._folder = Folder(path, size, read_only)
        described = json.dumps(dict(namespace), sort_keys=True, default=str)
        self._namespace = hashlib.sha256(described.encode()).digest()[:NAMESPACE_BYTES]
        self._described = described
        self._counts = DiskCounts(size)
        self._lock = threading.Lock()  # of the folder's index and the counts; held while files are deleted
        self._dropped = self._declined = 0  # counted by the scheduler's thread, without the lock
        self._touched: deque[Collection[bytes]] = deque(maxlen=_MOST_TOUCHED)
        self._writing: set[bytes] = set()
        self._complained = False
        self._indexed, self._closed = threading.Event(), threading.Event()
        self._scan = threading.Thread(target=self._read_folder, name="tonnage-disk-index", daemon=True)
        self._scan.start()

    # -- the scheduler's thread ------------------------------------------------------------------------------

    def contains(self, key: bytes) -> bool:
        """Return whether the index has the block; no file is opened."""
        return self._namespace + key in self._folder.blocks

    def touch(self, keys: Collection[bytes]) -> None:
        """Note that blocks were used; the order of eviction changes at the next write."""
        self._touched.append(keys)

    def counts(self) -> DiskCounts:
        """Return the contents, and the counters since the tier was opened."""
        now, folder = self._counts, self._folder
        return replace(
            now, used=folder.used, blocks=len(folder.blocks), dropped=now.dropped + self._dropped,
            declined=self._declined,
        )  # fmt: skip

    def drop(self, blocks: int) -> None:
        """Count blocks that the engine did not write, because too many were waiting."""
        self._dropped += blocks

    def decline(self) -> None:
        """Count a request whose blocks the engine computed, because reading them was slower."""
        self._declined += 1

    # -- the engine's own threads ----------------------------------------------------------------------------

    def store(self, key: bytes, block: memoryview) -> bool:
        """Write a block, and remove older ones to make room; return whether the folder has the block now."""
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
                self._folder.not_written(taken)
                self._count(dropped=1)
            return False
        with self._lock:
            self._writing.discard(own)
            self._folder.written(own, taken)
            seconds = time.perf_counter() - since
            self._count(stored=1, written_bytes=len(block), write_seconds=seconds)
        return True

    def load(self, key: bytes, into: memoryview) -> bool:
        """Read a block into ``into``; return whether it is there and undamaged.

        After False, ``into`` has undefined bytes, and the index no longer has the block.
        """
        own, since = self._namespace + key, time.perf_counter()
        path = self._folder.path / file_of(own)
        try:
            found = read_block(path, key, into)
        except OSError:
            found = False
        with self._lock:
            if found:
                self._folder.touch(own)
                seconds = time.perf_counter() - since
                self._count(loaded=1, read_bytes=len(into), read_seconds=seconds)
            else:
                self._folder.forget(own)
                self._count(lost=1)
        if found and not self._folder.read_only:
            with contextlib.suppress(OSError):
                os.utime(path)
        return found

    def wait_until_ready(self, seconds: float) -> bool:
        """Wait until the blocks from before the start are in the index; return whether they are."""
        return self._indexed.wait(seconds) and self._counts.ready

    def close(self) -> None:
        """Release the folder. No other method may be running or be called afterwards."""
        self._closed.set()
        self._scan.join()
        self._folder.close()

    # ---------------------------------------------------------------------------------------------------------

    def _read_folder(self) -> None:
        """Fill the index with the blocks from before the start, and bring the folder within its size."""
        while True:
            found = self._folder.scan()
            with self._lock:
                self._folder.adopt(found)
                if self._folder.read_only:
                    self._count(ready=True)
                else:
                    self._begin()
            self._indexed.set()
            if not self._folder.read_only:
                return
            if self._closed.wait(_READ_AGAIN_SECONDS):
                return

    def _begin(self) -> None:
        """Make the folder ready for writing, unless other files leave no room."""
        note = f"{self._namespace.hex()}/{_DESCRIPTION}"
        evicted = self._folder.make_room(note, file_bytes(len(self._described)))
        if evicted is None:
            log.warning(
                "the disk tier %s stores nothing: other files take its %d bytes",
                self._folder.path, self._folder.size,
            )  # fmt: skip
            return
        self._count(evicted=evicted)
        try:
            self._describe(note)
        except OSError as error:
            self._complain(error)
        self._count(ready=True)

    def _describe(self, note: str) -> None:
        path = self._folder.path / note
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_text(self._described + "\n", encoding="utf-8")

    def _make_room(self, path: str, taken: int) -> int | None:
        while self._touched:
            for key in self._touched.popleft():
                self._folder.touch(self._namespace + key)
        return self._folder.make_room(path, taken)

    def _count(self, ready: bool | None = None, **added: float) -> None:
        old = self._counts
        new: dict[str, Any] = {name: getattr(old, name) + more for name, more in added.items()}
        self._counts = replace(old, ready=old.ready if ready is None else ready, **new)

    def _complain(self, error: OSError) -> None:
        """Log the first error of the disk."""
        if not self._complained:
            self._complained = True
            log.warning(
                "the disk tier %s cannot write (%s): such blocks are dropped and counted",
                self._folder.path, error.strerror,
            )  # fmt: skip
