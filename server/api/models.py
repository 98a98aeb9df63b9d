"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from tonnage.server.errors import ApiError, ErrorCode
from tonnage.server.state import ServerState


class ModelCard(BaseModel):
    """OpenAI's model object, with the longest sequence as vLLM lists it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tonnage"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


def models_router(state: ServerState) -> APIRouter:
    router = APIRouter()

    def card() -> ModelCard:
        return ModelCard(id=state.model_name, created=state.created, max_model_len=state.max_model_len)

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        """The one model this server has."""
        return ModelList(data=[card()])

    @router.get("/v1/models/{model_id:path}")  # path: hub ids have a slash
    async def retrieve_model(model_id: str) -> ModelCard:
        """The model, when ``model_id`` is its name."""
        if model_id != state.model_name:
            raise ApiError(
                ErrorCode.MODEL_NOT_FOUND,
                f"the model {model_id[:100]!r} does not exist; this server has {state.model_name!r}",
                param="model",
            )
        return card()

    return router
