"""One tensor as a checkpoint header describes it."""

from __future__ import annotations

from tonnage.planner.records import dataclass


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """``dtype`` in the file format's own spelling; ``shape`` in PyTorch order; ``nbytes`` in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
