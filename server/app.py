"""The application: settings, engine and tokenizer come in as arguments, nothing is global."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from tonnage.planner.errors import TonnageError
from tonnage.server import errors
from tonnage.server.api.chat.router import chat_router
from tonnage.server.api.chat.service import ChatService
from tonnage.server.api.completions.router import completions_router
from tonnage.server.api.completions.service import CompletionService
from tonnage.server.api.generation import Generator
from tonnage.server.api.models import models_router
from tonnage.server.api.operations import operations_router
from tonnage.server.api.tokenize import embeddings_router, tokenize_router
from tonnage.server.chat_template import ChatTemplate
from tonnage.server.engines.base import Engine
from tonnage.server.metrics import Metrics
from tonnage.server.settings import Settings
from tonnage.server.state import ServerState
from tonnage.server.text import Tokenizer


def create_app(
    settings: Settings,
    engine: Engine,
    tokenizer: Tokenizer | None = None,
    *,
    on_startup_error: Callable[[TonnageError], None] | None = None,
) -> FastAPI:
    """An app that serves ``engine``; its lifespan starts and stops it.

    ``tokenizer``: by default the one in the folder of the plan's model (raises CheckpointError without
    tokenizer.json). The engine loads in the background: /health answers at once, /ready when it is done. When
    that fails, ``app.state.tonnage.startup_error`` has the reason and ``on_startup_error`` is called with it;
    the caller ends the server. Several apps may live in one process.
    """
    state = ServerState(
        settings=settings,
        engine=engine,
        tokenizer=tokenizer or Tokenizer.from_folder(engine.plan.model.path),
        chat_template=ChatTemplate.from_folder(engine.plan.model.path),
        on_startup_error=on_startup_error,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.start()
        try:
            yield
        finally:
            await state.stop()

    app = FastAPI(
        title="Tonnage",
        version=version("tonnage"),
        description="OpenAI-compatible server whose memory is planned, admitted by and measured.",
        lifespan=lifespan,
        responses=errors.RESPONSES,
        redirect_slashes=False,  # a redirect would leave the error envelope
    )
    app.state.tonnage = state
    errors.install(app)
    generator = Generator(state)
    app.include_router(completions_router(state, CompletionService(state, generator)))
    app.include_router(chat_router(state, ChatService(state, generator)))
    app.include_router(models_router(state))
    app.include_router(tokenize_router(state, generator))
    app.include_router(embeddings_router(state))
    app.include_router(operations_router(state, Metrics(state), generator))
    return app
