"""The protocol of an engine: what the API may ask of HF, vLLM, replicas on Ray and the fake.

The API process owns text (tokenizing, detokenizing, stop strings); engines see token ids only. What crosses the
border: ``request`` and ``chunk`` there and back, ``stats``, ``capacity`` and ``errors``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass

from tonnage.planner.plans import Plan
from tonnage.server.engines.capacity import Capacity
from tonnage.server.engines.chunk import Chunk
from tonnage.server.engines.request import BASIC_PARAMS, GenerationRequest
from tonnage.server.engines.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do beyond what every engine must. The API refuses the rest by name.

    ``honours``: the fields of SamplingParams (and ``priority``) it acts on. ``embeds``: it gives a vector for
    each prompt instead of text. ``own_metrics``: ``Engine.own_metrics`` has a page.
    """

    honours: frozenset[str] = BASIC_PARAMS
    embeds: bool = False
    own_metrics: bool = False


def common(each: Iterable[Capabilities]) -> Capabilities:
    """What all of several engines can do; of none, what every engine must."""
    first, *others = tuple(each) or (Capabilities(),)
    for other in others:
        first = Capabilities(
            honours=first.honours & other.honours,
            embeds=first.embeds and other.embeds,
            own_metrics=first.own_metrics and other.own_metrics,
        )
    return first


class Engine(ABC):
    """One running model. All methods are called from the API process's event loop."""

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """The plan printed before the load (revision 0)."""

    @property
    def capabilities(self) -> Capabilities:
        """May be asked at any time, also before the start."""
        return Capabilities()

    @abstractmethod
    async def start(self) -> None:
        """Load; returns when it can serve. Raises TonnageError with what to do."""

    @abstractmethod
    def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Submit. Raises NeverFits / QueueFull / EngineDead before the first chunk.

        Ends after each of the n sequences sent a finish_reason. Closing the generator aborts the request
        and frees its blocks within one step.
        """

    @abstractmethod
    async def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its n sequences where the engine can: its last chunk says ``abort``."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """A snapshot, from what is known: it never waits."""

    @property
    def ready(self) -> bool:
        """It serves now. Asked for every request: to be answered without a snapshot where that costs."""
        return self.stats().ready

    @abstractmethod
    def capacity(self) -> Capacity:
        """What it has after the load. Raises QueueFull before."""

    def own_metrics(self) -> bytes:
        """The backend's own page of metrics, under its own names; where ``capabilities`` says so."""
        return b""

    @abstractmethod
    async def drain(self, seconds: float) -> None:
        """Admit no more; return when the running requests ended or the time is up."""

    @abstractmethod
    async def stop(self) -> None:
        """End it, also in the middle of its start. May be called more than once."""
