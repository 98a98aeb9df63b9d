"""RayEngine: the Engine protocol over a Ray Serve handle, so that the API is the very same one."""

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
from tonnage.server.engines.request import GenerationRequest
from tonnage.server.engines.stats import EngineStats, PoolStats, total
from tonnage.server.ray.replica import ReplicaReport

# As often as Prometheus can usefully ask. Ray calls a broadcast a control-plane operation: not per request.
_REPORT_SECONDS = 1.0


class RayEngine(Engine):
    """All replicas behind ``handle`` (an `EngineReplica` deployment), each planned as ``plan``.

    A replica that dies ends its requests with EngineDead; the others go on, and Ray replaces it.
    """

    def __init__(self, plan: Plan, handle: DeploymentHandle) -> None:
        self._plan = plan
        self._handle = handle
        self._limits = limits_of(plan)
        self._reports: tuple[ReplicaReport, ...] = ()
        self._reporter: asyncio.Task[None] | None = None
        self._live = 0
        self._idle = asyncio.Event()
        self._draining = False
        usable = plan.kv_cache.usable_blocks
        self._stats = EngineStats(False, 0, 0, PoolStats(plan.kv_cache.num_blocks, usable, 0, 0, usable, 0))

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def capabilities(self) -> Capabilities:
        return common(report.capabilities for report in self._reports)

    @property
    def replicas(self) -> tuple[ReplicaReport, ...]:
        """The replicas that answered last, a second ago at most."""
        return self._reports

    async def start(self) -> None:
        """Returns when the first replica can serve; Ray itself retries the ones that cannot."""
        while not self._reports:
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
        except (RayError, RayServeException, TimeoutError):  # none alive right now
            answers = []
        self._reports = tuple(answer for answer in answers if isinstance(answer, ReplicaReport))
        if self._reports:
            self._stats = total([report.stats for report in self._reports])
        else:
            self._stats = replace(self._stats, ready=False, running=0, waiting=0)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        self._refuse(request)
        self._live += 1
        self._idle.clear()
        answers = self._handle.options(stream=True).generate.remote(request)
        remaining = request.n
        try:
            async for answer in answers:
                if isinstance(answer, TonnageError):
                    raise answer
                remaining -= answer.finish_reason is not None
                yield answer
            if remaining:
                raise EngineDead("the replica ended before the answer did")
        except (RayError, RayServeException) as error:
            raise EngineDead(
                f"the replica died ({type(error).__name__})", hint="send the request again"
            ) from None
        finally:
            if remaining:
                with contextlib.suppress(RayError):
                    answers.cancel()
            self._live -= 1
            if not self._live:
                self._idle.set()

    def _refuse(self, request: GenerationRequest) -> None:
        """Raise before anything is sent: nobody there, draining, or it can never fit in any replica."""
        if not self._stats.ready:
            raise QueueFull("no replica is ready")
        if self._draining:
            raise QueueFull("the server is draining")
        wish = AdmissionRequest(len(request.prompt_token_ids), request.params.max_tokens, request.n)
        answer = refusal(wish, self._limits)
        if answer is not None:
            raise NeverFits(str(answer), field="prompt")

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """A request ends by closing its iterator; nobody but its replica knows it."""

    def stats(self) -> EngineStats:
        return self._stats

    def capacity(self) -> Capacity:
        if not self._reports:
            raise QueueFull("no replica is ready")
        return Capacity(
            num_blocks=self._stats.pool.num_blocks,
            block_size=self._plan.kv_cache.layout.block_size,
            max_model_len=min(report.max_model_len for report in self._reports),
            plan=replace(self._plan, revision=1),
        )

    async def drain(self, seconds: float) -> None:
        self._draining = True
        if self._live:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)

    async def stop(self) -> None:
        self._draining = True
        if self._reporter is not None:
            self._reporter.cancel()
