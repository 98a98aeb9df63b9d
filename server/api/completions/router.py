"""POST /v1/completions."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from tonnage.server.accounts import Ticket
from tonnage.server.api.body import inline_schema, parse_body, read_body
from tonnage.server.api.completions.protocol import FIELDS, Completion, CompletionRequest
from tonnage.server.api.completions.service import CompletionService
from tonnage.server.api.sse import EventStream, outcome_of
from tonnage.server.disconnect import ClientDisconnected, until_disconnect
from tonnage.server.errors import from_exception, render, stopping
from tonnage.server.state import ServerState

# nginx's status for a client that closed the connection; nobody reads it, the access log shows it.
CLIENT_CLOSED_REQUEST = 499


def completions_router(state: ServerState, service: CompletionService) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/completions",
        response_model=Completion,
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": inline_schema(CompletionRequest)}},
            }
        },
    )
    async def create_completion(request: Request) -> Response:
        """Complete a prompt, streamed with ``stream: true``."""
        ticket = state.accounts.receive()
        try:
            return await _answer(request, ticket)
        except ClientDisconnected:
            ticket.finish("aborted")
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except asyncio.CancelledError:  # the server stops and has waited long enough
            ticket.finish("error")
            return render(stopping())
        except Exception as exception:
            error = from_exception(exception)
            ticket.finish(outcome_of(error))
            return render(error)

    async def _answer(request: Request, ticket: Ticket) -> Response:
        body = parse_body(await read_body(request, state.settings.max_request_body_bytes), FIELDS)
        if body.stream:
            return EventStream(service.stream(body, ticket), ticket, chunk_json)
        completion = await until_disconnect(request.receive, service.complete(body, ticket))
        return Response(completion.model_dump_json(), media_type="application/json")

    return router


def chunk_json(chunk: Completion) -> str:
    """A chunk as OpenAI sends it: ``usage`` is absent where there is none."""
    return chunk.model_dump_json(exclude={"usage"} if chunk.usage is None else None)
