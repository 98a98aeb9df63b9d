"""Rough speed of a layout: a roofline of memory bandwidth and arithmetic, as in `tonnage replay`.

A step reads the weights once and the KV cache of every running request, and computes 2 operations per parameter
that a token passes (Kaplan et al., arXiv 2001.08361, section 2.1). It takes the larger of the two times, plus
`OVERHEAD`. Communication between GPUs, attention arithmetic and arithmetic below 16 bits are not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.tensor import TOWER_ROLES

OVERHEAD = 0.002
"""Seconds of a step for launches and the host, as in cache/replay/step_time.py."""

SPEEDS = (
    "tok/s and ms/tok are rough, a roofline as in tonnage replay: peak memory bandwidth and 16-bit operations, "
    "no communication. Most engines are slower."
)
"""The explanation below a table with speeds."""


@dataclass(frozen=True, slots=True)
class Speed:
    """The rough speed of one replica in the steady state, when ended requests are replaced at once.

    Attributes:
        step_seconds: seconds of one step, which gives each running request one token.
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
    """

    dense: int
    expert: int = 0
    experts: int = 0
    chosen: int = 0

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
    return Work(dense, expert, architecture.experts, architecture.experts_per_token)


def speed_of(
    work: Work, *, weights_bytes: int, read_bytes: float, gpus: int, bandwidth: float, flops: float,
    running: int, prompt: int, output: int,
) -> Speed:  # fmt: skip
    """Return the rough speed of one replica that runs `running` requests.

    Args:
        work: the model's parameters.
        weights_bytes: weights of one GPU.
        read_bytes: KV cache bytes of one request on one GPU, in the middle of its answer.
        gpus: GPUs that share a step.
        bandwidth: bytes per second of one GPU.
        flops: operations per second of one GPU.
        running: requests that run at once.
        prompt: tokens of each prompt, computed once per answer; 0 to leave prompts out.
        output: tokens of each answer.
    """
    tokens = running * (1 + prompt / output)  # Each step, 1 of `output` requests ends and a new prompt begins.
    memory = (weights_bytes * work.read_share(tokens) + read_bytes * running) / bandwidth
    arithmetic = 2.0 * work.computed() * tokens / (flops * gpus)
    seconds = max(memory, arithmetic) + OVERHEAD
    return Speed(seconds, running / seconds)
