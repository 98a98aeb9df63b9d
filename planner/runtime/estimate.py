"""Estimate: a figure an engine decides, with the interval it is expected in and where that comes from."""

from __future__ import annotations

from tonnage.planner.records import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """``value`` bytes, expected between ``low`` and ``high``."""

    value: int
    low: int
    high: int
    formula: str
    source: str


@dataclass(frozen=True, slots=True)
class Runtime:
    """Terms of one rank. ``sum_interval``: bounds of their sum, tighter than the sum of their bounds
    where the sum was fitted as one (GPUs); None: add the bounds."""

    framework: Estimate
    activation: Estimate
    graphs: Estimate
    sum_interval: tuple[int, int] | None = None

    @property
    def total(self) -> int:
        return self.framework.value + self.activation.value + self.graphs.value


NOTHING = Estimate(0, 0, 0, "", "")


def scaled(value: int, interval: tuple[float, float], formula: str, source: str) -> Estimate:
    return Estimate(value, int(value * interval[0]), int(value * interval[1]), formula, source)
