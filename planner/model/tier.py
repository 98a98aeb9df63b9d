"""A KV tier: a store for KV blocks in host memory or on disk, in addition to the KV pool on the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tonnage.planner.errors import DeploymentError
from tonnage.planner.units import ceil_div, gib, parse_size

# Files of the disk tier (tonnage.cache.disk): a header before each block's bytes. Besides the block files there
# are 256 directories per namespace, two parent directories, a lock file and a description file.
HEADER_BYTES, DIRECTORIES, OTHER_FILES = 64, 258, 2
PAGE = 4096  # allocation unit of ext4, XFS and Btrfs in bytes (mkfs defaults)

# Upper bound of the directory bytes per file. An entry of ext4 takes 8 bytes plus the name, rounded up to a
# multiple of 4 (fs/ext4/ext4.h, ext4_dir_entry_2), which is about 90 bytes here. The blocks of the directory's
# hash tree are at least half full, so an entry takes at most twice that.
ENTRY_BYTES = 256
# Bytes of host memory per block in the disk tier's index: without and with the learned eviction order
# (benchmarks/host_memory.py with 400,000 blocks, 2026-11-28). The third number is the factor of the upper
# bound: the index's dicts grow by doubling.
INDEX_BYTES, LEARNED_INDEX_BYTES, INDEX_GROWTH = 206, 425, 2


def file_bytes(block_bytes: int) -> int:
    """Return the disk space, in bytes, of a disk tier's file with one KV block of ``block_bytes`` bytes.

    Header, directory entry and rounding to the file system's allocation unit are included.
    """
    return ceil_div(HEADER_BYTES + block_bytes, PAGE) * PAGE + ENTRY_BYTES


def blocks_on_disk(size: int, block_bytes: int) -> int:
    """Return how many KV blocks of ``block_bytes`` bytes a disk tier of ``size`` bytes holds."""
    others = DIRECTORIES * PAGE + OTHER_FILES * file_bytes(0)
    return max(0, size - others) // file_bytes(block_bytes)


def index_bytes(blocks: int, learned: bool) -> int:
    """Return the bytes of host memory that a disk tier's index takes for ``blocks`` KV blocks.

    ``learned`` is whether the tier's eviction order is learned from the reuse of blocks (a larger index).
    """
    return blocks * (LEARNED_INDEX_BYTES if learned else INDEX_BYTES)


def disk_tier(text: str, field: str) -> tuple[str, int]:
    """Return the folder and the size in bytes of a disk tier written as ``DIR,SIZE``.

    Raises:
        DeploymentError: the text has no folder or no size; ``field`` names the flag.
    """
    folder, _, size = text.rpartition(",")
    if not folder:
        raise DeploymentError(
            f"{text[:100]!r} is not a folder and a size", field=field, hint="for example /mnt/kv,100GiB"
        )
    return folder, parse_size(size, field)


@dataclass(frozen=True, slots=True)
class TierGroup:
    """The KV cache chunks of one layer group that a tier keeps for a request of max_model_len tokens.

    Attributes:
        kind: kind of the group's layers, such as `full`, `sliding` or `state`.
        chunk_tokens: tokens of one chunk.
        chunks: chunks of one request that the tier keeps.
    """

    kind: str
    chunk_tokens: int
    chunks: int


@dataclass(frozen=True, slots=True)
class KVTier:
    """One KV tier of one replica, with the bytes that the engine allocates for it.

    Attributes:
        name: the engine's name of the tier, such as `OffloadingConnector`.
        medium: `host` for memory, `disk` for files.
        requested: bytes that the flags request for the whole replica; None if they request no bytes.
        value: expected bytes on the machine, over all ranks; None for files without an upper bound.
        low: lower bound of `value`.
        high: upper bound of `value`.
        rank_bytes: bytes that each rank allocates; None if all ranks share one memory region.
        ranks: number of ranks that allocate memory for the tier.
        pinned: whether the memory is page-locked, so that the kernel can neither swap nor reclaim it.
        shared: whether the memory is in /dev/shm.
        chunk_bytes: bytes of one chunk over all ranks.
        chunks: chunks that the tier holds; None for files without an upper bound.
        tokens: tokens that the tier holds, in requests of max_model_len tokens; None if it is not known.
        groups: chunks of one request for each group of layers.
        formula: how the bytes follow from the flags.
        source: file of the engine's source code from which `formula` is taken.
        outside: whether the memory belongs to a process other than the engine, such as LMCache's server.
        note: a further fact to print, such as a missing limit; empty if there is none.
        index: bytes of host memory that the index of a full disk tier takes; 0 for a tier without an index.
    """

    name: str
    medium: Literal["host", "disk"]
    requested: int | None
    value: int | None
    low: int
    high: int | None
    rank_bytes: int | None
    ranks: int
    pinned: bool
    shared: bool
    chunk_bytes: int
    chunks: int | None
    tokens: int | None
    groups: tuple[TierGroup, ...]
    formula: str
    source: str
    outside: bool = False
    note: str = ""
    index: int = 0

    def lines(self) -> list[str]:
        """Return lines of text about the KV tier: bytes per host and per rank, memory kind, chunks, tokens."""
        where = "host memory" if self.medium == "host" else "files"
        title = f"KV tier in {where} ({self.name})"
        if self.value is None:
            held = [f"no upper bound, {self.chunk_bytes:,} bytes for each chunk"]
        else:
            held = [gib(self.value)]
            if self.high is not None and gib(self.low) != gib(self.high):
                held[0] = f"about {gib(self.value)}, {gib(self.low)} to {gib(self.high)}"
            if self.rank_bytes is not None and self.ranks > 1:
                held.append(f"{gib(self.rank_bytes)} on each of {self.ranks} ranks")
            if self.requested is not None and gib(self.requested) != gib(self.value):
                held.append(f"requested {gib(self.requested)}")
        if self.medium == "host":
            held.append("pinned" if self.pinned else "not pinned")
        held += ["in /dev/shm"] if self.shared else []
        held += ["of LMCache's server, not of the engine"] if self.outside else []
        found = [f"{title}: {', '.join(held)}"]
        if self.chunks is not None:
            tokens = "tokens not known" if self.tokens is None else f"{self.tokens:,} tokens"
            found.append(f"  {self.chunks:,} chunks of {self.chunk_bytes:,} bytes; {tokens}")
        if len(self.groups) > 1:
            for place, group in enumerate(self.groups):
                found.append(
                    f"  group {place}: {group.kind}, {group.chunks:,} chunks of {group.chunk_tokens:,} tokens "
                    "for each request"
                )
        return [*found, f"  {self.note}"] if self.note else found
