"""Rough speed of a layout: a roofline of memory bandwidth and arithmetic, plus all-reduces between GPUs.

- A step reads the weights once, and the KV cache of every running request.
- Per token it computes 2 operations for each parameter that the token passes (Kaplan et al., arXiv 2001.08361,
  section 2.1), at the GPU's 16-bit peak, or at its FP8 peak with FP8 weights.
- Tensor-parallel ranks all-reduce the hidden states twice per layer. Each rank sends 2 (n - 1) / n times the
  bytes (ring algorithm: Patarasuk and Yuan, 2009), at the peak of the link between the GPUs.

A step takes the larger of the first two times, plus the third, plus `OVERHEAD`. With p pipeline stages, p
groups of requests follow each other, each with its own step on every stage. Attention arithmetic and transfers
between pipeline stages are not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.planner.devices.catalogue import Gpu
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.tensor import TOWER_ROLES

OVERHEAD = 0.002
"""Seconds of a step for launches and the host, as in cache/replay/step_time.py."""

SPEEDS = (
    "tok/s and ms/tok are rough: a roofline of the vendors' peak figures for memory, arithmetic and links "
    "between GPUs. Most engines are slower."
)
"""The explanation below a table with speeds."""


@dataclass(frozen=True, slots=True)
class Speed:
    """The rough speed of one replica in the steady state, when ended requests are replaced at once.

    Attributes:
        step_seconds: seconds in which each running request gets one token.
        tokens_per_second: output tokens per second of all running requests.
    """

    step_seconds: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Work:
    """The parameters of a model that a step reads and computes with.

    Attributes:
        dense: parameters that every token passes, without the lookup of the embedding.
        expert: parameters of all routed experts.
        experts: number of routed experts of a layer; 0 for a dense model.
        chosen: routed experts that one token passes.
        reduced: bytes per token that tensor-parallel ranks all-reduce.
    """

    dense: int
    expert: int = 0
    experts: int = 0
    chosen: int = 0
    reduced: int = 0

    def computed(self) -> float:
        """Return the parameters that one token passes."""
        return self.dense + (self.expert * self.chosen / self.experts if self.experts else 0)

    def read_share(self, tokens: float) -> float:
        """Return the share of the parameters that a step of `tokens` tokens reads.

        An expert is read if a token chooses it; the router's choices count as uniform.
        """
        if not self.experts:
            return 1.0
        used = 1.0 - float((1 - min(1.0, self.chosen / self.experts)) ** tokens)
        return (self.dense + self.expert * used) / (self.dense + self.expert)


def work_of(architecture: Architecture) -> Work:
    """Return the parameters of a model that text passes; an embedding counts only if it is also the head."""
    tied = {tensor.tied_to for tensor in architecture.tensors if tensor.tied_to is not None}
    dense = expert = 0
    for tensor in architecture.tensors:
        if not tensor.is_parameter or tensor.tied_to is not None or tensor.role in TOWER_ROLES:
            continue
        if tensor.role == "expert":
            expert += tensor.elements
        elif tensor.role != "embedding" or tensor.name in tied:
            dense += tensor.elements
    reduced = 2 * architecture.layers * architecture.hidden_size * 2  # after attention and MLP, 16 bits each
    return Work(dense, expert, architecture.experts, architecture.experts_per_token, reduced)


def peak_flops(gpu: Gpu, scheme: str) -> float | None:
    """Return a GPU's peak operations per second with weights of a quantization scheme, None if not known."""
    return gpu.fp8_flops if scheme == "fp8" and gpu.fp8_flops is not None else gpu.flops


def speed_of(
    work: Work, gpu: Gpu, *, scheme: str = "none", weights_bytes: int, read_bytes: float, tensor: int = 1,
    stages: int = 1, running: int, prompt: int, output: int,
) -> Speed | None:  # fmt: skip
    """Return the rough speed of one replica that runs `running` requests, None without the GPU's peak figures.

    Args:
        work: the model's parameters.
        gpu: the GPU.
        scheme: the quantization of the weights.
        weights_bytes: weights of one GPU.
        read_bytes: KV cache bytes of one request in the middle of its answer, on one GPU of each stage.
        tensor: tensor-parallel ranks.
        stages: pipeline stages.
        running: requests that run at once.
        prompt: tokens of each prompt, computed once per answer; 0 to leave prompts out.
        output: tokens of each answer.
    """
    flops, link = peak_flops(gpu, scheme), gpu.link_among(tensor)
    if gpu.bandwidth is None or flops is None or (tensor > 1 and link is None):
        return None
    group = running / stages
    tokens = group * (1 + prompt / output)  # Each step, 1 of `output` requests ends and a new prompt begins.
    memory = (weights_bytes * work.read_share(tokens) + read_bytes / stages * group) / gpu.bandwidth
    arithmetic = 2.0 * work.computed() * tokens / (flops * tensor * stages)
    sent = work.reduced / stages * tokens * 2 * (tensor - 1) / tensor
    step = max(memory, arithmetic) + (sent / link if link else 0.0) + OVERHEAD
    seconds = stages * step
    return Speed(seconds, running / seconds)
