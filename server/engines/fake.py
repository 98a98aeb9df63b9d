"""An engine without a model: it runs the real admission and block manager, and makes up its output tokens.

It tests everything around an engine, and shows how a client behaves within the capacity of a plan. It queues,
rejects, shares prefixes and frees blocks as an engine with that plan would, at a given token rate.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator

from tonnage.cache.admission import AdmissionRequest, Policy, refusal
from tonnage.cache.manager import KVCacheManager
from tonnage.cache.scheduler import Scheduler, Sequence, Step
from tonnage.cache.warm import compile_manager
from tonnage.planner.errors import TonnageError
from tonnage.planner.plans import Plan
from tonnage.server.engines.base import Engine
from tonnage.server.engines.capacity import Capacity
from tonnage.server.engines.chunk import Chunk, FinishReason
from tonnage.server.engines.errors import EngineDead, NeverFits
from tonnage.server.engines.in_flight import RequestsInFlight
from tonnage.server.engines.inbox import Inbox
from tonnage.server.engines.pool_stats import engine_stats, new_manager, sample_laws
from tonnage.server.engines.request import GenerationRequest
from tonnage.server.engines.stats import EngineStats, MeasuredMemory

log = logging.getLogger("tonnage.server")

# Number of chunks delivered to their streams in one iteration of the event loop. Each chunk wakes a task that
# writes to a socket (40 us). Delivering a whole batch at once would delay all other tasks by the sum of these
# times.
_CHUNKS_A_ROUND = 64

# A function that takes a request and the index of one of its sequences. It returns an iterator of the
# sequence's output tokens. When the iterator ends, the sequence ends as at a stop token.
Reply = Callable[[GenerationRequest, int], Iterator[int]]


def random_reply(vocab_size: int) -> Reply:
    """Return a function that gives each sequence an endless iterator of random output tokens.

    The tokens are reproducible for a prompt if the request has a seed or greedy sampling.
    """

    def reply(request: GenerationRequest, index: int) -> Iterator[int]:
        params = request.params
        if params.temperature == 0:
            draw = random.Random(f"{request.prompt_token_ids}")
        elif params.seed is not None:
            draw = random.Random(f"{request.prompt_token_ids} {params.seed} {index}")
        else:
            draw = random.Random()
        uniform = draw.random  # random() takes a third of the time of randrange()
        while True:
            yield int(uniform() * vocab_size)

    return reply


@dataclasses.dataclass(slots=True, eq=False)
class _Request:
    """A request in flight in the fake engine, with the inbox that receives its output chunks."""

    request: GenerationRequest
    inbox: Inbox[Chunk | TonnageError]
    sequences: list[_Sequence] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class _Sequence(Sequence):
    """A sequence of the fake engine; ``said`` has its output tokens so far, ``reply`` yields the next ones."""

    owner: _Request
    reply: Iterator[int]
    said: list[int] = dataclasses.field(default_factory=list)
    queued: float | None = None  # seconds from arrival to admission

    def token_ids(self) -> list[int]:
        """Return the token ids of the prompt and the output so far."""
        return [*self.owner.request.prompt_token_ids, *self.said]

    @property
    def salt(self) -> str:
        """The request's prefix cache salt; only requests with equal salts share blocks."""
        return self.owner.request.cache_salt


