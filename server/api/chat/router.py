"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from tonnage.server.api.chat.protocol import ChatCompletion
from tonnage.server.api.chat.service import ChatService
from tonnage.server.api.endpoint import Endpoint
from tonnage.server.api.sse import STREAMED
from tonnage.server.state import ServerState


def chat_router(state: ServerState, service: ChatService) -> APIRouter:
    router = APIRouter()
    endpoint = Endpoint("/v1/chat/completions", state, service)

    @router.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses=STREAMED,
        openapi_extra=endpoint.openapi_extra,
    )
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation, streamed with ``stream: true``."""
        return await endpoint(request)

    return router
