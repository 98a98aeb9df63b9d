"""HFEngine: the part of the Hugging Face engine that runs in the API process and imports no torch."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tonnage.cache.admission import AdmissionRequest, Policy, refusal
from tonnage.cache.results import EVICTION_CAUSES
from tonnage.planner.errors import DoesNotFit, ModelNotFound, TonnageError
from tonnage.planner.plans import Plan
from tonnage.planner.source.resolve import resolve_model
from tonnage.server.engines import watchdog
from tonnage.server.engines.base import Capabilities, Engine
from tonnage.server.engines.capacity import Capacity, limits_of
from tonnage.server.engines.chunk import Chunk
from tonnage.server.engines.errors import EngineDead, QueueFull
from tonnage.server.engines.hf.headroom import SMALLER, available_memory, gib, require_available, require_fits
from tonnage.server.engines.hf.messages import Abort, Load, Ready, StepOutput, Stop
from tonnage.server.engines.hf.model.formats import require_loadable
from tonnage.server.engines.hf.model.support import require_fixed_rotary, require_supported
from tonnage.server.engines.in_flight import RequestsInFlight
from tonnage.server.engines.process_memory import PeakSampler
from tonnage.server.engines.rejections import Rejections
from tonnage.server.engines.request import ALL_PARAMS, GenerationRequest
from tonnage.server.engines.sharing import Sharing
from tonnage.server.engines.signals import interrupt_held
from tonnage.server.engines.stats import EngineStats, MeasuredMemory, PoolStats

log = logging.getLogger("tonnage.server")

# Environment of the engine process; a value set by the user has priority.
# GOMP_SPINCOUNT (libgomp) is how many turns an idle OpenMP thread spins before it sleeps. Threads that spin
# without limit take cores from the threads that they wait for. With another process on one of two cores, a
# decode step took 1.8 s (demo model, one sequence). Threads that sleep at once are woken about 200 times a
# step, at 20 us each. 4,000 turns are some tens of microseconds: longer than the gap between two layers, and an
# acceptable loss at a barrier. 16 streams of the demo model on two cores, tokens per second in two runs: 1,000
# turns 495 and 499; 4,000 turns 616 and 541; 20,000 turns 593 and 561.
# The MALLOC variables (mallopt(3)) limit the memory that glibc keeps after it was freed. By default glibc has
# up to 8 arenas per core, and each keeps freed memory. One arena is enough, because one thread allocates.
# Blocks over 1 MiB return to the kernel when they are freed.
ENVIRONMENT = {
    "GOMP_SPINCOUNT": "4000",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
    "TOKENIZERS_PARALLELISM": "false",
}


def capabilities() -> Capabilities:
    """Return the optional features of the HF engine in this installation; grammars need llguidance."""
    return Capabilities(ALL_PARAMS if find_spec("llguidance") else ALL_PARAMS - {"grammar"})


def default_threads() -> int:
    """Return the default number of compute threads of the HF engine.

    It is the first number in OMP_NUM_THREADS if that is set, else the number of cores available to the process.
    """
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else len(os.sched_getaffinity(0))


def _config(path: str) -> dict[str, Any]:
    """Return the model's config.json, or its equivalent made from the header of a GGUF file.

    Raises:
        ModelNotFound: the folder has no config.json.
    """
    if path.endswith(".gguf"):
        return resolve_model(path).config
    config = Path(path) / "config.json"
    if not config.is_file():
        raise ModelNotFound(f"no config.json in {path!r}: the hf backend needs a model folder", field="model")
    found: dict[str, Any] = json.loads(config.read_text())
    return found


class HFEngine(Engine):
    """An engine that runs a transformers model in a child process.

    Args:
        plan: memory plan of the model to load.
        policy: admission policy; None means the default.
        threads: number of compute threads; None means ``default_threads``.
        sharing: prefix cache settings; None means the default.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        policy: Policy | None = None,
        threads: int | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        self._plan = plan
        self._policy = policy or Policy()
        self._sharing = sharing or Sharing()
        self._threads = threads or default_threads()
        self._limits = limits_of(plan)
        self._capabilities = capabilities()
        self._live: dict[str, asyncio.Queue[Chunk | TonnageError]] = {}
        # Number of unfinished sequences by request id. The count does not depend on how fast clients read
        # chunks.
        self._unfinished: dict[str, int] = {}
        self._messages = 0  # number of messages received from the engine process
        self._watch: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._sampler = PeakSampler()
        self._ready: Ready | None = None
        self._measured = MeasuredMemory()
        self._rejections = Rejections()
        self._dead: TonnageError | None = None
        self._in_flight = RequestsInFlight()
        usable = plan.kv_cache.usable_blocks
        empty = PoolStats(
            plan.kv_cache.num_blocks, usable, 0, 0, usable, 0, evictions_by_cause=(0,) * len(EVICTION_CAUSES)
        )
        self._stats = EngineStats(False, 0, 0, empty)

    @property
    def plan(self) -> Plan:
        """The memory plan that the engine runs with."""
        return self._plan

    @property
    def capabilities(self) -> Capabilities:
        """The optional features that this engine supports."""
        return self._capabilities

    @property
    def pid(self) -> int | None:
        """Process id of the engine process; None before the start."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the engine process and wait until the model is loaded; see ``Engine.start``."""
        config = _config(self._plan.model.path)
        require_supported(config["model_type"])
        require_fixed_rotary(config, self._limits.max_model_len)
        require_loadable(self._plan, config)
        if self._plan.deployment.device == "cpu":
            require_available(self._plan, available_memory())
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "tonnage.server.engines.hf"]
            with interrupt_held():
                self._process = subprocess.Popen(  # noqa: ASYNC220 -- a spawn takes a millisecond
                    [*command, str(theirs.fileno()), str(self._threads)],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**ENVIRONMENT, **os.environ},
                )
        self._sampler.start()
        self._connection = Connection(ours.detach())
        loop = asyncio.get_running_loop()
        started: asyncio.Future[Ready] = loop.create_future()
        threading.Thread(target=self._read, args=(loop, started), name="hf-reader", daemon=True).start()
        threading.Thread(target=self._write, name="hf-writer", daemon=True).start()
        self._outbox.put(Load(self._plan, self._policy, self._sharing))
        self._watch = asyncio.create_task(self._watch_progress(self._process, started), name="hf watch")
        try:
            self._ready = await started
        except BaseException:
            await self.stop()
            raise
        ready = self._ready
        self._measured = MeasuredMemory(
            weights=ready.weights_bytes,
            warm_weights=ready.warm_weights_bytes,
            kv_pool=ready.kv_pool_bytes,
            framework=ready.framework_bytes(self._sampler.sample()),
            kv_tier=ready.kv_tier_bytes or None,
        )
        self._stats = ready.stats
        try:
            require_fits(self._plan, self.capacity().plan)
        except DoesNotFit:
            await self.stop()
            raise

    def _write(self) -> None:
        assert self._connection is not None
        while (message := self._outbox.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:  # The reader thread sees that the connection is closed and reports it.
                return

    def _read(self, loop: asyncio.AbstractEventLoop, started: asyncio.Future[Ready]) -> None:
        assert self._connection is not None
        try:
            while True:
                message = self._connection.recv()
                self._messages += 1
                loop.call_soon_threadsafe(self._receive, message, started)
        except (EOFError, OSError, RuntimeError):  # RuntimeError: the event loop is closed.
            pass
        dead = EngineDead("the engine process ended", hint="see its output; restart the server")
        if not started.done() and self._killed():
            dead = EngineDead(
                "the engine process was killed during the load, probably because memory ran out: the plan "
                f"needs {gib(self._plan.rank.used_bytes)}, and {gib(available_memory())} are available now",
                hint=SMALLER,
            )
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._die, dead, started)

    async def _watch_progress(self, process: subprocess.Popen[bytes], started: asyncio.Future[Ready]) -> None:
        """Kill an engine process that has work but makes no progress, and fail its requests.

        Args:
            process: the engine process.
            started: future that is done when the load has ended.
        """
        seconds = await watchdog.wait_until_hung(
            watchdog.Watchdog(process.pid), lambda: self._messages, self._check_limit
        )
        doing = "during the load" if self._ready is None else "with requests in flight"
        error = EngineDead(
            f"the engine process used no processor time for {seconds:g} s {doing}; it was stopped or hung, and "
            "was killed",
            hint="see its output and the kernel's log",
        )
        log.error("%s", error)
        self._die(error, started)
        process.kill()

    def _check_limit(self) -> int | None:
        """Return how many consecutive checks may find no progress before the engine process is killed.

        Returns None if the engine has no work.
        """
        if self._ready is None:
            return watchdog.HANG_CHECKS_LOADING
        return watchdog.HANG_CHECKS if self._unfinished and self._dead is None else None

    def _killed(self) -> bool:
        try:
            return self._process is not None and self._process.wait(1.0) == -signal.SIGKILL
        except subprocess.TimeoutExpired:
            return False

    def _receive(self, message: Ready | TonnageError | StepOutput, started: asyncio.Future[Ready]) -> None:
        if isinstance(message, StepOutput):
            self._stats = message.stats
            for chunk in message.chunks:
                if chunk.finish_reason is not None:
                    self._ended(chunk.request_id)
                if chunk.request_id in self._live:
                    self._live[chunk.request_id].put_nowait(chunk)
        elif isinstance(message, TonnageError) and self._ready is not None:
            self._die(message, started)
        elif started.done():  # The start was cancelled during the load.
            return
        elif isinstance(message, Ready):
            started.set_result(message)
        else:
            started.set_exception(message)

    def _die(self, error: TonnageError, started: asyncio.Future[Ready]) -> None:
        self._dead = error = self._dead or error  # Keep the first error, because it is the cause of later ones.
        self._stats = dataclasses.replace(self._stats, ready=False, running=0, waiting=0)
        if not started.done():
            started.set_exception(error)
        for waiting in self._live.values():
            waiting.put_nowait(error)

    def _ended(self, request_id: str) -> None:
        """Record that one more of the request's n sequences has finished."""
        unfinished = self._unfinished.pop(request_id, 0)
        if unfinished > 1:
            self._unfinished[request_id] = unfinished - 1

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Send a request to the engine process and yield its chunks; see ``Engine.generate``."""
        self._refuse(request)
        inbox: asyncio.Queue[Chunk | TonnageError] = asyncio.Queue()
        self._live[request.request_id] = inbox
        self._unfinished[request.request_id] = request.n
        self._outbox.put(request)
        remaining = request.n
        with self._in_flight.request():
            try:
                while remaining:
                    chunk = await inbox.get()
                    if isinstance(chunk, TonnageError):
                        remaining = 0  # The engine has ended, so no request is left to abort.
                        raise chunk
                    remaining -= chunk.finish_reason is not None
                    yield chunk
            finally:
                del self._live[request.request_id]
                self._unfinished.pop(request.request_id, None)
                if remaining:
                    self._outbox.put(Abort(request.request_id))

    def _refuse(self, request: GenerationRequest) -> None:
        """Raise an error if the engine is dead or draining, or if the request can never fit into the pool."""
        if self._dead is not None:
            raise self._dead
        self._in_flight.check(self._ready is not None)
        wish = AdmissionRequest(len(request.prompt_token_ids), request.params.max_tokens, request.n)
        answer = refusal(wish, self._limits)
        if answer is not None:
            self._rejections.reject(answer)

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """Tell the engine process to abort a request, or only sequence ``index`` of the request."""
        self._outbox.put(Abort(request_id, index))

    def stats(self) -> EngineStats:
        """Return the last statistics received, plus measured memory and the number of rejected requests."""
        memory = dataclasses.replace(
            self._measured, process=self._sampler.current, process_peak=self._sampler.peak
        )
        return self._rejections.added_to(dataclasses.replace(self._stats, memory=memory))

    def capacity(self) -> Capacity:
        """Return the capacity measured after the load; raise QueueFull before the load is complete."""
        ready, framework = self._ready, self._measured.framework
        if ready is None or framework is None:
            raise QueueFull("the engine is not ready", hint="wait until /ready returns 200")
        rank = dataclasses.replace(
            self._plan.rank,
            weights_bytes=ready.weights_bytes,
            kv_pool_bytes=ready.kv_pool_bytes,
            activation_bytes=ready.activation_bytes,
            framework_bytes=framework,
            kv_tier_bytes=ready.kv_tier_bytes,
        )
        return Capacity(
            num_blocks=ready.num_blocks,
            block_size=self._plan.kv_cache.layout.block_size,
            max_model_len=self._limits.max_model_len,
            plan=dataclasses.replace(self._plan, revision=1, ranks=(rank,)),
        )

    async def drain(self, seconds: float) -> None:
        """Stop admitting requests, and wait at most ``seconds`` for the running requests."""
        await self._in_flight.drain(seconds)

    async def stop(self) -> None:
        """Stop the engine process; kill it if it does not end within 5 seconds or is still loading."""
        self._in_flight.draining = True
        self._sampler.stop()
        if self._watch is not None:
            self._watch.cancel()
        if self._process is None:
            return
        self._outbox.put(Stop())
        self._outbox.put(None)
        loop = asyncio.get_running_loop()
        patience = 5.0 if self._ready is not None else 0.0  # During the load the process reads no messages.
        try:
            await loop.run_in_executor(None, self._process.wait, patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await loop.run_in_executor(None, self._process.wait)
        if self._connection is not None:
            self._connection.close()
