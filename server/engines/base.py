"""The engine interface: what the API process can request from the HF, vLLM, Ray and fake engines.

The API process handles text (tokenization, detokenization, stop strings). An engine receives and returns only
token ids. The types that this interface uses are in ``request``, ``chunk``, ``stats``, ``capacity`` and
``errors``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass

from tonnage.planner.plans import Plan
from tonnage.server.engines.capacity import Capacity
from tonnage.server.engines.chunk import Chunk
from tonnage.server.engines.request import BASIC_PARAMS, GenerationRequest, PoolingTask
from tonnage.server.engines.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The optional features that an engine supports; the API rejects a request for any other feature.

    Attributes:
        honours: names of the SamplingParams fields (and ``priority``) that have an effect in this engine.
        pools: pooling task, such as embeddings, that the engine runs on each prompt; None if it generates text.
        own_metrics: whether ``Engine.own_metrics`` returns Prometheus metrics.
    """

    honours: frozenset[str] = BASIC_PARAMS
    pools: PoolingTask | None = None
    own_metrics: bool = False


def common(each: Iterable[Capabilities]) -> Capabilities:
    """Return the capabilities that every engine in ``each`` has; only ``BASIC_PARAMS`` without engines."""
    first, *others = tuple(each) or (Capabilities(),)
    for other in others:
        first = Capabilities(
            honours=first.honours & other.honours,
            pools=first.pools if first.pools == other.pools else None,
            own_metrics=first.own_metrics and other.own_metrics,
        )
    return first


class Engine(ABC):
    """One running model, as the API process sees it; the event loop of the API process calls all methods."""

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """The memory plan that was made for this model before it was loaded (plan revision 0)."""

    @property
    def capabilities(self) -> Capabilities:
        """The optional features of this engine; they are available before the start, too."""
        return Capabilities()

    @abstractmethod
    async def start(self) -> None:
        """Load the model, and return when the engine can serve requests.

        Raises:
            TonnageError: the engine cannot start; the message says what to do.
        """

    @abstractmethod
    def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Submit a request and yield chunks of new tokens until each of its n sequences has finished.

        Closing the generator aborts the request and frees its blocks within one step.

        Raises:
            NeverFits: the request can never fit into the pool; raised before the first chunk.
            QueueFull: the engine cannot accept the request now; raised before the first chunk.
            EngineDead: the engine process ended; raised at any time.
        """

    @abstractmethod
    async def abort(self, request_id: str, index: int | None = None) -> None:
        """Abort a request, or only sequence ``index`` of the request if the engine supports that.

        The last chunk of an aborted sequence has the finish reason ``abort``.
        """

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return the engine's most recent statistics without waiting for the engine."""

    @property
    def ready(self) -> bool:
        """Whether the engine can serve requests now.

        The value is taken from `stats`. An engine whose `stats` is slow overrides this property.
        """
        return self.stats().ready

    @abstractmethod
    def capacity(self) -> Capacity:
        """Return the engine's capacity (blocks, lengths, memory) as measured after the model was loaded.

        Raises:
            QueueFull: the engine has not loaded yet.
        """

    def own_metrics(self) -> bytes:
        """Return the engine's own Prometheus metrics; empty if ``Capabilities.own_metrics`` is false."""
        return b""

    @abstractmethod
    async def drain(self, seconds: float) -> None:
        """Stop admitting requests; return when running requests have finished or ``seconds`` have passed."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop the engine, also while it is starting. A second call does nothing."""
