"""Host memory (RAM) that an engine uses in addition to GPU memory: its parts and their totals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class HostPart:
    """One part of the host memory (not GPU memory) that an engine uses, in bytes.

    Attributes:
        value: expected bytes.
        low: lower bound in bytes.
        high: upper bound in bytes.
        when: when the memory is in use: `loading` until the weights are on the GPUs, `serving` from then on, or
            `always`.
        shared: whether the memory is in /dev/shm.
    """

    name: str
    value: int
    low: int
    high: int
    formula: str
    source: str
    when: Literal["always", "loading", "serving"] = "always"
    shared: bool = False


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host memory that one replica uses in addition to GPU memory, in all of its processes on one machine.

    Attributes:
        parts: the parts of this memory.
        page_cache_bytes: bytes that reading the model adds to the page cache. They count towards a container's
            memory, but the kernel frees them when needed, so the sums do not include them.
        unknown: the reason why the host memory is not known, or empty. If it is set, the sums are meaningless.
    """

    parts: tuple[HostPart, ...] = ()
    page_cache_bytes: int = 0
    unknown: str = ""

    @property
    def value(self) -> int:
        """Return the expected peak of host memory in bytes."""
        return self._most([(part.when, part.value) for part in self.parts])

    @property
    def low(self) -> int:
        """Return the lower bound of the host memory's peak in bytes."""
        return self._most([(part.when, part.low) for part in self.parts])

    @property
    def high(self) -> int:
        """Return the upper bound of the host memory's peak in bytes."""
        return self._most([(part.when, part.high) for part in self.parts])

    @property
    def shared_bytes(self) -> int:
        """Return the bytes of host memory that /dev/shm must be able to hold."""
        return sum(part.high for part in self.parts if part.shared)

    def _most(self, held: list[tuple[str, int]]) -> int:
        """Sum the bytes in use while loading and the bytes in use while serving; return the larger sum.

        Args:
            held: (when, bytes) of each part, where `when` is as in `HostPart`. Both sums include the parts with
                `when` "always".
        """
        sums = {when: sum(size for other, size in held if other == when) for when, _ in held}
        return sums.get("always", 0) + max(sums.get("loading", 0), sums.get("serving", 0))
