"""POST /v1/messages/count_tokens: the number of tokens that a request's prompt would have."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from tonnage.server.api.body import inline_schema, parse_steps
from tonnage.server.api.chat.service import ChatService
from tonnage.server.api.generation import Generator
from tonnage.server.api.json_body import most_values, read_body
from tonnage.server.api.messages.conversion import blocks_of, chat_request
from tonnage.server.api.messages.protocol import COUNT_FIELDS, InputTokens
from tonnage.server.errors import ANTHROPIC_RESPONSES
from tonnage.server.state import ServerState


def count_router(state: ServerState, generator: Generator) -> APIRouter:
    """Return the route that counts the tokens of a prompt without generating an answer."""
    router = APIRouter()
    chat = ChatService(state, generator)
    schema = inline_schema(COUNT_FIELDS)
    body = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}

    @router.post(
        "/v1/messages/count_tokens",
        openapi_extra=body,
        response_model=InputTokens,
        responses=ANTHROPIC_RESPONSES,
    )
    async def count_tokens(request: Request) -> Response:
        """Return the number of tokens that the prompt of a request to /v1/messages has."""
        settings = state.settings
        raw = await read_body(request, settings.max_request_body_bytes, settings.body_timeout, state.bodies)
        most = most_values(state.max_model_len)
        steps = parse_steps(raw, COUNT_FIELDS, state.honours, lenient=settings.lenient, most=most)
        document, ignored = await state.bodies.in_turn(len(raw), steps)
        state.check_model(document.model)
        prompt, _ = await chat.prompt(await generator.converted(blocks_of(document), chat_request, document))
        headers = {"x-ignored-fields": ", ".join(ignored)} if ignored else {}
        return JSONResponse({"input_tokens": len(prompt)}, headers=headers)

    return router
