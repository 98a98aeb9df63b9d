"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from tonnage.server.api.completions.protocol import Completion
from tonnage.server.api.completions.service import CompletionService
from tonnage.server.api.endpoint import Endpoint
from tonnage.server.api.sse import STREAMED
from tonnage.server.state import ServerState


def completions_router(state: ServerState, service: CompletionService) -> APIRouter:
    router = APIRouter()
    endpoint = Endpoint("/v1/completions", state, service)

    @router.post(
        "/v1/completions",
        response_model=Completion,
        responses=STREAMED,
        openapi_extra=endpoint.openapi_extra,
    )
    async def create_completion(request: Request) -> Response:
        """Complete a prompt, streamed with ``stream: true``."""
        return await endpoint(request)

    return router
