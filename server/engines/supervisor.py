"""An engine that restarts when its process dies, while the API process and its connections continue.

Requests in flight end with EngineDead, raised by the dead engine. During a restart no request is admitted, and
/ready returns 503. Counters continue across restarts, because a Prometheus counter must not decrease.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable

from tonnage.planner.errors import TonnageError
from tonnage.planner.plans import Plan
from tonnage.server.engines.base import Capabilities, Engine
from tonnage.server.engines.capacity import Capacity
from tonnage.server.engines.chunk import Chunk
from tonnage.server.engines.errors import EngineDead
from tonnage.server.engines.heap import settle_heap
from tonnage.server.engines.request import GenerationRequest
from tonnage.server.engines.stats import COUNTERS, EngineStats, added, merged

log = logging.getLogger("tonnage.server")

_POLL_SECONDS = 0.1
_WINDOW_SECONDS = 3600.0
# Seconds to wait before the first, second, ... restart of a series; the last value repeats. A series ends when
# an engine has lived for a minute.
BACK_OFF = (0.1, 1.0, 2.0, 5.0, 10.0, 30.0)
_HEALTHY_SECONDS = 60.0
_STOP_SECONDS = 20.0  # upper bound, in seconds, for the shutdown of a dead engine


class SupervisedEngine(Engine):
    """An engine that delegates to engines created by ``make``, one after another.

    Args:
        make: function that creates an engine. If it raises an error during a restart, for example because the
            model's files are missing, the restart is tried again.
        max_restarts: number of restarts per hour above which the supervisor gives up.
        ready_timeout: seconds within which an engine must load. If the first engine takes longer, ``start``
            raises EngineDead; if a later engine takes longer, the restart is tried again.
        back_off: seconds to wait before the first, second, ... of consecutive restarts.
        on_give_up: function that is called once when the supervisor gives up.
    """

    def __init__(
        self,
        make: Callable[[], Engine],
        *,
        max_restarts: int = 10,
        ready_timeout: float = 1800.0,
        back_off: tuple[float, ...] = BACK_OFF,
        on_give_up: Callable[[TonnageError], None] | None = None,
    ) -> None:
        self._make = make
        self._engine = make()
        self._max_restarts = max_restarts
        self._ready_timeout = ready_timeout
        self._back_off = back_off
        self._on_give_up = on_give_up
        self._restarted: deque[float] = deque()  # times of the restarts within the last hour
        self._restarts = 0
        self._before: EngineStats | None = None  # sum of the counters of earlier engines
        self._watch: asyncio.Task[None] | None = None
        self._between = False
        self._since: float | None = None  # last change of ``ready``, in seconds since the epoch
        self._capacity: Capacity | None = None  # capacity of the last engine that loaded; all have equal plans
        self._stopping = False

    @property
    def plan(self) -> Plan:
        """The memory plan of the current engine."""
        return self._engine.plan

    @property
    def capabilities(self) -> Capabilities:
        """The optional features of the current engine."""
        return self._engine.capabilities

    def own_metrics(self) -> bytes:
        """Return the current engine's own Prometheus metrics."""
        return self._engine.own_metrics()

    @property
    def engine(self) -> Engine:
        """The engine that serves requests at present; it changes with each restart."""
        return self._engine

    async def start(self) -> None:
        """Load the first engine, then start the task that restarts it when it dies."""
        await self._load(self._engine)
        self._watch = asyncio.create_task(self._supervise(), name="engine supervisor")

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Submit a request to the current engine; raise EngineDead during a restart."""
        if self._between:
            raise EngineDead("the engine is restarting", hint="repeat the request later")
        return self._engine.generate(request)

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """Abort a request of the current engine."""
        await self._engine.abort(request_id, index)

    @property
    def ready(self) -> bool:
        """Whether the current engine is ready and no restart is under way."""
        return self._engine.ready and not self._between

    def stats(self) -> EngineStats:
        """Return the current engine's statistics with the counters of earlier engines added."""
        stats = self._engine.stats()
        if self._before is not None:
            stats = _sum(stats, self._before)
        return dataclasses.replace(
            stats, ready=stats.ready and not self._between, restarts=self._restarts, since=self._since
        )

    def capacity(self) -> Capacity:
        """Return the capacity of the current engine, or during a restart that of the previous engine."""
        if self._between:
            assert self._capacity is not None
            return self._capacity
        return self._engine.capacity()

    async def drain(self, seconds: float) -> None:
        """Let the current engine finish its running requests; it is not restarted after this call."""
        self._stopping = True
        await self._engine.drain(seconds)

    async def stop(self) -> None:
        """Stop the task that restarts engines, and the current engine."""
        self._stopping = True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._engine.stop()

    async def _supervise(self) -> None:
        attempt, since = 0, time.monotonic()
        while not self._stopping:
            await asyncio.sleep(_POLL_SECONDS)
            if self._engine.ready or self._stopping:
                continue
            if time.monotonic() - since > _HEALTHY_SECONDS:
                attempt = 0
            while not await self._restart(attempt):
                attempt += 1
            attempt, since = attempt + 1, time.monotonic()

    async def _restart(self, attempt: int) -> bool:
        """Wait, then replace the dead engine by a new one; return whether the new engine runs.

        ``attempt`` is the number of consecutive restarts before this one. After too many restarts within an
        hour the supervisor gives up; the call then waits until it is cancelled.
        """
        if not self._between:
            self._between, self._since = True, time.time()
        now = time.monotonic()
        while self._restarted and now - self._restarted[0] > _WINDOW_SECONDS:
            self._restarted.popleft()
        if len(self._restarted) >= self._max_restarts:
            await self._give_up()
        pause = self._back_off[min(attempt, len(self._back_off) - 1)]
        log.error("the engine process ended; restarting it in %g s", pause)
        # Ignore errors of the old engine's stop, because only the next engine counts.
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._engine.stop(), _STOP_SECONDS)
        await asyncio.sleep(pause)
        self._restarted.append(now)
        self._restarts += 1
        try:
            engine = self._make()
            # Set the sum of earlier engines' counters and the new engine in one statement. Otherwise a reader
            # could count the old engine's counters twice.
            self._before, self._engine = self.stats(), engine
            await self._load(engine)
        except Exception as error:
            log.error("the restart of the engine failed: %s: %s", type(error).__name__, error)
            return False
        self._between = False
        settle_heap()
        log.warning("the engine runs again (restart %d)", self._restarts)
        return True

    async def _load(self, engine: Engine) -> None:
        deadline = asyncio.timeout(self._ready_timeout)
        try:
            async with deadline:
                await engine.start()
            self._capacity, self._since = engine.capacity(), time.time()
        except TimeoutError as error:
            if not deadline.expired():  # the engine raised this TimeoutError, not ``deadline``
                raise
            with contextlib.suppress(Exception):
                await asyncio.wait_for(engine.stop(), _STOP_SECONDS)
            raise EngineDead(
                f"the engine did not load within {self._ready_timeout:g} s and was stopped",
                hint="raise --engine-ready-timeout if the model needs longer",
            ) from error

    async def _give_up(self) -> None:
        error = EngineDead(
            f"the engine died again after {len(self._restarted)} restarts within an hour",
            hint="see its output; --max-engine-restarts sets the limit",
        )
        log.error("%s", error)
        if self._on_give_up is not None:
            self._on_give_up(error)
        await asyncio.Event().wait()


def _sum(stats: EngineStats, before: EngineStats) -> EngineStats:
    """Return an engine's statistics with the counters of earlier engines, ``before``, added."""
    counters = {name: added((getattr(stats, name), getattr(before, name))) for name in COUNTERS}
    causes = itertools.zip_longest(stats.pool.evictions_by_cause, before.pool.evictions_by_cause, fillvalue=0)
    pool = dataclasses.replace(
        stats.pool,
        evictions=stats.pool.evictions + before.pool.evictions,
        evictions_by_cause=tuple(map(sum, causes)),
    )
    return dataclasses.replace(
        stats,
        pool=pool,
        admissions=merged((before.admissions, stats.admissions)),
        refused_blocks=merged((before.refused_blocks, stats.refused_blocks)),
        **counters,  # type: ignore[arg-type]
    )
