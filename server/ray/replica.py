"""EngineReplica: one engine in a Ray Serve replica, with its own /metrics, /memory and /ready beside it.

The API asks it by handle, with the parsed request. Its HTTP page is for Prometheus and for people: what this
engine's memory does is a matter of one process, not of the sum over all.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import ray
import uvicorn

from tonnage.planner.errors import TonnageError
from tonnage.planner.plans import Plan
from tonnage.server.app import create_app
from tonnage.server.commands.launch import make_engine
from tonnage.server.engines.base import Capabilities
from tonnage.server.engines.chunk import Chunk
from tonnage.server.engines.errors import EngineDead
from tonnage.server.engines.request import GenerationRequest
from tonnage.server.engines.stats import EngineStats
from tonnage.server.http.protocol import BoundedHttpProtocol
from tonnage.server.settings import Settings


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica says of itself. ``address`` is host:port of its own HTTP page."""

    replica_id: str
    address: str
    stats: EngineStats
    max_model_len: int
    capabilities: Capabilities


class EngineReplica:
    """One engine of ``settings`` planned as ``plan``. Ray takes it for healthy while the engine is."""

    async def __init__(self, settings: Settings, plan: Plan) -> None:  # type: ignore[misc]  # as Ray wants it
        self._engine = make_engine(settings, plan)
        # A request that came in here would pass by the queue, the quotas and the accounts of the API.
        self._app = create_app(settings, self._engine, operations_only=True)
        # The bind address Ray knows this node by: reachable where the other nodes are, not beyond.
        self._socket = socket.create_server((ray.util.get_node_ip_address(), 0))
        config = uvicorn.Config(
            self._app,
            http=BoundedHttpProtocol,
            ws="none",  # as tonnage serve
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="on",
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]  # Ray's to handle
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        state = self._app.state.tonnage
        try:
            async with asyncio.timeout(settings.engine_ready_timeout):
                while not state.started:
                    if self._serving.done():
                        raise EngineDead("the replica's HTTP page ended before the engine was ready")
                    if state.startup_error is not None:
                        raise state.startup_error
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise EngineDead(
                f"the engine did not load within {settings.engine_ready_timeout:g} s",
                hint="engine_ready_timeout sets the limit",
            ) from None

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk | TonnageError]:
        """Chunks; a refusal arrives as the last item, so that its type and numbers survive the way."""
        try:
            async for chunk in self._engine.generate(request):
                yield chunk
        except TonnageError as refusal:
            yield refusal

    async def report(self) -> ReplicaReport:
        """What `RayEngine` shows for all replicas."""
        host, port = self._socket.getsockname()[:2]
        return ReplicaReport(
            replica_id=ray.serve.get_replica_context().replica_id.unique_id,
            address=f"{host}:{port}",
            stats=self._engine.stats(),
            max_model_len=self._engine.capacity().max_model_len,
            capabilities=self._engine.capabilities,
        )

    async def record_routing_stats(self) -> dict[str, float]:
        """For the router: blocks that are not reserved yet, and requests that wait."""
        stats = self._engine.stats()
        return {"headroom_blocks": stats.pool.headroom, "waiting": stats.waiting}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For the autoscaler: the same figures as /metrics has."""
        stats = self._engine.stats()
        return {"waiting": stats.waiting, "promised_share": stats.pool.reserved_share}

    async def check_health(self) -> None:
        """Raises EngineDead; Ray then replaces this replica."""
        if not self._engine.ready:
            raise EngineDead("the engine is not running")

    async def __del__(self) -> None:
        self._server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError, TimeoutError):
            await asyncio.wait_for(self._serving, 10)
