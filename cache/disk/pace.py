"""The rule by which a request reads KV blocks from a disk tier only while that is faster than computing them.

The costs of reading and of computing are measured in seconds per block.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

# The weight of a measurement is multiplied by this factor at each later measurement, so that the mean depends
# on about the last ten measurements.
_KEPT = 0.9
# While reading is slower than computing, one block is read after this time as a probe, so that a disk that has
# become faster is used again. At 10 MB/s, probes of 2 MiB cost 0.2 s per minute.
PROBE_SECONDS = 60.0


@dataclass(slots=True)
class Pace:
    """A moving average of the seconds that it takes to read, or to compute, one KV block."""

    blocks: float = 0.0
    seconds: float = 0.0

    def add(self, blocks: int, seconds: float) -> None:
        """Add a measurement: reading or computing ``blocks`` KV blocks took ``seconds`` seconds in total."""
        self.blocks = self.blocks * _KEPT + blocks
        self.seconds = self.seconds * _KEPT + seconds

    @property
    def seconds_per_block(self) -> float | None:
        """Return the mean seconds to read or compute a KV block, or None before the first measurement."""
        return self.seconds / self.blocks if self.blocks else None


class ReadRule:
    """The rule that decides for each request whether its KV blocks are read from disk or computed.

    Reads are allowed until the costs of reading and of computing are known. The costs are linear in blocks.
    They do not include that attention to a longer context makes later blocks of a prompt slower to compute.

    Args:
        compute_seconds: Seconds to compute a block; None: measured.
    """

    def __init__(self, compute_seconds: float | None = None) -> None:
        self._given = compute_seconds
        self._computing, self._reading = Pace(), Pace()
        self._probe_at: float | None = None  # time of the next one-block probe; None while reads are allowed
        self._probed = False

    @property
    def compute_seconds(self) -> float | None:
        """Return the seconds to compute a KV block: configured, or measured (None before a measurement)."""
        return self._computing.seconds_per_block if self._given is None else self._given

    @property
    def read_seconds(self) -> float | None:
        """Return the mean seconds to read a KV block from disk; None before the first measurement."""
        return self._reading.seconds_per_block

    def computed(self, blocks: int, seconds: float) -> None:
        """Record that a request computed ``blocks`` KV blocks in ``seconds`` seconds."""
        self._computing.add(blocks, seconds)

    def read(self, blocks: int, seconds: float) -> None:
        """Record that a request waited ``seconds`` seconds for ``blocks`` KV blocks from the disk."""
        if self._probed:  # a probe of the disk replaces measurements older than PROBE_SECONDS
            self._reading, self._probed = Pace(), False
        self._reading.add(blocks, seconds)

    def blocks_to_read(self) -> int | None:
        """Return how many KV blocks the next request may read from disk; None for all.

        While reading is slower than computing, the result is 0, but 1 every PROBE_SECONDS to measure the disk.
        """
        read, compute = self.read_seconds, self.compute_seconds
        if read is None or compute is None or read <= compute:
            self._probe_at = None
            return None
        now = time.monotonic()
        if self._probe_at is None:
            self._probe_at = now + PROBE_SECONDS
        if now < self._probe_at:
            return 0
        self._probe_at, self._probed = now + PROBE_SECONDS, True
        return 1
