"""GET /v1/models and /v1/models/{id}: the model and its LoRA adapters."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from tonnage.server.state import ServerState


class ModelCard(BaseModel):
    """OpenAI's description of a served model, with ``max_model_len`` as in vLLM's API."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tonnage"
    max_model_len: int
    parent: str | None = None  # the name of the base model, for a LoRA adapter


class ModelList(BaseModel):
    """OpenAI's list of model objects."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def models_router(state: ServerState) -> APIRouter:
    """Return the routes that list the server's model and adapters."""
    router = APIRouter()

    def card(name: str) -> ModelCard:
        parent = None if name == state.model_name else state.model_name
        return ModelCard(id=name, created=state.created, max_model_len=state.max_model_len, parent=parent)

    @router.get("/v1/models", response_model_exclude_none=True)
    async def list_models() -> ModelList:
        """List the model of this server and its LoRA adapters."""
        return ModelList(data=[card(name) for name in state.model_names])

    # model_id may span several path segments, because hub ids contain a slash
    @router.get("/v1/models/{model_id:path}", response_model_exclude_none=True)
    async def retrieve_model(model_id: str) -> ModelCard:
        """Return the model or the adapter named ``model_id``."""
        state.check_model(model_id)
        return card(model_id)

    return router
