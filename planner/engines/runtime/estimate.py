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
    where the parts were held against logs together (GPUs); None: add the bounds. ``beside``: memory
    that is taken after the pool was sized, outside the share the plan may take."""

    framework: Estimate
    activation: Estimate
    graphs: Estimate
    sum_interval: tuple[int, int] | None = None
    beside: Estimate | None = None

    @property
    def total(self) -> int:
        return self.framework.value + self.activation.value + self.graphs.value

    @property
    def bounds(self) -> tuple[int, int]:
        """Of the sum."""
        if self.sum_interval is not None:
            return self.sum_interval
        parts = (self.framework, self.activation, self.graphs)
        return sum(part.low for part in parts), sum(part.high for part in parts)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What no source of an engine states, fitted to start-up logs; bytes unless said.

    ``sampler_sort``: per logit of vLLM's sampler up to 0.16. Memory outside PyTorch of a rank:
    ``non_torch`` with one rank, ``non_torch_small`` on a GPU of less than 32 GiB, ``non_torch_hopper`` on
    data centre GPUs from Hopper on; ``graph_profile`` more where graphs were captured on trial;
    ``non_torch_unified`` where host and device share their memory; ``non_torch_parallel`` with tensor
    parallelism on any GPU, on Hopper ``non_torch_ranks`` with two ranks and ``non_torch_doubling`` more
    with each doubling; ``non_torch_stage`` of a pipeline stage. CUDA graphs: ``graph_first`` of 512 tokens,
    each further batch size ``graph_each`` and ``graph_layer`` for each layer. ``spread``: half-width of the
    interval of the sum as a share of the device, what 90 % of the sources left out stay within;
    ``spread_seen``: for engines, GPUs and models of which every part was seen. ``capabilities``: compute
    capabilities of the GPUs in those starts ("8.6 9.0").
    """

    sampler_sort: float
    non_torch: int
    non_torch_small: int
    non_torch_hopper: int
    graph_profile: int
    non_torch_unified: int
    non_torch_parallel: int
    non_torch_ranks: int
    non_torch_doubling: int
    non_torch_stage: int
    graph_first: int
    graph_each: int
    graph_layer: int
    spread: float
    spread_seen: float
    capabilities: str


NOTHING = Estimate(0, 0, 0, "", "")


def scaled(value: int, interval: tuple[float, float], formula: str, source: str) -> Estimate:
    return Estimate(value, int(value * interval[0]), int(value * interval[1]), formula, source)
