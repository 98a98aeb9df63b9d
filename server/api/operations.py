"""What operators ask: /health (alive), /ready (can serve), /memory and /metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from tonnage.server.metrics import Metrics
from tonnage.server.report import memory_report
from tonnage.server.state import ServerState


def operations_router(state: ServerState, metrics: Metrics) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        """200 while the process answers, also while the model loads."""
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> dict[str, str]:
        """200 when a request would be served; else 503 with the reason and Retry-After."""
        state.check_ready()
        return {"status": "ready"}

    @router.get("/memory")
    async def memory() -> dict[str, Any]:
        """The plan, what was measured, the difference, the pool by state and what is left to promise."""
        return memory_report(state)

    @router.get("/metrics", response_class=Response)
    async def prometheus() -> Response:
        """Prometheus text format, from snapshots: a scrape never waits for the engine."""
        return Response(metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router
