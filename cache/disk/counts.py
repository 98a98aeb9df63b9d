"""The counts of a disk tier of KV blocks: its contents, and its operations since the start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DiskCounts:
    """The size of a disk tier of KV blocks, and counters of its operations since the start.

    Attributes:
        size: Upper bound of the folder in bytes.
        used: Bytes that the folder takes on disk, as counted by the index of its files.
        blocks: Blocks in the index, of all namespaces.
        ready: Whether the blocks from before the start are in the index.
        stored: Blocks written.
        dropped: Blocks not written, because the disk was full, failed or too slow.
        left_out: Blocks not written, because their forecast reuse is below that of the block they would evict.
        evicted: Blocks removed to make room.
        loaded: Blocks read.
        lost: Blocks in the index that were missing, damaged or not readable.
        declined: Requests whose blocks were computed, because reading them was slower.
        written_bytes: Bytes of the blocks written.
        read_bytes: Bytes of the blocks read.
        write_seconds: Seconds spent writing blocks, summed over threads.
        read_seconds: Seconds spent reading blocks, summed over threads.
    """

    size: int
    used: int = 0
    blocks: int = 0
    ready: bool = False
    stored: int = 0
    dropped: int = 0
    left_out: int = 0
    evicted: int = 0
    loaded: int = 0
    lost: int = 0
    declined: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    write_seconds: float = 0.0
    read_seconds: float = 0.0
