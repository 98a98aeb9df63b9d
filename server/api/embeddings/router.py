"""POST /v1/embeddings."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from tonnage.server.api.embeddings.protocol import EmbeddingList
from tonnage.server.api.embeddings.service import EmbeddingService
from tonnage.server.api.endpoint import Endpoint
from tonnage.server.state import ServerState


def embeddings_router(state: ServerState, service: EmbeddingService) -> APIRouter:
    router = APIRouter()
    endpoint = Endpoint("/v1/embeddings", state, service)

    @router.post(
        "/v1/embeddings",
        response_model=EmbeddingList,
        openapi_extra=endpoint.openapi_extra,
    )
    async def create_embeddings(request: Request) -> Response:
        """A vector for each input, by an embedding model; refused by name by one that generates text."""
        return await endpoint(request)

    return router
