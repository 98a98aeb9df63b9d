"""What crosses the pipe between the API process and the engine process."""

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
    """The first message: what to load, and how requests are admitted."""

    plan: Plan
    policy: Policy
    sharing: Sharing


@dataclass(frozen=True, slots=True)
class Generate:
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """``index``: only that one of its n sequences."""

    request_id: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    pass


@dataclass(frozen=True, slots=True)
class Ready:
    """Loaded, self-checked and profiled. Bytes are measured storages, ``activation_bytes`` what one full step
    took beside them (``model.profile``); ``num_blocks`` the pool's real first dimension.
    ``warm_weights_bytes``: the weights once more after that step, where a kernel may have repacked what it
    used."""

    num_blocks: int
    weights_bytes: int
    warm_weights_bytes: int
    kv_pool_bytes: int
    activation_bytes: int
    self_check_error: float
    stats: EngineStats
    device_bytes: int | None = None  # taken of the GPU after the profile run; None: on a CPU

    def framework_bytes(self, resident: int) -> int:
        """What is held beside all the plan names: of the processes' ``resident`` memory on a CPU, of the device
        on a GPU, where the profile run's peak stays with torch's allocator."""
        named = self.weights_bytes + self.kv_pool_bytes
        if self.device_bytes is None:
            return resident - named
        return self.device_bytes - named - self.activation_bytes


@dataclass(frozen=True, slots=True)
class Failed:
    error: TonnageError


@dataclass(frozen=True, slots=True)
class Step:
    chunks: tuple[Chunk, ...]
    stats: EngineStats
