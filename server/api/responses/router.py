"""POST /v1/responses."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from tonnage.server.api.endpoint import Endpoint
from tonnage.server.api.responses.protocol import ResponseBody
from tonnage.server.api.responses.service import ResponseService
from tonnage.server.api.sse import STREAMED
from tonnage.server.state import ServerState


def responses_router(state: ServerState, service: ResponseService) -> APIRouter:
    router = APIRouter()
    endpoint = Endpoint("/v1/responses", state, service)

    @router.post(
        "/v1/responses",
        response_model=ResponseBody,
        responses=STREAMED,
        openapi_extra=endpoint.openapi_extra,
    )
    async def create_response(request: Request) -> Response:
        """Answer a conversation; streamed as typed events with ``stream: true``."""
        return await endpoint(request)

    return router
