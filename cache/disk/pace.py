"""Whether reading blocks from a disk tier is faster than computing them, by the measured seconds of both."""

from __future__ import annotations

import time
from dataclasses import dataclass

# Weight that a measurement loses with each later one: the last ten or so decide.
_KEPT = 0.9
# A disk that was slower than computing is read for one block after this time, so that a disk that has recovered
# is found. At 10 MB/s, a block of 2 MiB costs 0.2 s a minute.
PROBE_SECONDS = 60.0


@dataclass(slots=True)
class Pace:
    """Mean seconds to read, or to compute, one block, over the last measurements."""

    blocks: float = 0.0
    seconds: float = 0.0

    def add(self, blocks: int, seconds: float) -> None:
        """Add ``blocks`` that took ``seconds`` together."""
        self.blocks = self.blocks * _KEPT + blocks
        self.seconds = self.seconds * _KEPT + seconds

    @property
    def seconds_per_block(self) -> float | None:
        """Return the mean seconds of a block, or None before the first measurement."""
        return self.seconds / self.blocks if self.blocks else None


class ReadRule:
    """The rule that decides for each request whether its blocks are read or computed.

    Reads are allowed until both costs are known. The costs are linear in blocks, so attention to a longer
    context, which makes later blocks of a prompt more expensive to compute, is not counted.

    Args:
        compute_seconds: Seconds to compute a block; None: measured.
    """

    def __init__(self, compute_seconds: float | None = None) -> None:
        self._given = compute_seconds
        self._computing, self._reading = Pace(), Pace()
        self._probe_at: float | None = None  # time of the next probe; None while reads are allowed
        self._probed = False

    @property
    def compute_seconds(self) -> float | None:
        """Return the seconds to compute a block, given or measured; None before the first measurement."""
        return self._computing.seconds_per_block if self._given is None else self._given

    @property
    def read_seconds(self) -> float | None:
        """Return the seconds to read a block; None before the first measurement."""
        return self._reading.seconds_per_block

    def computed(self, blocks: int, seconds: float) -> None:
        """Note that a request computed ``blocks`` in ``seconds``."""
        self._computing.add(blocks, seconds)

    def read(self, blocks: int, seconds: float) -> None:
        """Note that a request waited ``seconds`` for ``blocks`` from the disk."""
        if self._probed:  # earlier measurements are older than PROBE_SECONDS
            self._reading, self._probed = Pace(), False
        self._reading.add(blocks, seconds)

    def blocks_to_read(self) -> int | None:
        """Return how many blocks the next request may read: None for all, 0, or 1 for a probe."""
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
