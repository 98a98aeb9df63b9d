"""Rough speed of a GPU layout: a roofline of memory bandwidth and arithmetic, plus all-reduces between GPUs.

- A step reads the weights once, and the KV cache of every running request.
- Per token it computes 2 operations for each parameter used for the token (Kaplan et al., arXiv 2001.08361,
  section 2.1), at the GPU's 16-bit peak, or at its FP8 peak with FP8 weights.
- Tensor-parallel ranks all-reduce the hidden states twice per layer. Each rank sends 2 (n - 1) / n times the
  bytes (ring algorithm: Patarasuk and Yuan, 2009), at the peak of the link between the GPUs.

The time of a step is the larger of the first two times (memory, arithmetic), plus the third (all-reduce), plus
`OVERHEAD`. With p pipeline stages, the requests form p groups, which pass through the stages one after another.
The arithmetic of attention, and transfers between pipeline stages, are not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.planner.devices.catalogue import Gpu
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.tensor import TOWER_ROLES

OVERHEAD = 0.002
"""Seconds per step for kernel launches and work on the host, as in cache/replay/step_time.py."""

SPEEDS = (
    "tok/s and ms/tok are rough: a roofline of the vendors' peak figures for memory, arithmetic and links "
    "between GPUs. Most engines are slower."
)
"""The explanation below a table with speeds."""


@dataclass(frozen=True, slots=True)
class Speed:
    """The rough speed of one replica in a steady state, where a new request replaces each finished one at once.

    Attributes:
        step_seconds: seconds until every running request has one more token.
        tokens_per_second: output tokens per second of all running requests.
    """

    step_seconds: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Work:
    """Parameter counts of a model, from which the memory reads and operations of a step follow.

    Attributes:
        dense: parameters used for every token, without the embedding table, which is only looked up.
        expert: parameters of all routed experts.
        experts: number of routed experts of a layer; 0 for a dense model.
        chosen: number of routed experts selected per token.
        reduced: bytes per token that tensor-parallel ranks all-reduce.
    """

    dense: int
    expert: int = 0
    experts: int = 0
    chosen: int = 0
    reduced: int = 0

    def computed(self) -> float:
        """Return the number of the model's parameters that the computation of one token uses."""
        return self.dense + (self.expert * self.chosen / self.experts if self.experts else 0)

    def read_share(self, tokens: float) -> float:
        """Return the fraction (0 to 1) of the model's parameters that a step with `tokens` tokens reads.

        A step reads the weights of an expert if at least one token selects it. The router is assumed to select
        experts uniformly.
        """
        if not self.experts:
            return 1.0
        used = 1.0 - float((1 - min(1.0, self.chosen / self.experts)) ** tokens)
        return (self.dense + self.expert * used) / (self.dense + self.expert)


def work_of(architecture: Architecture) -> Work:
    """Return the parameter counts of a model's text part, without vision and audio towers and their projectors.

    The embedding counts only if the head is tied to it.
    """
    tied = {tensor.tied_to for tensor in architecture.tensors if tensor.tied_to is not None}
    dense = expert = 0
    for tensor in architecture.tensors:
        if not tensor.is_parameter or tensor.tied_to is not None or tensor.role in TOWER_ROLES:
            continue
        if tensor.role == "expert":
            expert += tensor.elements
        elif tensor.role != "embedding" or tensor.name in tied:
            dense += tensor.elements
    # 2 all-reduces per layer (after attention and MLP) x 2 bytes per value
    reduced = 2 * architecture.layers * architecture.hidden_size * 2
    return Work(dense, expert, architecture.experts, architecture.experts_per_token, reduced)


def peak_flops(gpu: Gpu, scheme: str) -> float | None:
    """Return a GPU's peak operations per second for weights of a quantization scheme; None if not known."""
    return gpu.fp8_flops if scheme == "fp8" and gpu.fp8_flops is not None else gpu.flops


def speed_of(
    work: Work, gpu: Gpu, *, scheme: str = "none", weights_bytes: int, read_bytes: float, tensor: int = 1,
    stages: int = 1, running: int, prompt: int, output: int,
) -> Speed | None:  # fmt: skip
    """Return the rough speed of a replica that runs `running` requests; None if GPU peak figures are unknown.

    Args:
        work: the model's parameters.
        gpu: the GPU.
        scheme: the quantization of the weights.
        weights_bytes: bytes of the weights on one GPU.
        read_bytes: KV cache bytes that a step reads for one request in the middle of its output, summed over
            one GPU of each stage.
        tensor: number of tensor-parallel ranks.
        stages: number of pipeline stages.
        running: requests that run at once.
        prompt: tokens of each prompt; 0 to leave out the time of prefill.
        output: tokens of each answer.
    """
    flops, link = peak_flops(gpu, scheme), gpu.link_among(tensor)
    if gpu.bandwidth is None or flops is None or (tensor > 1 and link is None):
        return None
    group = running / stages
    # On average, one of every `output` running requests finishes in a step. The step then also computes the
    # prompt of the new request that replaces it.
    tokens = group * (1 + prompt / output)
    memory = (weights_bytes * work.read_share(tokens) + read_bytes / stages * group) / gpu.bandwidth
    arithmetic = 2.0 * work.computed() * tokens / (flops * tensor * stages)
    sent = work.reduced / stages * tokens * 2 * (tensor - 1) / tensor
    step = max(memory, arithmetic) + (sent / link if link else 0.0) + OVERHEAD
    seconds = stages * step
    return Speed(seconds, running / seconds)