class FakeEngine(Engine):
    """An engine that schedules requests over the plan's block pool without computing a model.

    Args:
        plan: memory plan whose pool and limits apply.
        policy: admission policy; None means guaranteed mode.
        token_rate: tokens per second of each sequence; infinite means no delay.
        reply: function that returns the output tokens of a sequence; random tokens by default.
        load_seconds: duration of ``start``.
        start_error: error that ``start`` raises at its end; None for a start that succeeds.
        memory: measured memory to report in the statistics.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        policy: Policy | None = None,
        token_rate: float = math.inf,
        reply: Reply | None = None,
        load_seconds: float = 0.0,
        start_error: TonnageError | None = None,
        memory: MeasuredMemory | None = None,
    ) -> None:
        self._plan, self._policy = plan, policy or Policy()
        self._manager = new_manager(plan, self._policy)
        self.scheduler: Scheduler[_Sequence] = Scheduler(
            self._manager, budget=self._manager.limits.max_num_batched_tokens
        )
        self._step_seconds = 1 / token_rate
        self._reply = reply or random_reply(plan.model.vocab_size)
        self._load_seconds = load_seconds
        self._start_error = start_error
        self._memory = memory or MeasuredMemory()
        self._live: dict[str, _Request] = {}
        self._said: list[tuple[_Request, Chunk]] = []  # chunks of the current step that are not delivered yet
        self._wake = asyncio.Event()
        self._in_flight = RequestsInFlight()
        self._loop: asyncio.Task[None] | None = None
        self._ready = False
        self._dead: EngineDead | None = None
        self._generation_tokens = 0

    @property
    def plan(self) -> Plan:
        """The memory plan whose pool the engine schedules over."""
        return self._plan

    @property
    def manager(self) -> KVCacheManager:
        """The engine's KV block manager, which tests use to check its invariants."""
        return self._manager

    async def start(self) -> None:
        """Compile the block manager, wait for the configured load time and start the step loop."""
        await asyncio.sleep(self._load_seconds)
        await asyncio.to_thread(compile_manager, self._plan.kv_cache.layout, self._policy)
        if self._start_error is not None:
            raise self._start_error
        self._ready = True
        self._loop = asyncio.create_task(self._run(), name="fake engine")

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Submit a request and yield its chunks of generated tokens; see ``Engine.generate``."""
        if self._dead is not None:
            raise self._dead
        self._in_flight.check(self._ready)
        self._refuse_never(request)
        entry = self.add(request, time.monotonic())
        self._wake.set()
        remaining = request.n
        with self._in_flight.request():
            try:
                while remaining:
                    chunk = await entry.inbox.get()
                    if isinstance(chunk, TonnageError):
                        raise chunk
                    remaining -= chunk.finish_reason is not None
                    yield chunk
            finally:
                self._forget(request.request_id)

    def add(self, request: GenerationRequest, arrival: float) -> _Request:
        """Queue a request that arrived at time ``arrival``, in seconds since any fixed origin."""
        entry = _Request(request, Inbox())
        first = self._sequence(entry, 0, arrival)
        first.forks = request.n - 1
        entry.sequences.append(first)
        self._live[request.request_id] = entry
        self.scheduler.add(first)
        return entry

    def _sequence(self, owner: _Request, index: int, arrival: float) -> _Sequence:
        request = owner.request
        return _Sequence(
            prompt=len(request.prompt_token_ids),
            max_tokens=request.params.max_tokens,
            arrival=arrival,
            index=index,
            tenant=request.tenant,
            priority=request.priority,
            weight=request.weight,
            owner=owner,
            reply=self._reply(request, index),
        )

    def _refuse_never(self, request: GenerationRequest) -> None:
        """Raise NeverFits for a request that exceeds the length limits or cannot fit into an empty KV pool."""
        wish = AdmissionRequest(len(request.prompt_token_ids), request.params.max_tokens, request.n)
        answer = refusal(wish, self._manager.limits)
        if answer is not None:
            missing = answer.needed_blocks - answer.usable_blocks
            self.scheduler.counters.count("never", answer.reason, missing)
            raise NeverFits(str(answer), field="prompt")

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """Abort a request or only its sequence ``index``; an unknown request is ignored."""
        entry = self._live.get(request_id)
        if entry is None:
            return
        for sequence in [s for s in entry.sequences if s.includes(index)]:
            self._drop(sequence)
            for ended in sequence.indices:
                entry.inbox.put_nowait(Chunk(request_id, ended, (), "abort"))
        if index is None:
            self._forget(request_id)

    @property
    def ready(self) -> bool:
        """Whether the engine has started and `die` has not been called."""
        return self._ready and self._dead is None

    def stats(self) -> EngineStats:
        """Return the scheduler's statistics, with the measured memory that was passed to the constructor."""
        stats = engine_stats(self._manager, self.scheduler, self._generation_tokens, ready=self.ready)
        return dataclasses.replace(stats, memory=self._memory)

    def capacity(self) -> Capacity:
        """Return the planned capacity, because the fake engine measures nothing."""
        deployment = self._plan.deployment
        assert deployment.max_model_len is not None
        return Capacity(
            num_blocks=self._manager.pool.num_blocks,
            block_size=self._plan.kv_cache.layout.block_size,
            max_model_len=deployment.max_model_len,
            plan=dataclasses.replace(self._plan, revision=1),
        )

    async def drain(self, seconds: float) -> None:
        """Stop admitting requests, and wait at most ``seconds`` for the running requests."""
        await self._in_flight.drain(seconds)

    async def stop(self) -> None:
        """Stop the asyncio task that computes the engine's steps."""
        self._ready = False
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)

    def die(self) -> None:
        """Simulate a crash: every request ends with EngineDead, and new requests are rejected."""
        self._dead = EngineDead("the engine process ended", hint="restart the server")
        for entry in list(self._live.values()):
            entry.inbox.put_nowait(self._dead)

    # -- the step ----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        due = time.monotonic()
        while True:
            if self.scheduler.idle:
                self._wake.clear()
                await self._wake.wait()
                due = time.monotonic()
            if self._dead is None:
                try:
                    self.step()
                except Exception:
                    log.exception("the fake engine failed in a step")
                    self.die()
            await self._tell()
            now = time.monotonic()
            due = max(now, due + self._step_seconds)
            await asyncio.sleep(due - now)

    async def _tell(self) -> None:
        said, self._said = self._said, []
        for at in range(0, len(said), _CHUNKS_A_ROUND):
            if at:
                await asyncio.sleep(0)
            for owner, chunk in said[at : at + _CHUNKS_A_ROUND]:
                owner.inbox.put_nowait(chunk)

    def step(self) -> Step[_Sequence]:
        """Run one step: mark the scheduled tokens as computed, then draw a token for each complete sequence."""
        scheduler, begun = self.scheduler, time.perf_counter()
        sample_laws(self._manager, scheduler.steps + 1)
        step = scheduler.step()
        for sequence in step.admitted:
            if not sequence.generated:
                sequence.queued = time.monotonic() - sequence.arrival
        for sequence, never in step.refused:
            owner = sequence.owner
            owner.sequences.remove(sequence)
            for index in sequence.indices:
                chunk = Chunk(owner.request.request_id, index, (), "error", sequence.cached, str(never))
                self._said.append((owner, chunk))
        if step.picked:
            tokens = sum([sequence.chunk for sequence in step.picked])
            scheduler.computed(step.picked)
            seconds = max(self._step_seconds, time.perf_counter() - begun)
            scheduler.took(tokens, len(step.picked), seconds)
        drawing: list[_Sequence] = []
        for sequence in step.drawing:
            drawing.append(sequence)
            if sequence.forks:
                drawing += self._fork(sequence)
        self._draw(drawing)
        return step

    def _fork(self, parent: _Sequence) -> list[_Sequence]:
        forks = [
            self._sequence(parent.owner, index, parent.arrival) for index in range(1, parent.owner.request.n)
        ]
        for fork in forks:
            fork.queued = parent.queued
        self.scheduler.fork(parent, forks)
        parent.owner.sequences += forks
        return forks

    def _draw(self, drawing: list[_Sequence]) -> None:
        """Append the next token to each sequence; a sequence ends at a stop token or at max_tokens."""
        going: list[_Sequence] = []
        tokens: list[int] = []
        for sequence in drawing:
            params, said = sequence.owner.request.params, sequence.said
            token = next(sequence.reply, None)
            if token is None or token in params.stop_token_ids:
                self._say(sequence, (), "stop")
            else:
                said.append(token)
                if len(said) < params.max_tokens:
                    self._say(sequence, (token,), None)
                    going.append(sequence)
                    tokens.append(token)
                    continue
                self._say(sequence, (token,), "length")
                self._generation_tokens += 1
            self.scheduler.end(sequence, sequence.generated + 1)
            sequence.owner.sequences.remove(sequence)
        if going:
            self._generation_tokens += len(going)
            self.scheduler.append(going, tokens)

    def _say(self, sequence: _Sequence, token_ids: tuple[int, ...], reason: FinishReason | None) -> None:
        owner = sequence.owner
        # The arguments are positional, because a call with keyword arguments takes a third more time.
        chunk = Chunk(
            owner.request.request_id, sequence.index, token_ids, reason, sequence.cached,
            None, (), (), (), sequence.queued,
        )  # fmt: skip
        self._said.append((owner, chunk))

    def _drop(self, sequence: _Sequence) -> None:
        self.scheduler.drop(sequence)
        sequence.owner.sequences.remove(sequence)

    def _forget(self, request_id: str) -> None:
        """Drop a request in any state, and free its KV blocks before returning."""
        entry = self._live.pop(request_id, None)
        if entry is None:
            return
        for sequence in list(entry.sequences):
            self._drop(sequence)
