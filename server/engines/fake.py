"""An engine without a model: real admission and a real block manager, tokens out of thin air. In process.

For tests of everything around an engine, and for trying a client against a plan's capacity: it waits, refuses,
shares prefixes and frees blocks as an engine of that plan would, at a token rate that is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import math
import random
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator

from tonnage.cache.admission import AdmissionRequest, Never, Wait
from tonnage.cache.manager import KVCacheManager
from tonnage.cache.warm import compile_manager
from tonnage.planner.errors import TonnageError
from tonnage.planner.plan import Plan
from tonnage.server.engines.base import (
    Capacity,
    Chunk,
    Engine,
    EngineDead,
    EngineStats,
    FinishReason,
    GenerationRequest,
    MeasuredMemory,
    NeverFits,
    QueueFull,
)
from tonnage.server.engines.inbox import Inbox
from tonnage.server.engines.pool_stats import pool_stats, sample_laws

log = logging.getLogger("tonnage.server")

# Chunks given to their streams in one round of the event loop. Each wakes a task that writes to a socket
# (40 us); with the whole batch at once everything else the loop has to do would wait for all of them.
_CHUNKS_A_ROUND = 64

# (request, number of the sequence) -> the tokens of its answer; an answer that ends has met its stop token.
Reply = Callable[[GenerationRequest, int], Iterator[int]]


def random_reply(vocab_size: int) -> Reply:
    """Endless tokens drawn from the vocabulary: the same for the same prompt and seed; greedy needs no seed."""

    def reply(request: GenerationRequest, index: int) -> Iterator[int]:
        params = request.params
        if params.temperature == 0:
            draw = random.Random(f"{request.prompt_token_ids}")
        elif params.seed is not None:
            draw = random.Random(f"{request.prompt_token_ids} {params.seed} {index}")
        else:
            draw = random.Random()
        uniform = draw.random  # a third of what randrange costs
        while True:
            yield int(uniform() * vocab_size)

    return reply


@dataclasses.dataclass(slots=True, eq=False)
class _Request:
    """One request and where its chunks go."""

    request: GenerationRequest
    inbox: Inbox[Chunk | TonnageError]
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    queued: float | None = None  # seconds until admission
    waited: bool = False
    sequences: list[_Sequence] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, eq=False)
class _Sequence:
    """``computed`` prompt tokens have K/V; ``drawn`` tokens of the answer are out (0: in prefill)."""

    id: int
    owner: _Request
    index: int
    computed: int
    cached: int
    tokens: Iterator[int]
    drawn: int = 0


class FakeEngine(Engine):
    """Engine protocol over the plan's pool. ``token_rate``: tokens a second of each sequence (no wait).

    ``load_seconds``: how long ``start`` takes; ``start_error``: what it then raises. ``memory``: what it says
    was measured. :meth:`die` ends it as a crash would.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        token_rate: float = math.inf,
        reply: Reply | None = None,
        load_seconds: float = 0.0,
        start_error: TonnageError | None = None,
        memory: MeasuredMemory | None = None,
    ) -> None:
        deployment = plan.deployment
        assert deployment.max_num_seqs is not None
        assert deployment.max_model_len is not None
        assert deployment.max_num_batched_tokens is not None
        self._plan = plan
        self._budget = deployment.max_num_batched_tokens
        self._manager = KVCacheManager(
            plan.kv_cache.layout,
            plan.kv_cache.num_blocks,
            max_num_seqs=deployment.max_num_seqs,
            max_model_len=deployment.max_model_len,
            max_num_batched_tokens=deployment.max_num_batched_tokens,
            enable_prefix_caching=deployment.enable_prefix_caching,
        )
        self._steps = 0
        self._step_seconds = 1 / token_rate
        self._reply = reply or random_reply(plan.model.vocab_size)
        self._load_seconds = load_seconds
        self._start_error = start_error
        self._memory = memory or MeasuredMemory()
        self._ids = itertools.count()
        self._live: dict[str, _Request] = {}
        self._waiting: deque[_Request] = deque()
        self._running: list[_Sequence] = []
        self._said: list[tuple[_Request, Chunk]] = []  # what the step has to tell
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.Task[None] | None = None
        self._ready = False
        self._draining = False
        self._dead: EngineDead | None = None
        self._admissions: Counter[tuple[str, str]] = Counter()
        self._refused_blocks: Counter[tuple[str, str]] = Counter()
        self._prompt_tokens = 0
        self._generation_tokens = 0

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def manager(self) -> KVCacheManager:
        """The block manager, for tests of its invariants."""
        return self._manager

    async def start(self) -> None:
        await asyncio.sleep(self._load_seconds)
        await asyncio.to_thread(compile_manager, self._plan.kv_cache.layout)
        if self._start_error is not None:
            raise self._start_error
        self._ready = True
        self._loop = asyncio.create_task(self._run(), name="fake engine")

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        if self._dead is not None:
            raise self._dead
        if not self._ready or self._draining:
            raise QueueFull("the server is draining" if self._draining else "the engine is not ready")
        self._refuse_never(request)
        entry = _Request(request, Inbox())
        self._live[request.request_id] = entry
        self._waiting.append(entry)
        self._idle.clear()
        self._wake.set()
        remaining = request.n
        try:
            while remaining:
                chunk = await entry.inbox.get()
                if isinstance(chunk, TonnageError):
                    raise chunk
                remaining -= chunk.finish_reason is not None
                yield chunk
        finally:
            self._forget(request.request_id)

    def _refuse_never(self, request: GenerationRequest) -> None:
        wish = AdmissionRequest(len(request.prompt_token_ids), request.params.max_tokens, request.n)
        answer = self._manager.decide(wish)
        if isinstance(answer, Never):
            self._admissions["never", str(answer.reason)] += 1
            self._refused_blocks["never", str(answer.reason)] += max(
                0, answer.needed_blocks - answer.usable_blocks
            )
            raise NeverFits(str(answer), field="prompt")

    async def abort(self, request_id: str, index: int | None = None) -> None:
        entry = self._live.get(request_id)
        if entry is None:
            return
        if index is not None:
            ended = [s for s in self._running if s.owner is entry and s.index == index and s.drawn]
            self._release(ended)
            for sequence in ended:
                entry.inbox.put_nowait(Chunk(request_id, sequence.index, (), "abort"))
            return
        left = [s.index for s in self._running if s.owner is entry]
        for index in left if entry.sequences else range(entry.request.n):
            entry.inbox.put_nowait(Chunk(request_id, index, (), "abort"))
        self._forget(request_id)

    def stats(self) -> EngineStats:
        return EngineStats(
            ready=self._ready and self._dead is None,
            running=len(self._running),
            waiting=len(self._waiting),
            pool=pool_stats(self._manager),
            memory=self._memory,
            admissions=tuple((*key, count) for key, count in self._admissions.items()),
            refused_blocks=tuple((*key, count) for key, count in self._refused_blocks.items()),
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_hit_tokens=self._manager.stats().hit_tokens,
            shared_hit_tokens=self._manager.stats().shared_hit_tokens,
            invariant_violations=self._manager.stats().violations,
        )

    def capacity(self) -> Capacity:
        deployment = self._plan.deployment
        assert deployment.max_model_len is not None
        return Capacity(
            num_blocks=self._manager.pool.num_blocks,
            block_size=self._plan.kv_cache.layout.block_size,
            max_model_len=deployment.max_model_len,
            plan=dataclasses.replace(self._plan, revision=1),
        )

    async def drain(self, seconds: float) -> None:
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)

    async def stop(self) -> None:
        self._ready = False
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)

    def die(self) -> None:
        """End as a crashed engine does: every request gets EngineDead, no new one is taken."""
        self._dead = EngineDead("the engine process ended", hint="restart the server")
        for entry in list(self._live.values()):
            entry.inbox.put_nowait(self._dead)

    # -- the step ----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        due = time.monotonic()
        while True:
            if not self._running and not self._waiting:
                self._wake.clear()
                await self._wake.wait()
                due = time.monotonic()
            if self._dead is None:
                try:
                    self._step()
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

    def _step(self) -> None:
        """One token of every decoding sequence; what is left of the token budget goes to prefill."""
        self._steps += 1
        sample_laws(self._manager, self._steps)
        decoding = [s for s in self._running if s.drawn][: self._budget]
        self._decode(decoding)
        budget = self._budget - len(decoding)
        for sequence in [s for s in self._running if not s.drawn]:
            budget = self._prefill(sequence, budget)
        while budget and self._waiting:
            admitted = self._admit(self._waiting[0])
            if admitted is None:
                break
            budget = self._prefill(admitted, budget)

    def _admit(self, entry: _Request) -> _Sequence | None:
        """Admit the head of the queue (first come, first served); None: it waits."""
        request = entry.request
        sequence_id = next(self._ids)
        answer = self._manager.admit(
            sequence_id,
            request.prompt_token_ids,
            request.params.max_tokens,
            n=request.n,
            salt=request.cache_salt,
        )
        if isinstance(answer, Wait):
            if not entry.waited:
                entry.waited = True
                self._admissions["wait", str(answer.reason)] += 1
                self._refused_blocks["wait", str(answer.reason)] += answer.blocks_short
            return None
        assert not isinstance(answer, Never)  # refused at the door, and limits do not change
        self._waiting.popleft()
        entry.queued = time.monotonic() - entry.arrived
        self._admissions["admit", "fits"] += 1
        self._prompt_tokens += len(request.prompt_token_ids)
        tokens = self._reply(request, 0)
        sequence = _Sequence(sequence_id, entry, 0, answer.cached_tokens, answer.cached_tokens, tokens)
        entry.sequences.append(sequence)
        self._running.append(sequence)
        return sequence

    def _prefill(self, sequence: _Sequence, budget: int) -> int:
        request = sequence.owner.request
        count = min(budget, len(request.prompt_token_ids) - sequence.computed)
        sequence.computed += count
        self._manager.extend_many([sequence.id], [sequence.computed])
        self._manager.commit_many([sequence.id], [sequence.computed])
        if sequence.computed == len(request.prompt_token_ids):
            self._decode([sequence, *(self._fork(sequence, index) for index in range(1, request.n))])
        return budget - count

    def _fork(self, parent: _Sequence, index: int) -> _Sequence:
        child = _Sequence(
            next(self._ids),
            parent.owner,
            index,
            parent.computed,
            parent.cached,
            self._reply(parent.owner.request, index),
        )
        self._manager.fork(parent.id, child.id)
        parent.owner.sequences.append(child)
        self._running.append(child)
        return child

    def _decode(self, sequences: list[_Sequence]) -> None:
        """What is known of each sequence is computed, and its next token drawn. It ends at a stop token or
        after max_tokens."""
        going: list[int] = []
        tokens: list[int] = []
        ended: list[_Sequence] = []
        for sequence in sequences:
            params = sequence.owner.request.params
            token = next(sequence.tokens, None)
            sequence.drawn += 1
            if token is None or token in params.stop_token_ids:
                ended.append(sequence)
                self._say(sequence, (), "stop")
            elif sequence.drawn == params.max_tokens:
                ended.append(sequence)
                self._generation_tokens += 1
                self._say(sequence, (token,), "length")
            else:
                going.append(sequence.id)
                tokens.append(token)
                self._say(sequence, (token,), None)
        if going:
            self._generation_tokens += len(going)
            self._manager.decode_many(going, tokens)
        if ended:
            # The prompt and every token but the last one drawn are computed.
            self._manager.commit_many(
                [s.id for s in ended],
                [len(s.owner.request.prompt_token_ids) + s.drawn - 1 for s in ended],
            )
            self._release(ended)

    def _say(self, sequence: _Sequence, token_ids: tuple[int, ...], reason: FinishReason | None) -> None:
        owner = sequence.owner
        request_id = owner.request.request_id
        chunk = Chunk(
            request_id, sequence.index, token_ids, reason, sequence.cached, queued_seconds=owner.queued
        )
        self._said.append((owner, chunk))

    def _release(self, sequences: list[_Sequence]) -> None:
        for sequence in sequences:
            self._manager.free(sequence.id)
        gone = set(map(id, sequences))
        self._running = [s for s in self._running if id(s) not in gone]

    def _forget(self, request_id: str) -> None:
        """Drop a request wherever it is; its blocks are free when this returns."""
        entry = self._live.pop(request_id, None)
        if entry is None:
            return
        if entry in self._waiting:
            self._waiting.remove(entry)
        self._release([s for s in self._running if s.owner is entry])
        if not self._live:
            self._idle.set()
