"""An engine in a Ray Serve replica, with /metrics, /memory and /ready of its own.

The API calls the replica through a Ray handle, with requests that are already parsed. The replica also serves
HTTP, so that Prometheus and operators see the memory of its process.
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
    """The state of one replica, which it reports to the API; `address` is host:port of its HTTP endpoints."""

    replica_id: str
    address: str
    stats: EngineStats
    max_model_len: int
    capabilities: Capabilities


class EngineReplica:
    """A Ray Serve replica that runs one engine; Ray regards it as healthy while the engine is ready."""

    async def __init__(self, settings: Settings, plan: Plan) -> None:  # type: ignore[misc]  # Ray awaits it
        self._engine = make_engine(settings, plan)
        self._block_size, self._reports = plan.kv_cache.layout.block_size, 0
        # The generating endpoints are left out, because their requests would bypass the queue, quotas and
        # accounts of the API.
        self._app = create_app(settings, self._engine, operations_only=True)
        # The replica listens only on this node's address in the Ray cluster, which the other nodes can reach.
        self._socket = socket.create_server((ray.util.get_node_ip_address(), 0))
        config = uvicorn.Config(
            self._app,
            http=BoundedHttpProtocol,
            ws="none",  # no endpoint uses WebSockets; tonnage serve turns them off, too
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="on",
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]  # Ray handles them
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        state = self._app.state.tonnage
        try:
            async with asyncio.timeout(settings.engine_ready_timeout):
                while not state.started:
                    if self._serving.done():
                        raise EngineDead("the replica's HTTP server ended before the engine was ready")
                    if state.startup_error is not None:
                        raise state.startup_error
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise EngineDead(
                f"the engine did not load within {settings.engine_ready_timeout:g} s",
                hint="engine_ready_timeout sets the limit",
            ) from None

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk | TonnageError]:
        """Yield the output chunks of a request.

        If the engine rejects the request, the last item is the error. It is not raised, because Ray would lose
        the type and the attributes of a raised error.
        """
        try:
            async for chunk in self._engine.generate(request):
                yield chunk
        except TonnageError as refusal:
            yield refusal

    async def report(self) -> ReplicaReport:
        """Return the `ReplicaReport` of this replica's state; `RayEngine` calls this once per second."""
        host, port = self._socket.getsockname()[:2]
        return ReplicaReport(
            replica_id=ray.serve.get_replica_context().replica_id.unique_id,
            address=f"{host}:{port}",
            stats=self._engine.stats(),
            max_model_len=self._engine.capacity().max_model_len,
            capabilities=self._engine.capabilities,
        )

    async def record_routing_stats(self) -> dict[str, float]:
        """Return this replica's unreserved KV blocks, its tokens per block, and the number of calls so far.

        The router recognises a new report by the number of calls.
        """
        self._reports += 1
        headroom = self._engine.stats().pool.headroom
        return {"headroom_blocks": headroom, "block_size": self._block_size, "number": self._reports}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the number of waiting requests and the reserved fraction of the KV pool, for autoscaling."""
        stats = self._engine.stats()
        return {"waiting": stats.waiting, "promised_share": stats.pool.reserved_share}

    async def check_health(self) -> None:
        """Raise EngineDead when the engine does not run, so that Ray replaces this replica."""
        if not self._engine.ready:
            raise EngineDead("the engine is not running")

    async def __del__(self) -> None:
        self._server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError, TimeoutError):
            await asyncio.wait_for(self._serving, 10)
