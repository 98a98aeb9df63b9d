"""Memory of the host beside an engine's GPUs: its parts, and what they come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class HostPart:
    """Memory of the host, not of a GPU: ``value`` bytes, between ``low`` and ``high``, ``when`` it is held
    (``loading``: until the weights are on the GPUs; ``serving``: from then on). ``shared``: in /dev/shm."""

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
    """What one replica holds beside its GPUs, all of its processes on one machine. ``page_cache_bytes``: what
    reading the model puts into the page cache, which a container is charged with and the kernel takes back
    when something else needs it: no part of the sums. ``unknown``: why there is no figure; then no sum means
    anything."""

    parts: tuple[HostPart, ...] = ()
    page_cache_bytes: int = 0
    unknown: str = ""

    @property
    def value(self) -> int:
        return self._most([(part.when, part.value) for part in self.parts])

    @property
    def low(self) -> int:
        return self._most([(part.when, part.low) for part in self.parts])

    @property
    def high(self) -> int:
        return self._most([(part.when, part.high) for part in self.parts])

    @property
    def shared_bytes(self) -> int:
        """What /dev/shm has to have room for."""
        return sum(part.high for part in self.parts if part.shared)

    def _most(self, held: list[tuple[str, int]]) -> int:
        """What is there while loading is gone before requests come: the larger of the two counts."""
        sums = {when: sum(size for other, size in held if other == when) for when, _ in held}
        return sums.get("always", 0) + max(sums.get("loading", 0), sums.get("serving", 0))
