"""Messages between the API process and the HF engine's process, which are pickled on a socket.

Two messages are not classes of this module. The API process sends a `GenerationRequest` to get tokens for it.
The engine process sends a `TonnageError` if it cannot start or must end.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.cache.admission import Policy
from tonnage.planner.plans import Plan
from tonnage.server.engines.chunk import Chunk
from tonnage.server.engines.sharing import Sharing
from tonnage.server.engines.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Load:
    """The first message to the engine process: memory plan, admission policy and prefix cache settings."""

    plan: Plan
    policy: Policy
    sharing: Sharing


@dataclass(frozen=True, slots=True)
class Abort:
    """A message to the engine process to abort a request, or with ``index`` only one of its n sequences."""

    request_id: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """A message to the engine process to stop serving and exit."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine process's message after load, self-check and profile run have succeeded.

    Attributes:
        num_blocks: number of blocks of the KV pool, the first dimension of its tensor.
        weights_bytes: bytes of the weights' storages after the load.
        warm_weights_bytes: bytes of the weights' storages after the profile run, in which a kernel may have
            repacked weights.
        kv_pool_bytes: bytes of the KV pool's storages.
        activation_bytes: additional bytes that the profile run's step, the largest possible, took
            (``model.profile``).
        self_check_error: largest relative error of the logits in the self-check.
        stats: statistics before the first request.
        device_bytes: bytes taken on the GPU after the profile run; None on a CPU.
        kv_tier_bytes: bytes of the KV tier in host memory.
    """

    num_blocks: int
    weights_bytes: int
    warm_weights_bytes: int
    kv_pool_bytes: int
    activation_bytes: int
    self_check_error: float
    stats: EngineStats
    device_bytes: int | None = None
    kv_tier_bytes: int = 0

    def framework_bytes(self, resident: int) -> int:
        """Return the bytes that the plan counts as framework: measured memory minus all other planned items.

        On a CPU the result is the processes' ``resident`` memory in bytes, minus weights, KV pool and KV tier.
        On a GPU it is the taken device memory, minus weights, KV pool and activations. The taken device memory
        includes the activations, because torch's allocator keeps the peak of the profile run.
        """
        named = self.weights_bytes + self.kv_pool_bytes + self.kv_tier_bytes
        if self.device_bytes is None:
            return resident - named
        return self.device_bytes - named - self.activation_bytes


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The engine process's message after each step: the step's chunks, and the statistics."""

    chunks: tuple[Chunk, ...]
    stats: EngineStats
