"""The FastAPI application, built from settings, engine and tokenizer without global state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.middleware.cors import CORSMiddleware

from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.model.architecture import CLASSIFIERS
from tonnage.server import errors
from tonnage.server.api.docs import docs_router
from tonnage.server.api.generation import Generator
from tonnage.server.api.messages.count import count_router
from tonnage.server.api.messages.headers import AnthropicForm
from tonnage.server.api.models import models_router
from tonnage.server.api.operations import operations_router
from tonnage.server.api.plan_page import plan_page_router
from tonnage.server.api.router import engine_router
from tonnage.server.api.tokenize import tokenize_router
from tonnage.server.engines.base import Engine
from tonnage.server.engines.lora import lora_modules
from tonnage.server.engines.vllm.output_parser import load_output_parser
from tonnage.server.http.pacing import RequestPacing
from tonnage.server.http.paths import LenientPaths
from tonnage.server.observe.failed_requests import FailedRequestLog
from tonnage.server.observe.logs import log_access
from tonnage.server.observe.metrics import Metrics
from tonnage.server.observe.request_log import RequestLog
from tonnage.server.observe.tracing import TraceContext, Tracing
from tonnage.server.security.hosts import HostCheck, allowed_hosts
from tonnage.server.security.keys import KeyRing, load_keys
from tonnage.server.security.middleware import ASSETS, PUBLIC_PATHS, Authentication, RequestId
from tonnage.server.settings import Settings
from tonnage.server.state import ServerState
from tonnage.server.text.chat_template import SHIPPED, ChatTemplate
from tonnage.server.text.classifier import ClassifierConfig, read_classifier
from tonnage.server.text.gguf_tokenizer import model_files
from tonnage.server.text.tokenizer import Tokenizer
from tonnage.server.text.tool_calls import OutputParser

log = logging.getLogger("tonnage.server")


def create_app(
    settings: Settings,
    engine: Engine,
    tokenizer: Tokenizer | None = None,
    *,
    operations_only: bool = False,
    on_startup_error: Callable[[TonnageError], None] | None = None,
) -> FastAPI:
    """Build the app that serves ``engine``; its lifespan starts and stops the engine.

    The engine loads in the background: /health answers at once, /ready after the load. When the load fails,
    ``app.state.tonnage.startup_error`` holds the reason, and the caller has to stop the server. One process may
    hold several apps.

    Args:
        settings: The server's settings.
        engine: The engine, not yet started.
        tokenizer: The model's tokenizer; None loads it from the folder of the plan's model.
        operations_only: Whether to leave out every endpoint that generates or tokenizes. A Ray replica uses
            this: its requests come through Ray from the API process, which has already limited and counted
            them.
        on_startup_error: Called with the error when the engine fails to start.

    Raises:
        CheckpointError: The model folder has no tokenizer.json.
        DeploymentError: Only one of the two tool-call flags is set.
    """
    files = model_files(engine.plan.model.path)
    is_classifier = engine.plan.model.architecture.endswith(CLASSIFIERS)
    state = ServerState(
        settings=settings,
        engine=engine,
        tokenizer=tokenizer or Tokenizer.from_folder(files),
        chat_template=_chat_template(settings, files),
        classifier=read_classifier(files) if is_classifier else ClassifierConfig(),
        loras=lora_modules(settings.lora_modules, settings.model_name, engine.plan.deployment.max_lora_rank),
        load_output_parser=None if operations_only else _output_parser(settings, files),
        on_startup_error=on_startup_error,
    )

    tracing = Tracing(state, settings.otlp_traces_endpoint) if settings.otlp_traces_endpoint else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.start()
        try:
            yield
        finally:
            await state.stop()
            if tracing is not None:
                await asyncio.to_thread(tracing.shutdown)

    app = FastAPI(
        title="Tonnage",
        version=version("tonnage"),
        description="OpenAI-compatible server whose memory is planned, admitted by and measured.",
        lifespan=lifespan,
        responses=errors.RESPONSES,
        # FastAPI would redirect some unknown paths; a redirect has no error object in OpenAI's format.
        redirect_slashes=False,
        # FastAPI's own documentation pages load scripts from another host; ``docs_router`` serves local files
        # instead.
        docs_url=None,
        redoc_url=None,
        # FastAPI would serialize the OpenAPI document for every request; ``docs_router`` does it once.
        openapi_url=None,
    )
    app.state.tonnage = state
    keys = load_keys(settings.api_key, settings.api_key_file)
    state.quotas.tenants = len(keys)
    if outside := [token for token in state.tokenizer.eos_token_ids if token >= state.plan.model.vocab_size]:
        log.warning(
            "eos_token_id %s of %s is outside the vocabulary of %d tokens: no generation ends with it",
            outside, files.name, state.plan.model.vocab_size,
        )  # fmt: skip
    refusals = FailedRequestLog()
    errors.install(app, refusals.refused)
    generator = Generator(state)
    if not operations_only:
        app.include_router(engine_router(state, generator))
        app.include_router(count_router(state, generator))
        app.include_router(models_router(state))
        app.include_router(tokenize_router(state, generator))
    app.include_router(operations_router(state, Metrics(state), generator))
    app.include_router(docs_router(f"{settings.model_name}: API", app))
    app.include_router(plan_page_router())
    if settings.request_log is not None and not operations_only:
        request_log = RequestLog(settings.request_log, state.plan.kv_cache.layout.block_size)
        state.accounts.on_finish.append(request_log.write)
    # The access log has a line for every request. If it is off, failed requests are logged by ``refusals``.
    state.accounts.on_finish.append(log_access if settings.access_log else refusals.finished)
    _add_middleware(app, settings, keys, refusals, operations_only=operations_only)
    return app


def _chat_template(settings: Settings, folder: Path) -> ChatTemplate | None:
    """Return the model's chat template, or None if it has none; warn if the template does not render tools."""
    # The demo model's own chat template ignores tools, so requests with tools use the shipped hermes template.
    tool_template = "hermes" if settings.model == "demo" else None
    found = ChatTemplate.from_folder(folder, settings.chat_template, tool_template=tool_template)
    if settings.tool_call_parser is not None and (found is None or not found.knows_tools):
        name = settings.tool_call_parser
        log.warning(
            "requests with tools will get status 400, because the chat template does not show tools: start "
            "with --chat-template %s or a template of your own",
            name if name in SHIPPED else f"NAME ({', '.join(SHIPPED)})",
        )
    return found


