"""Estimate: a figure an engine decides, with the interval it is expected in and where that comes from.
Coefficients: what the GPUs' model is made of."""

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


@dataclass(frozen=True, slots=True)
class Coefficients:
    """``sampler_sort`` / ``sampler_fused``: bytes per logit (row x vocabulary). ``non_torch`` bytes without
    and with tensor parallelism, ``graphs`` bytes captured. ``spread``: half-width of the interval of the
    sum as a share of the device, what 90 % of the sources left out stay within; ``towers``: more of it for
    models with vision or audio towers, whose profile run encodes the largest picture."""

    sampler_sort: float
    sampler_fused: float
    non_torch: int
    non_torch_parallel: int
    graphs: int
    spread: float


NOTHING = Estimate(0, 0, 0, "", "")


def scaled(value: int, interval: tuple[float, float], formula: str, source: str) -> Estimate:
    return Estimate(value, int(value * interval[0]), int(value * interval[1]), formula, source)
