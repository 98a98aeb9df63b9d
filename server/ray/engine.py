"""An engine that sends requests to Ray Serve replicas, so that one API serves many replicas like one engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from tonnage.cache.admission import AdmissionRequest, refusal
from tonnage.planner.errors import TonnageError
from tonnage.planner.plans import Plan
from tonnage.server.engines.base import Capabilities, Engine, common
from tonnage.server.engines.capacity import Capacity, limits_of
from tonnage.server.engines.chunk import Chunk
from tonnage.server.engines.errors import EngineDead, NeverFits, QueueFull
from tonnage.server.engines.in_flight import RequestsInFlight
from tonnage.server.engines.request import GenerationRequest
from tonnage.server.engines.stats import EngineStats, PoolStats, total
from tonnage.server.ray.replica import ReplicaReport

# Interval in seconds at which the replicas are asked for reports. Prometheus needs no shorter one. Each
# broadcast is a control-plane operation of Ray, too costly to make per request.
_REPORT_SECONDS = 1.0


class RayEngine(Engine):
    """An engine that consists of all replicas behind a Ray handle to the `EngineReplica` deployment.

    All replicas have the same plan. When a replica dies, its requests end with EngineDead. The other replicas
    continue, and Ray replaces the dead one.
    """

    def __init__(self, plan: Plan, handle: DeploymentHandle) -> None:
        self._plan = plan
        self._handle = handle
        self._limits = limits_of(plan)
        self.reports: tuple[ReplicaReport, ...] = ()  # each replica's latest report, at most one second old
        self._reporter: asyncio.Task[None] | None = None
        self._in_flight = RequestsInFlight()
        usable = plan.kv_cache.usable_blocks
        self._stats = EngineStats(False, 0, 0, PoolStats(plan.kv_cache.num_blocks, usable, 0, 0, usable, 0))

    @property
    def plan(self) -> Plan:
        """Return the memory plan, which is the same for every replica."""
        return self._plan

    @property
    def capabilities(self) -> Capabilities:
        """Return the capabilities that all replicas have in common."""
        return common(report.capabilities for report in self.reports)

    async def start(self) -> None:
        """Wait until the first replica is ready; Ray restarts replicas that fail to start."""
        while not self.reports:
            await self._ask()
            await asyncio.sleep(0.1)
        self._reporter = asyncio.create_task(self._report(), name="replica reports")

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            await self._ask()

    async def _ask(self) -> None:
        try:
            answers = await self._handle.broadcast("report").results_async(
                timeout_s=5 * _REPORT_SECONDS, return_exceptions=True
            )
        except (RayError, RayServeException, TimeoutError):  # no replica is alive yet
            answers = []
        self.reports = tuple(answer for answer in answers if isinstance(answer, ReplicaReport))
        if self.reports:
            self._stats = total([report.stats for report in self.reports])
        else:
            self._stats = replace(self._stats, ready=False, running=0, waiting=0)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Yield the output chunks of one request from the replica that Ray selects.

        Raises:
            NeverFits: no replica's KV pool can ever hold the request.
            QueueFull: no replica is ready, or the server drains.
            EngineDead: the replica died.
        """
        self._refuse(request)
        answers = self._handle.options(stream=True).generate.remote(request)
        remaining = request.n
        with self._in_flight.request():
            try:
                async for answer in answers:
                    if isinstance(answer, TonnageError):
                        raise answer
                    remaining -= answer.finish_reason is not None
                    yield answer
                if remaining:
                    raise EngineDead("the replica ended before the answer did", hint="send the request again")
            except (RayError, RayServeException) as error:
                raise EngineDead(
                    f"the replica died ({type(error).__name__})", hint="send the request again"
                ) from None
            finally:
                if remaining:
                    with contextlib.suppress(RayError):
                        answers.cancel()

    def _refuse(self, request: GenerationRequest) -> None:
        """Raise an error for a request that cannot be sent to a replica.

        This is the case when no replica is ready, when the server is draining, or when no replica's pool can
        ever hold the request.
        """
        if not self._stats.ready:
            raise QueueFull("no replica is ready")
        self._in_flight.check(ready=True)
        wish = AdmissionRequest(len(request.prompt_token_ids), request.params.max_tokens, request.n)
        if (answer := refusal(wish, self._limits)) is not None:
            raise NeverFits(str(answer), field="prompt")

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """Do nothing: closing a request's iterator already ends the request on its replica."""

    def stats(self) -> EngineStats:
        """Return the sum of all replicas' statistics, from their latest reports."""
        return self._stats

    def capacity(self) -> Capacity:
        """Return the capacity of all replicas: the sum of their KV blocks, and the shortest max_model_len."""
        if not self.reports:
            raise QueueFull("no replica is ready")
        return Capacity(
            num_blocks=self._stats.pool.num_blocks,
            block_size=self._plan.kv_cache.layout.block_size,
            max_model_len=min(report.max_model_len for report in self.reports),
            plan=replace(self._plan, revision=1),
        )

    async def drain(self, seconds: float) -> None:
        """Accept no more requests, and wait at most `seconds` until all accepted requests have ended."""
        await self._in_flight.drain(seconds)

    async def stop(self) -> None:
        """Stop requesting reports from the replicas; Ray itself stops the replicas."""
        self._in_flight.draining = True
        if self._reporter is not None:
            self._reporter.cancel()
