"""`TrainingPlan`: the bytes of one rank on GPU, CPU and NVMe, whether they fit, and what a step sends.

`tonnage.planner.training.build.Planner` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tonnage.planner.training.communication import Communication
from tonnage.planner.training.precision import Convention
from tonnage.planner.training.setup import TrainingSetup

SCHEMA_VERSION = 1

Place = Literal["gpu", "cpu", "nvme"]


@dataclass(frozen=True, slots=True)
class Line:
    """One component of a plan: `bytes` per rank (CPU and NVMe: per node), within [low, high]."""

    name: str
    place: Place
    bytes: int
    low: int
    high: int
    formula: str
    source: str


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The memory plan of one training setup, for its fullest rank.

    Attributes:
        lines: the components; every sum is over them. Node totals count all ranks of a node.
        moment: when the peak is reached.
        stage: pipeline stage of the fullest rank.
    """

    model: str
    architecture: str
    setup: TrainingSetup
    length: int
    convention: Convention
    parameters: int
    trainable: int
    adapters: int
    lines: tuple[Line, ...]
    moment: str
    stage: int
    communication: Communication
    fits: bool | None
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    cpu_init_bytes: int

    def total(self, place: Place = "gpu") -> int:
        """Return the bytes in one place."""
        return sum(line.bytes for line in self.lines if line.place == place)

    def bounds(self, place: Place = "gpu") -> tuple[int, int]:
        """Return the least and the most bytes in one place."""
        lines = [line for line in self.lines if line.place == place]
        return sum(line.low for line in lines), sum(line.high for line in lines)

    def line(self, name: str, place: Place = "gpu") -> int:
        """Return the bytes of a component by name, 0 if the plan has none."""
        return sum(line.bytes for line in self.lines if line.name == name and line.place == place)
