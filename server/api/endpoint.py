"""The HTTP part that all endpoints with requests to the engine share.

It records exactly one outcome for each request, reads bodies, detects disconnects, applies the time limit, and
sends streams, errors and headers. A ``Service`` holds the logic of one endpoint.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from tonnage.server.api.body import Fields, read_fields
from tonnage.server.api.generation import Generator
from tonnage.server.api.sampling import EngineBody
from tonnage.server.api.sse import EventStream, outcome_of
from tonnage.server.errors import ApiError, envelope, from_exception, render, stopping
from tonnage.server.http.disconnect import CLIENT_CLOSED_REQUEST, ClientDisconnected, until_disconnect
from tonnage.server.requests.accounts import Ticket
from tonnage.server.security.tenants import ANONYMOUS
from tonnage.server.state import ServerState

Body = TypeVar("Body", bound=EngineBody)


class Service(ABC, Generic[Body]):
    """Base class of the logic of one endpoint, without HTTP code; methods raise ApiError or a TonnageError.

    ``fields`` describes the endpoint's request body: its pydantic model, and which fields the API honours.
    """

    fields: Fields[Body]

    def __init__(self, state: ServerState, generator: Generator) -> None:
        self._state = state
        self._generator = generator

    @abstractmethod
    async def complete(self, body: Body, ticket: Ticket) -> bytes:
        """Return the complete answer as JSON; cancelling the call aborts the request."""


class StreamingService(Service[Body]):
    """Base class of an endpoint's logic that can also stream its answer as server-sent events.

    ``last_event`` is the bytes of the event that ends every stream. Completions and chat completions use the
    defaults of ``last_event`` and ``error_event``.
    """

    last_event = b"data: [DONE]\n\n"

    @abstractmethod
    def stream(self, body: Body, ticket: Ticket) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events, each one complete; closing the iterator aborts the request."""

    def error_event(self, error: ApiError, ticket: Ticket) -> bytes:
        """Return the event that reports a failure after a stream has begun."""
        return b"data: " + json.dumps(envelope(error)).encode() + b"\n\n"


class Endpoint(Generic[Body]):
    """The handler of ``POST path``: it parses the body, and a service has the endpoint's logic."""

    def __init__(self, path: str, state: ServerState, service: Service[Body]) -> None:
        self._path = path
        self._state = state
        self._service = service

    async def answer(self, request: Request) -> Response:
        """Answer one request, and record exactly one outcome for it even when it fails."""
        tenant = request.scope.get("tonnage.tenant", ANONYMOUS)
        ticket = self._state.accounts.receive(self._path, request.scope["tonnage.request_id"], tenant)
        try:
            return await self._answer(request, ticket)
        except ClientDisconnected:
            ticket.finish("aborted")
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        # The server cancels handlers when it stops and the time limit for draining is over.
        except asyncio.CancelledError:
            error = stopping()
        except Exception as exception:
            error = from_exception(exception)
        ticket.fail(error, outcome_of(error))
        # Remove the traceback: it and this stack frame refer to each other, and would keep the request's body
        # in memory until the garbage collector runs (benchmarks/abuse.py arguments: 3 rejected bodies of 8 MB).
        return render(error.with_traceback(None))

    async def _answer(self, request: Request, ticket: Ticket) -> Response:
        state, service = self._state, self._service
        body, ignored, _ = await read_fields(request, state, service.fields)
        if body.request_id:
            ticket.request_id = body.request_id
            request.scope["tonnage.request_id"] = body.request_id
        headers = {"x-ignored-fields": ", ".join(ignored)} if ignored else {}
        timeout = state.settings.request_timeout
        if body.streams and isinstance(service, StreamingService):
            return EventStream(
                service.stream(body, ticket),
                ticket,
                outboxes=state.outboxes,
                headers=headers,
                keep_alive=state.settings.sse_keep_alive,
                timeout=timeout,
                on_error=lambda error: service.error_event(error, ticket),
                last=service.last_event,
            )
        try:
            async with asyncio.timeout(timeout):
                answer = await until_disconnect(request.receive, service.complete(body, ticket))
        except TimeoutError:
            raise ticket.timed_out(timeout) from None
        return Response(answer, media_type="application/json", headers=headers)
