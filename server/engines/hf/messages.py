"""Messages between the API process and the engine process."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.cache.admission import Policy
from tonnage.planner.errors import TonnageError
from tonnage.planner.plans import Plan
from tonnage.server.engines.chunk import Chunk
from tonnage.server.engines.request import GenerationRequest
from tonnage.server.engines.sharing import Sharing
from tonnage.server.engines.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Load:
    """The first message: the plan to load, the admission policy and the prefix cache settings."""

    plan: Plan
    policy: Policy
    sharing: Sharing


@dataclass(frozen=True, slots=True)
class Generate:
    """A request to generate tokens."""

    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """An abort of a request, or with ``index`` of one of its n sequences."""

    request_id: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """A request to end the engine process."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The message that the engine is ready: load, self-check and profile run have succeeded.

    Attributes:
        num_blocks: first dimension of the pool.
        weights_bytes: storages of the weights after the load.
        warm_weights_bytes: the same after a full step, in which a kernel may have repacked weights.
        kv_pool_bytes: storages of the pool.
        activation_bytes: additional memory that one full step took (``model.profile``).
        self_check_error: largest relative error of the logits in the self-check.
        stats: first statistics.
        device_bytes: bytes taken on the GPU after the profile run; None on a CPU.
    """

    num_blocks: int
    weights_bytes: int
    warm_weights_bytes: int
    kv_pool_bytes: int
    activation_bytes: int
    self_check_error: float
    stats: EngineStats
    device_bytes: int | None = None

    def framework_bytes(self, resident: int) -> int:
        """Return the memory that the plan's other terms do not name.

        On a CPU it is the rest of the processes' ``resident`` memory. On a GPU it is the rest of the taken
        device memory, where torch's allocator keeps the peak of the profile run.
        """
        named = self.weights_bytes + self.kv_pool_bytes
        if self.device_bytes is None:
            return resident - named
        return self.device_bytes - named - self.activation_bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine process could not start, or must end, with this error."""

    error: TonnageError


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The chunks of one step and the statistics after it."""

    chunks: tuple[Chunk, ...]
    stats: EngineStats
