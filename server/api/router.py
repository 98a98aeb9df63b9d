"""The routes of the endpoints that use the engine: path, logic (service) and response model of each.

``endpoint`` handles their HTTP: bodies, streams, errors and headers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from tonnage.server.api.body import openapi_body
from tonnage.server.api.chat.protocol import ChatCompletion
from tonnage.server.api.chat.service import ChatService
from tonnage.server.api.completions.protocol import Completion
from tonnage.server.api.completions.service import CompletionService
from tonnage.server.api.embeddings.protocol import EmbeddingList
from tonnage.server.api.embeddings.service import EmbeddingService
from tonnage.server.api.endpoint import Endpoint, Service, StreamingService
from tonnage.server.api.generation import Generator
from tonnage.server.api.messages.protocol import AnthropicAnswer
from tonnage.server.api.messages.service import MessagesService
from tonnage.server.api.pooling.protocol import ClassificationList, PooledList
from tonnage.server.api.pooling.service import ClassificationService, PoolingService
from tonnage.server.api.responses.protocol import ResponseBody
from tonnage.server.api.responses.service import ResponseService
from tonnage.server.api.scores.protocol import RerankList, ScoreList
from tonnage.server.api.scores.service import RerankService, ScoreService
from tonnage.server.api.sse import STREAMED
from tonnage.server.errors import ANTHROPIC_RESPONSES
from tonnage.server.state import ServerState


@dataclass(frozen=True, slots=True)
class Route:
    """One ``POST`` route; the OpenAPI document shows its ``name`` and ``description``."""

    path: str
    # typed Any, because each service has its own body type
    service: type[Service[Any]]
    answer: type[BaseModel]
    name: str
    description: str
    # entries of the OpenAPI document for the route's errors, if these errors do not have OpenAI's form
    errors: dict[int | str, dict[str, Any]] = field(default_factory=dict)


ROUTES = (
    Route(
        "/v1/completions",
        CompletionService,
        Completion,
        "create_completion",
        "Complete a prompt, streamed with ``stream: true``.",
    ),
    Route(
        "/v1/chat/completions",
        ChatService,
        ChatCompletion,
        "create_chat_completion",
        "Answer a conversation, streamed with ``stream: true``.",
    ),
    Route(
        "/v1/responses",
        ResponseService,
        ResponseBody,
        "create_response",
        "Answer a conversation; streamed as typed events with ``stream: true``.",
    ),
    Route(
        "/v1/messages",
        MessagesService,
        AnthropicAnswer,
        "create_message",
        "Answer a conversation in the form of Anthropic's API, streamed as typed events with ``stream: true``.",
        errors=ANTHROPIC_RESPONSES,
    ),
    Route(
        "/v1/embeddings",
        EmbeddingService,
        EmbeddingList,
        "create_embeddings",
        "Return an embedding of each input; a model that makes none rejects the request.",
    ),
    *(
        Route(
            path,
            ScoreService,
            ScoreList,
            "create_score",
            "Score pairs of texts with an embedding model (cosines) or a cross-encoder, as vLLM does.",
        )
        for path in ("/v1/score", "/score")
    ),
    *(
        Route(
            path,
            RerankService,
            RerankList,
            "create_rerank",
            "Sort documents by their scores with the query, which are those of /v1/score.",
        )
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    ),
    Route(
        "/classify",
        ClassificationService,
        ClassificationList,
        "create_classification",
        "Return the label of each input; a model that is no classifier of texts rejects the request.",
    ),
    Route(
        "/pooling",
        PoolingService,
        PooledList,
        "create_pooling",
        "Return what the model makes of each input: an embedding, or the values of labels.",
    ),
)


def engine_router(state: ServerState, generator: Generator) -> APIRouter:
    """Return a router of the endpoints that use the engine, for an app with this state and generator."""
    router = APIRouter()
    for route in ROUTES:
        endpoint = Endpoint(route.path, state, route.service(state, generator))
        router.add_api_route(
            route.path,
            endpoint.answer,
            methods=["POST"],
            name=route.name,
            description=route.description,
            response_model=route.answer,
            responses=(STREAMED if issubclass(route.service, StreamingService) else {}) | route.errors,
            openapi_extra=openapi_body(route.service.fields, state.model_names),
        )
    return router
