"""``Estimate``, a figure with its expected interval, and ``Coefficients`` of the GPU memory model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """A memory term of ``value`` bytes, expected between ``low`` and ``high``."""

    value: int
    low: int
    high: int
    formula: str
    source: str


@dataclass(frozen=True, slots=True)
class Runtime:
    """The memory of one rank besides weights and pool.

    Attributes:
        framework: Memory outside PyTorch's allocator.
        activation: Activations of one step.
        graphs: CUDA graphs.
        sum_interval: Bounds of the sum, where the parts were compared with logs together (GPUs). They are
            tighter
            than the sum of the parts' bounds. None means to add the bounds.
        beside: Memory taken after the pool was sized, outside the share that the plan may use.
    """

    framework: Estimate
    activation: Estimate
    graphs: Estimate
    sum_interval: tuple[int, int] | None = None
    beside: Estimate | None = None

    @property
    def total(self) -> int:
        """Return the sum of framework, activations and graphs, in bytes."""
        return self.framework.value + self.activation.value + self.graphs.value

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the lower and upper bound of the sum, in bytes."""
        if self.sum_interval is not None:
            return self.sum_interval
        parts = (self.framework, self.activation, self.graphs)
        return sum(part.low for part in parts), sum(part.high for part in parts)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Memory that no engine's source states, fitted to start-up logs; in bytes unless stated otherwise.

    Attributes:
        sampler_sort: Bytes per logit of vLLM's sampler up to 0.16.
        non_torch: Memory outside PyTorch of a single rank.
        non_torch_small: The same on a GPU of less than 32 GiB.
        non_torch_hopper: The same on data centre GPUs from Hopper on.
        graph_profile: Additional memory where graphs were captured during profiling.
        non_torch_unified: Memory outside PyTorch where host and device share their memory.
        non_torch_parallel: Memory outside PyTorch with tensor parallelism, on any GPU.
        non_torch_ranks: The same on Hopper with two ranks.
        non_torch_doubling: Additional memory on Hopper for each doubling of the ranks.
        non_torch_stage: Memory outside PyTorch of a pipeline stage.
        graph_first: CUDA graphs of 512 tokens.
        graph_each: CUDA graph of each further batch size.
        graph_layer: Additional memory of each further batch size, per layer.
        spread: Half-width of the sum's interval as a share of the device; 90 % of left-out sources stay within
            it.
        spread_seen: The same for engines, GPUs and models whose every part was measured.
        capabilities: Compute capabilities of the measured GPUs, such as "8.6 9.0".
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
    """Return an estimate with bounds at ``interval``, as factors of ``value``."""
    return Estimate(value, int(value * interval[0]), int(value * interval[1]), formula, source)