def _output_parser(settings: Settings, folder: Path) -> Callable[[], OutputParser] | None:
    """Return a function that loads the parsers of tool calls and reasoning, or None if none is configured.

    Raises:
        DeploymentError: Only one of --enable-auto-tool-choice and --tool-call-parser is set.
    """
    name = settings.tool_call_parser
    if settings.enable_auto_tool_choice != (name is not None):
        raise DeploymentError(
            "--enable-auto-tool-choice and --tool-call-parser NAME belong together: set both or neither",
            field="tool_call_parser" if name is None else "enable_auto_tool_choice",
        )
    reasoning = settings.reasoning_parser
    return None if name is None and reasoning is None else partial(load_output_parser, name, reasoning, folder)


def _add_middleware(
    app: FastAPI, settings: Settings, keys: KeyRing, refusals: FailedRequestLog, *, operations_only: bool
) -> None:
    """Add the ASGI middleware, innermost first.

    The middleware that adds X-Request-Id and the CORS headers wraps authentication, so that a rejection for a
    missing or wrong API key has these headers, too.
    """
    if keys:
        public = PUBLIC_PATHS | ({"/metrics"} if settings.metrics_public else set())
        app.add_middleware(
            Authentication, keys=keys, public_paths=frozenset(public), on_refused=refusals.refused
        )
        app.openapi = lambda: secured_openapi(app, public)  # type: ignore[method-assign]
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    # The HTTP server of a Ray replica listens on the node's address and ignores --host.
    host = "" if operations_only else settings.host
    hosts = allowed_hosts(host, settings.allowed_hosts, keys=bool(keys))
    if hosts is not None:
        app.add_middleware(HostCheck, hosts=hosts)
    app.add_middleware(AnthropicForm)
    app.add_middleware(LenientPaths, kept=(*ASSETS, "/redoc/"))
    app.add_middleware(RequestId)
    app.add_middleware(RequestPacing)
    if settings.otlp_traces_endpoint:
        app.add_middleware(TraceContext)


def secured_openapi(app: FastAPI, public: Collection[str]) -> dict[str, Any]:
    """Return the app's OpenAPI document, which declares that all paths except ``public`` need an API key."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        document.setdefault("components", {})["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer", "description": "an API key of this server"}
        }
        for path, operations in document["paths"].items():
            if path not in public:
                for operation in operations.values():
                    operation["security"] = [{"key": []}]
        app.openapi_schema = document
    return app.openapi_schema
