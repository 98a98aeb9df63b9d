"""One KV block as a file: a header, and the block's bytes.

The header has a checksum of the block's key and bytes. A file that is cut off, damaged or renamed is therefore
found when it is read. A file gets its name only when it is complete (rename is atomic), so a process that is
killed leaves at most a temporary file.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

import xxhash

from tonnage.planner.model.tier import HEADER_BYTES

MAGIC = b"TNGKV001"
# Fields of the header: magic number, size of the block in bytes, XXH3-128 of the block's key and bytes. The
# header is padded to 64 bytes.
_HEADER = struct.Struct("<8sQ16s32x")
assert _HEADER.size == HEADER_BYTES
SUFFIX, TEMPORARY = ".kv", ".tmp"
# Flags of open(2): a symbolic link is not followed, and a named pipe in place of a block's file does not block
# the thread.
_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def write_block(path: Path, key: bytes, block: memoryview) -> None:
    """Write a KV block and its header to the file ``path``, through a temporary file beside it.

    Raises:
        OSError: the disk is full, read-only or failed; nothing is left of the file.
    """
    temporary = path.with_suffix(TEMPORARY)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _SAFELY, 0o600)
    try:
        try:
            _write_all(descriptor, [memoryview(_header(key, block)), block])
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def read_block(path: Path, key: bytes, into: memoryview) -> bool:
    """Read a KV block from a file into ``into``; return whether the file has the block of ``key``, undamaged.

    After False, ``into`` has undefined bytes.

    Raises:
        OSError: the file is missing or cannot be read.
    """
    header = bytearray(HEADER_BYTES)
    descriptor = os.open(path, os.O_RDONLY | _SAFELY)
    try:
        if os.fstat(descriptor).st_size != HEADER_BYTES + len(into):
            return False
        if not _read_all(descriptor, [memoryview(header), into]):
            return False
    finally:
        os.close(descriptor)
    return bytes(header) == _header(key, into)


def _header(key: bytes, block: memoryview) -> bytes:
    found = xxhash.xxh3_128(key)
    found.update(block)
    return _HEADER.pack(MAGIC, len(block), found.digest())


def _write_all(descriptor: int, parts: list[memoryview]) -> None:
    while parts:
        _advance(parts, os.writev(descriptor, parts))


def _read_all(descriptor: int, parts: list[memoryview]) -> bool:
    """Read a file into the buffers ``parts``; return False if the file ends before they are full."""
    while parts:
        count = os.readv(descriptor, parts)
        if not count:
            return False
        _advance(parts, count)
    return True


def _advance(parts: list[memoryview], count: int) -> None:
    """Remove the first ``count`` bytes, which were read or written, from the list of buffers ``parts``."""
    while parts and count >= len(parts[0]):
        count -= len(parts.pop(0))
    if count:
        parts[0] = parts[0][count:]
