"""``Estimate``, a memory figure with its expected interval, and ``Coefficients`` of the GPU memory model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """One part of the planned memory: ``value`` bytes, expected between ``low`` and ``high`` bytes."""

    value: int
    low: int
    high: int
    formula: str
    source: str


@dataclass(frozen=True, slots=True)
class Runtime:
    """The memory of one rank besides weights and KV pool.

    Attributes:
        framework: Memory outside PyTorch's allocator, such as CUDA's context and NCCL's buffers.
        activation: Activations of one step.
        graphs: CUDA graphs.
        sum_interval: (low, high) bounds in bytes of framework + activation + graphs. If it is None, the bounds
            of the three estimates are added. On GPUs, only the sum was compared with logs, so the sum has
            tighter bounds of its own.
        beside: Memory that the engine allocates after it sized the KV pool, outside the plan's memory limit.
            None if the engine allocates no such memory.
    """

    framework: Estimate
    activation: Estimate
    graphs: Estimate
    sum_interval: tuple[int, int] | None = None
    beside: Estimate | None = None

    @property
    def total(self) -> int:
        """Return the sum of framework memory, activations and CUDA graphs, in bytes."""
        return self.framework.value + self.activation.value + self.graphs.value

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the lower and upper bound in bytes of the sum of framework, activations and graphs."""
        if self.sum_interval is not None:
            return self.sum_interval
        parts = (self.framework, self.activation, self.graphs)
        return sum(part.low for part in parts), sum(part.high for part in parts)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Memory that no engine's source states, fitted to start-up logs; in bytes unless stated otherwise.

    Attributes:
        sampler_sort: Bytes per logit that vLLM's sampler takes to sort the logits, up to vLLM 0.16.
        non_torch: Memory outside PyTorch on a single GPU of 32 GiB or more before Hopper.
        non_torch_small: Memory outside PyTorch on a single GPU of less than 32 GiB.
        non_torch_hopper: Memory outside PyTorch on a single data centre GPU from Hopper on.
        graph_profile: Additional memory outside PyTorch if the profile run captured CUDA graphs.
        non_torch_unified: Memory outside PyTorch where host and device share their memory.
        non_torch_parallel: Memory outside PyTorch with tensor parallelism, on GPUs before Hopper.
        non_torch_ranks: Memory outside PyTorch with two tensor-parallel ranks on Hopper.
        non_torch_doubling: Additional memory on Hopper for each doubling of the ranks beyond two.
        non_torch_stage: Memory outside PyTorch of a pipeline stage.
        graph_first: Memory of the CUDA graphs of the largest batch, if it has at most 512 tokens.
        graph_each: Memory of the CUDA graph of each further batch size.
        graph_layer: Additional memory of each further batch size, per layer.
        spread: Half-width of the interval of framework + activations + graphs, as a fraction of the device's
            memory. In cross-validation, all logs of one source are left out of the fit; the errors of 90 % of
            the sources are below this value.
        spread_seen: Like ``spread``, for plans whose GPU, kind of model and engine version are covered by logs
            that print every part of the sum.
        spread_unified: Like ``spread``, for devices that share their memory with the host.
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
    spread_unified: float
    capabilities: str


NOTHING = Estimate(0, 0, 0, "", "")
