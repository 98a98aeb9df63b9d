"""The index of a disk tier's files: their names, their bytes on disk, and the order of their removal.

A folder has one subfolder for each namespace, such as a model with its dtype and layout. The subfolder has 256
directories of block files. The size limit holds for all namespaces together. The least recently used block is
removed first, unless the caller has another order (`order`). The modification times of the files keep the order
of use across restarts.

A block's id is its namespace (8 bytes) and its key. Its file is named after both in hexadecimal digits.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tonnage.cache.disk.block_file import SUFFIX, TEMPORARY
from tonnage.cache.errors import CacheError
from tonnage.planner.model.tier import ENTRY_BYTES, PAGE

log = logging.getLogger("tonnage.cache")

LOCK = "tonnage.lock"
# An engine whose API process was killed writes its last blocks before it ends (the hf engine at most 3 seconds,
# `server/engines/hf/kv_tier.py`), so a server that is started again waits for the folder.
LOCK_SECONDS = 10.0
DIRECTORY_BYTES = PAGE
NAMESPACE_BYTES = 8
DIRECTORIES_OF_BLOCKS = 256  # directories of a namespace: one for each value of a key's first byte
FIRST_ENTRIES = PAGE // (ENTRY_BYTES // 2)  # entries in a directory's first page, which is never split (ext4)


def file_of(block: bytes) -> str:
    """Return the path of a KV block's file, relative to the disk tier's folder, for the block's id."""
    namespace, key = block[:NAMESPACE_BYTES].hex(), block[NAMESPACE_BYTES:].hex()
    return f"{namespace}/{key[:2]}/{key}{SUFFIX}"


def block_of(path: str) -> bytes | None:
    """Return the id of the KV block whose file is ``path`` below a disk tier's folder; None for other files."""
    namespace, _, rest = path.partition("/")
    try:
        block = bytes.fromhex(namespace) + bytes.fromhex(rest[3:].removesuffix(SUFFIX))
    except ValueError:
        return None
    return block if file_of(block) == path else None


class DiskError(CacheError):
    """The error that a folder cannot be a disk tier of KV blocks: another server uses it, or access failed."""

    code = "invalid_disk_tier"


@dataclass(slots=True)
class Contents:
    """The KV blocks and other files that a scan found in a disk tier's folder.

    Attributes:
        blocks: Modification time, id and bytes on disk of each block.
        directories: Paths of all directories below the folder.
        others: Bytes of directories and of files that are no blocks.
    """

    blocks: list[tuple[float, bytes, int]] = field(default_factory=list)
    directories: set[str] = field(default_factory=set)
    others: int = 0


