"""Endpoints for operators: /health (alive), /ready (can serve), /memory, /metrics, and the status page at /."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from tonnage.server.api.generation import Generator
from tonnage.server.errors import ApiError, ErrorCode
from tonnage.server.observe.memory_report import memory_report
from tonnage.server.observe.metrics import Metrics
from tonnage.server.observe.page import HEADERS as PAGE_HEADERS
from tonnage.server.observe.page import status_page
from tonnage.server.observe.status import status_of
from tonnage.server.state import ServerState


def _sees_all(request: Request) -> bool:
    """Return whether the client may see the load of all tenants; without API keys every client may."""
    return bool(request.scope.get("tonnage.sees_all", True))


def operations_router(state: ServerState, metrics: Metrics, generator: Generator) -> APIRouter:
    """Return a router of the endpoints for operators and monitoring, such as /health and /metrics."""
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        """Show the server's status as a page for a browser."""
        status = status_of(memory_report(state, metrics.capacity_forecast(), _sees_all(request)))
        return HTMLResponse(status_page(status), headers=PAGE_HEADERS)

    @router.get("/version")
    async def tonnage_version() -> dict[str, str]:
        """Return the server's version."""
        return {"version": version("tonnage")}

    @router.get("/load")
    async def load(request: Request) -> dict[str, int | None]:
        """Return the requests and sequences of all tenants that are in flight now.

        Values are null for an API key without the right to see other tenants. ``server_load`` is vLLM's name
        for the requests in flight.
        """
        stats = state.engine.stats()
        counts: dict[str, int | None] = {
            "server_load": state.accounts.in_flight,
            "sequences": generator.sequences,
            "running": stats.running,
            "waiting": stats.waiting,
        }
        if not _sees_all(request):
            counts = dict.fromkeys(counts)
        return {**counts, "max_num_queued_reqs": state.settings.max_num_queued_reqs}

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Return 200 when the process responds, even while the model loads."""
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> dict[str, str]:
        """Return 200 when the server can serve a request, else 503 with the reason and Retry-After."""
        state.check_ready()
        return {"status": "ready"}

    @router.get("/ping")
    async def ping() -> dict[str, str]:
        """Return what /health returns; SageMaker and other hosts probe this path."""
        return {"status": "ok"}

    @router.get("/memory")
    async def memory(request: Request) -> dict[str, Any]:
        """Return the memory plan together with the measured bytes.

        The report also has the KV pool by state, the tokens that can still be reserved, and running and waiting
        requests. It has the time when the server's phase (loading, ready ...) began, and the estimated seconds
        until all requests in flight have ended.
        """
        return memory_report(state, metrics.capacity_forecast(), _sees_all(request))

    @router.get("/metrics", response_class=Response)
    async def prometheus() -> Response:
        """Return the metrics in Prometheus text format; a scrape never waits for the engine."""
        return Response(metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @router.get("/metrics/vllm", include_in_schema=False)
    async def engine_prometheus() -> Response:
        """Return vLLM's own metrics under its own names, when vLLM is the backend."""
        if not state.engine.capabilities.own_metrics:
            raise ApiError(ErrorCode.UNKNOWN_URL, "unknown URL: the backend is not vLLM")
        return Response(state.engine.own_metrics(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router
