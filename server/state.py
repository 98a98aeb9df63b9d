"""State of one app: settings, engine, tokenizer, counts, and whether the engine can serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from tonnage.planner.errors import TonnageError
from tonnage.planner.plans import Plan
from tonnage.server.engines.base import Engine
from tonnage.server.engines.lora import LoRAModule
from tonnage.server.engines.request import PoolingTask
from tonnage.server.engines.stats import EngineStats
from tonnage.server.errors import ApiError, ErrorCode, stopping
from tonnage.server.http.bodies import BodyBytes
from tonnage.server.http.outbox import Outboxes
from tonnage.server.requests.accounts import Accounts
from tonnage.server.security.tenants import Quotas
from tonnage.server.settings import Settings
from tonnage.server.text.chat_template import ChatTemplate
from tonnage.server.text.classifier import ClassifierConfig
from tonnage.server.text.tokenizer import Tokenizer
from tonnage.server.text.tool_calls import OutputParser

# Seconds that stop() waits for cancelled requests. They need a few rounds of the event loop to end, so one
# second is a generous upper bound.
_CUT_OFF_SECONDS = 1.0
# Interval in seconds of the log lines during a drain.
DRAIN_PROGRESS_SECONDS = 5.0

# pooling task (None: generation) -> what a model with this task does, and the endpoint for it
_TASKS: dict[PoolingTask | None, tuple[str, str]] = {
    None: ("generates text", "/v1/completions"),
    "embed": ("gives embeddings", "/v1/embeddings"),
    "classify": ("classifies texts", "/classify"),
    "token_classify": ("classifies tokens", "/pooling"),
}

log = logging.getLogger("tonnage.server")


@dataclass(slots=True)
class ServerState:
    """State of one FastAPI app of a server, kept in ``app.state.tonnage``.

    ``startup_error`` is the reason when the engine failed to start, else None.
    """

    settings: Settings
    engine: Engine
    tokenizer: Tokenizer
    accounts: Accounts = field(default_factory=Accounts)
    quotas: Quotas = field(default_factory=Quotas)
    outboxes: Outboxes = field(default_factory=Outboxes)
    chat_template: ChatTemplate | None = None
    classifier: ClassifierConfig = field(default_factory=ClassifierConfig)
    loras: tuple[LoRAModule, ...] = ()
    output_parser: OutputParser | None = None
    # function that loads the parser of tool calls and reasoning; a thread calls it before the engine starts
    load_output_parser: Callable[[], OutputParser] | None = None
    bodies: BodyBytes = field(init=False)
    draining_since: float | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    # seconds since the epoch, as is `draining_since`; None before the engine is ready
    ready_at: float | None = None
    startup_error: TonnageError | None = None
    on_startup_error: Callable[[TonnageError], None] | None = None
    _loading_since: float = field(default_factory=time.monotonic)
    _loading: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.bodies = BodyBytes(self.settings.max_request_body_bytes)

    @property
    def started(self) -> bool:
        """Whether the engine has loaded the model."""
        return self.ready_at is not None

    @property
    def draining(self) -> bool:
        """Whether the server is stopping, which means that it only finishes requests in flight."""
        return self.draining_since is not None

    def phase(self, stats: EngineStats) -> tuple[str, float]:
        """Return the server's phase and the time when it began, in seconds since the epoch.

        The phase is loading, ready, restarting, draining or failed.
        """
        if self.startup_error is not None:
            return "failed", self.created
        if self.draining_since is not None:
            return "draining", self.draining_since
        if self.ready_at is None:
            return "loading", self.created
        return "ready" if stats.ready else "restarting", stats.since or self.ready_at

    @property
    def plan(self) -> Plan:
        """The plan by which the engine's memory is allocated."""
        return self.engine.plan

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.settings.model_name

    @property
    def fingerprint(self) -> str:
        """OpenAI's ``system_fingerprint``: the plan's id, which changes with model, engine and versions."""
        return f"tonnage-{self.plan.plan_id}"

    @property
    def honours(self) -> frozenset[str]:
        """Names of the SamplingParams fields that the engine honours."""
        return self.engine.capabilities.honours

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the model and of its LoRA adapters in the API."""
        return (self.model_name, *(module.name for module in self.loras))

    def check_model(self, name: str) -> str:
        """Return the LoRA adapter that ``name`` selects, or an empty string for the model itself.

        Raises:
            ApiError: The server has no model or adapter of this name (model_not_found).
        """
        if name not in self.model_names:
            has = ", ".join(map(repr, self.model_names))
            raise ApiError(
                ErrorCode.MODEL_NOT_FOUND,
                f"the model {name[:100]!r} does not exist; this server has {has}",
                param="model",
            )
        return "" if name == self.model_name else name

    def check_task(self, *tasks: PoolingTask) -> None:
        """Raise ApiError when the model supports none of the pooling ``tasks`` (embed, classify ...).

        Without tasks, raise it when the model generates no text.
        """
        pools = self.engine.capabilities.pools
        if pools in tasks if tasks else pools is None:
            return
        does, path = _TASKS[pools]
        needed = " or ".join(_TASKS[task][0] for task in tasks or (None,))
        raise ApiError(
            ErrorCode.UNSUPPORTED_ENDPOINT,
            f"{self.model_name!r} {does}; use {path}, or serve a model that {needed}",
            param="model",
        )

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens: the loaded engine's limit, or the plan's before it has loaded."""
        if self.started:
            return self.engine.capacity().max_model_len
        return self.plan.deployment.max_model_len or self.plan.model.max_model_len

    def start(self) -> None:
        """Start the engine in the background, so that /health answers during the load."""
        self._loading_since = time.monotonic()
        log.info("tonnage %s: loading %s", version("tonnage"), self.model_name, extra=self._identity())
        self._loading = asyncio.create_task(self._start(), name="engine start")

    def _identity(self) -> dict[str, Any]:
        """Return the structured fields of the server's first log line: plan, model, engine and pool size."""
        plan = self.plan
        return {
            "plan_id": plan.plan_id, "engine": plan.deployment.engine, "architecture": plan.model.architecture,
            "pool_bytes": plan.rank.kv_pool_bytes, "max_model_len": plan.deployment.max_model_len,
        }  # fmt: skip

    async def _start(self) -> None:
        try:
            if self.load_output_parser is not None:
                self.output_parser = await asyncio.to_thread(self.load_output_parser)
            await self.engine.start()
        except TonnageError as error:
            self.startup_error = error
        except Exception as error:
            log.exception("the engine failed to start")
            self.startup_error = TonnageError(f"the engine failed to start: {type(error).__name__}: {error}")
        else:
            self.ready_at = time.time()
            seconds = round(time.monotonic() - self._loading_since, 1)
            log.info(
                "ready", extra={"model": self.model_name, "plan_id": self.plan.plan_id, "seconds": seconds}
            )
            return
        if self.on_startup_error is not None:
            self.on_startup_error(self.startup_error)

    async def stop(self) -> None:
        """Stop the engine, even while it still loads the model."""
        if self._loading is not None and not self._loading.done():
            self._loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loading
        # Requests cut off by the drain have been cancelled. Wait until each has its outcome, before the engine
        # stops.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.accounts.idle.wait(), _CUT_OFF_SECONDS)
        await self.engine.stop()

    async def drain(self, seconds: float) -> None:
        """Reject new requests, and wait at most ``seconds`` until the requests in flight have ended."""
        self.draining_since = time.time()
        if self.accounts.idle.is_set() and self.outboxes.idle.is_set():
            log.info("stopping: nothing is in flight")
            return
        log.info("draining: %d requests in flight", self.accounts.in_flight, extra={"most_seconds": seconds})
        until = time.monotonic() + seconds
        while not (self.accounts.idle.is_set() and self.outboxes.idle.is_set()):
            left = until - time.monotonic()
            if left <= 0:
                log.warning("the time to drain is over: %d requests are cut off", self.accounts.in_flight)
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, DRAIN_PROGRESS_SECONDS)):
                    await self.accounts.idle.wait()
                    # wait for clients that have not yet read their complete answers
                    await self.outboxes.idle.wait()
                continue
            log.info(
                "draining: %d requests in flight", self.accounts.in_flight,
                extra={"most_seconds": round(max(0.0, until - time.monotonic()), 1)},
            )  # fmt: skip
        log.info("drained")

    def check_ready(self) -> None:
        """Raise ApiError (503) with the reason when the engine cannot serve."""
        if self.startup_error is not None:
            raise ApiError(ErrorCode.ENGINE_DEAD, "the engine failed to start", retry_after_seconds=30)
        if self.draining:
            raise stopping()
        if not self.started:
            # Suggest a wait as long as the load has taken so far. This is an exponential back-off, which needs
            # no estimate of the load time.
            waited = time.monotonic() - self._loading_since
            raise ApiError(
                ErrorCode.MODEL_LOADING,
                f"the model is loading ({waited:.0f} s so far)",
                retry_after_seconds=min(30.0, max(1.0, waited)),
            )
        if not self.engine.ready:
            raise ApiError(ErrorCode.ENGINE_DEAD, "the engine is not running", retry_after_seconds=5)