class Folder:
    """The index of a disk tier's folder of KV block files. The caller serializes all calls.

    Attributes:
        blocks: Bytes on disk of each block by its id, the least recently used block first. Any thread may look
            whether a block is in it.

    Args:
        path: The folder; it is created with mode 0700.
        size: Upper bound of the folder in bytes, as ``du`` counts them.
        read_only: Whether another server writes the folder. This server then only reads its blocks.

    Raises:
        DiskError: the folder cannot be created or read, or another server writes it.
    """

    def __init__(self, path: Path, size: int, read_only: bool = False) -> None:
        self.path, self.size, self.read_only = path, size, read_only
        # Bytes of directories, of files that are no blocks, and of blocks that are being written.
        self._others = 0
        self._in_blocks = 0  # bytes of the blocks in the index
        self.blocks: OrderedDict[bytes, int] = OrderedDict()
        self._directories: set[str] = set()
        # Number of entries of each directory now, and the largest number so far. ext4 and XFS do not shrink a
        # directory when files are removed.
        self._entries: Counter[str] = Counter()
        self._most_entries: Counter[str] = Counter()
        self._unused = 0  # bytes that directories keep for entries of removed files
        self._lock: int | None = None
        try:
            if not read_only:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._lock = _locked(path / LOCK)
            os.listdir(path)
            if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                log.warning(
                    "other users of this machine can write to %s, and so change the blocks of this disk tier; "
                    "chmod go-w prevents that", path,
                )  # fmt: skip
        except OSError as error:
            raise DiskError(f"{path} cannot be used: {error.strerror}", field="path") from None

    @property
    def used(self) -> int:
        """Return the bytes on disk of all files and directories of the disk tier."""
        return self._others + self._in_blocks + self._unused

    def scan(self) -> Contents:
        """List the disk tier's folder, and delete temporary files that a killed process has left."""
        found = Contents()
        for folder, _, files in os.walk(self.path):
            with contextlib.suppress(OSError):
                found.others += max(DIRECTORY_BYTES, _on_disk(os.stat(folder)))
            found.directories.add(os.path.relpath(folder, self.path))
            for file in files:
                path = os.path.join(folder, file)
                with contextlib.suppress(OSError):  # the file may have been removed by another process
                    if file.endswith(TEMPORARY) and not self.read_only:
                        os.unlink(path)
                        continue
                    state = os.stat(path, follow_symlinks=False)
                    taken = _on_disk(state) + ENTRY_BYTES
                    block = block_of(os.path.relpath(path, self.path)) if file.endswith(SUFFIX) else None
                    if block is not None:
                        found.blocks.append((state.st_mtime, block, taken))
                    else:
                        found.others += taken
        return found

    def adopt(self, found: Contents) -> None:
        """Replace the index of KV blocks by the contents of the folder, which `scan` returned."""
        blocks = OrderedDict((block, taken) for _, block, taken in sorted(found.blocks))
        self._directories = found.directories
        self._entries = Counter(os.path.dirname(file_of(block)) for block in blocks)
        # `scan` has measured the present sizes of the directories, so none of their bytes count as unused.
        self._most_entries, self._unused = self._entries.copy(), 0
        self._others, self._in_blocks, self.blocks = found.others, sum(blocks.values()), blocks

    def make_room(self, path: str, taken: int, victim: Callable[[], bytes | None] | None = None) -> int | None:
        """Remove KV blocks until a new file fits the folder's size limit, and count the new file's bytes.

        Args:
            path: Path of the new file below the folder.
            taken: Bytes that the new file will take on disk.
            victim: Function that returns the next block to remove, or None; by default the least recently used
                block.

        Returns:
            The number of removed blocks, or None if the file cannot fit.
        """
        new = [each for each in map(str, Path(path).parents[:-1]) if each not in self._directories]
        needed = taken + DIRECTORY_BYTES * len(new)
        if self._others + self._unused + needed > self.size:
            return None
        removed = 0
        while self.used + needed > self.size:
            block = next(iter(self.blocks), None) if victim is None else victim()
            if block is None or not self.remove(block):
                return None
            removed += 1
        self._directories.update(new)
        self._others += needed
        self._count_entry(path, 1)
        return removed

    def remove(self, block: bytes) -> bool:
        """Delete a KV block's file and its index entry; if deletion fails, keep both and return False."""
        try:
            os.unlink(self.path / file_of(block))
        except FileNotFoundError:
            pass
        except OSError:
            self.touch(block)  # as most recently used, so `make_room` next tries another block
            return False
        if block in self.blocks:
            self._in_blocks -= self.blocks.pop(block)
            self._count_entry(file_of(block), -1)
        return True

    def room(self, namespace: bytes) -> int:
        """Return the bytes on disk that a namespace's KV blocks may take, not counting its directories."""
        top = namespace.hex()
        own = sum(each == top or each.startswith(f"{top}/") for each in self._directories)
        return self.size - self._others - (1 + DIRECTORIES_OF_BLOCKS - own) * DIRECTORY_BYTES

    def forget(self, block: bytes, *, delete: bool) -> None:
        """Remove a KV block from the disk tier's index, because the block's file cannot be read.

        Args:
            block: The block's id.
            delete: Whether the block's file is deleted too; a server that only reads deletes no file. A file
                that is not deleted counts towards the folder's size until the next start.
        """
        if block in self.blocks and (self.read_only or not delete or not self.remove(block)):
            self._in_blocks -= self.blocks[block]
            self._others += self.blocks.pop(block)

    def written(self, block: bytes, taken: int) -> None:
        """Add to the index a KV block that was written to disk; `make_room` has counted its bytes before."""
        self._others -= taken
        self._in_blocks += taken
        self.blocks[block] = taken

    def not_written(self, block: bytes, taken: int) -> None:
        """Subtract the bytes that `make_room` counted for a KV block whose write has failed."""
        self._others -= taken
        self._count_entry(file_of(block), -1)

    def _count_entry(self, path: str, more: int) -> None:
        """Update a directory's number of files after a KV block's file was added (``more`` 1) or removed (-1).

        The method also updates the bytes that the directory keeps on disk for entries of removed files.
        """
        directory = os.path.dirname(path)
        self._unused -= self._kept(directory)
        self._entries[directory] += more
        self._most_entries[directory] = max(self._most_entries[directory], self._entries[directory])
        self._unused += self._kept(directory)

    def _kept(self, directory: str) -> int:
        """Return the bytes that a directory keeps on disk for entries of removed files.

        Entries in the directory's first page do not count, since the page exists in any case.
        """
        most = self._most_entries[directory]
        return 0 if most <= FIRST_ENTRIES else (most - self._entries[directory]) * ENTRY_BYTES

    def touch(self, block: bytes) -> None:
        """Mark a KV block as the most recently used one, if it is in the index."""
        if block in self.blocks:
            self.blocks.move_to_end(block)

    def close(self) -> None:
        """Release the lock on the disk tier's folder, so that another server may write it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _locked(path: Path) -> int:
    """Lock a disk tier's lock file for this process alone and return its descriptor.

    The call waits up to `LOCK_SECONDS` for a server that is ending. Raises DiskError if the lock is not free
    then.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not (free := _try_lock(descriptor)):
        log.warning("%s belongs to another server; waiting up to %g s for its end", path.parent, LOCK_SECONDS)
    until = time.monotonic() + LOCK_SECONDS
    while not free and time.monotonic() < until:
        time.sleep(0.05)
        free = _try_lock(descriptor)
    if not free:
        owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise DiskError(
            f"{path.parent} belongs to another server (process {owner})", field="path",
            hint="give each server a folder of its own, or set read_only for one of them",
        ) from None  # fmt: skip
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _try_lock(descriptor: int) -> bool:
    """Lock an open file for this process alone; return False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _on_disk(state: os.stat_result) -> int:
    """Return the bytes that a file takes on disk; st_blocks has units of 512 bytes (inode(7))."""
    return max(state.st_blocks * 512, -(-state.st_size // PAGE) * PAGE)
