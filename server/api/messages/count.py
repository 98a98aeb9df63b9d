"""POST /v1/messages/count_tokens: the number of tokens that a request's prompt would have."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from tonnage.server.api.body import openapi_body, read_fields
from tonnage.server.api.chat.service import ChatService
from tonnage.server.api.generation import Generator
from tonnage.server.api.messages.conversion import blocks_of, chat_request
from tonnage.server.api.messages.protocol import COUNT_FIELDS, InputTokens
from tonnage.server.errors import ANTHROPIC_RESPONSES
from tonnage.server.state import ServerState


def count_router(state: ServerState, generator: Generator) -> APIRouter:
    """Return the route that counts the tokens of a prompt without generating an answer."""
    router = APIRouter()
    chat = ChatService(state, generator)

    @router.post(
        "/v1/messages/count_tokens",
        openapi_extra=openapi_body(COUNT_FIELDS),
        response_model=InputTokens,
        responses=ANTHROPIC_RESPONSES,
    )
    async def count_tokens(request: Request) -> Response:
        """Return the number of tokens that the prompt of a request to /v1/messages has."""
        body, ignored, _ = await read_fields(request, state, COUNT_FIELDS)
        state.check_model(body.model)
        prompt, _ = await chat.prompt(await generator.converted(blocks_of(body), chat_request, body))
        headers = {"x-ignored-fields": ", ".join(ignored)} if ignored else {}
        return JSONResponse({"input_tokens": len(prompt)}, headers=headers)

    return router
