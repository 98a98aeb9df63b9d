"""The HF engine's request scheduler: it turns requests into batches, and sampled tokens into chunks.

`tonnage.cache.scheduler` decides what a step computes, and which requests wait or are preempted. This module
converts its decisions to arrays for the model runner, and drawn tokens to chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tonnage.cache import scheduler
from tonnage.cache.admission import Policy
from tonnage.cache.manager import BlockCopy
from tonnage.cache.prefix.content import ContentKeys
from tonnage.planner.errors import TonnageError
from tonnage.planner.plans import Plan
from tonnage.server.engines.chunk import Chunk, FinishReason, TokenLogprobs
from tonnage.server.engines.errors import Refused
from tonnage.server.engines.hf.batch import Batch
from tonnage.server.engines.hf.kv_tier import KVTier
from tonnage.server.engines.hf.sampling.adjust import Matcher
from tonnage.server.engines.hf.sequence import Draw, HFSequence, first_sequence, forked
from tonnage.server.engines.pool_stats import engine_stats, new_manager, sample_laws, share
from tonnage.server.engines.request import GenerationRequest
from tonnage.server.engines.sharing import Sharing, whole_blocks
from tonnage.server.engines.stats import EngineStats
from tonnage.server.engines.step_pace import StepPace
from tonnage.server.text.grammar import Grammar

# A function that returns the matcher of a grammar, given the stop tokens of a request. It raises TonnageError
# for an invalid grammar.
MakeMatcher = Callable[[Grammar, tuple[int, ...]], Matcher]


class HFScheduler:
    """The HF engine's scheduler of one rank, with the state of all waiting and running requests.

    Each step calls ``schedule``, the model's forward, ``publish`` and ``fork``, draws tokens, and calls
    ``finish``.
    """

    def __init__(
        self,
        plan: Plan,
        matcher: MakeMatcher | None = None,
        policy: Policy | None = None,
        sharing: Sharing | None = None,
        tier: KVTier | None = None,
    ) -> None:
        self.plan = plan
        self.tier = tier
        self._shared = () if sharing is None else sharing.prefixes
        self.manager = new_manager(plan, policy, kv_events=sharing is not None and sharing.events is not None)
        if sharing is not None:
            share(self.manager, sharing)
        self.core: scheduler.Scheduler[HFSequence] = scheduler.Scheduler(
            self.manager,
            budget=self.manager.limits.max_num_batched_tokens,
            load=None if tier is None else self._tokens_in_tier,
        )
        self._pace = StepPace(self.core.budget, self.manager.block_size if self.manager.cached_states else 0)
        self.counters = self.core.counters
        self.generation_tokens = 0
        self._matcher = matcher
        self._begun = 0.0  # start time of the current step, in seconds

    @property
    def entries(self) -> dict[int, HFSequence]:
        """The sequences in the waiting queue, by sequence id."""
        return self.core.waiting

    @property
    def running(self) -> dict[int, HFSequence]:
        """The running sequences by sequence id."""
        return self.core.running

    @property
    def fetching(self) -> list[HFSequence]:
        """The sequences whose blocks are read from disk; they are queued afterwards."""
        return [] if self.tier is None else self.tier.fetching

    @property
    def idle(self) -> bool:
        """Whether no sequence is waiting or running; sequences in `fetching` have nothing to compute yet."""
        return self.core.idle

    def add(self, request: GenerationRequest, arrival: float | None = None) -> None:
        """Queue a request; the API process has checked that it can fit into the pool.

        Args:
            request: the request to queue.
            arrival: time of arrival on the monotonic clock in seconds; None means now.

        Raises:
            TonnageError: the grammar is invalid; the request is then not queued.
        """
        arrival = time.monotonic() if arrival is None else arrival
        sequence = first_sequence(request, arrival, self._match(request))
        if self.tier is None or not self._fetches(self.tier, sequence):
            self.core.add(sequence)

    def _fetches(self, tier: KVTier, sequence: HFSequence) -> bool:
        """Set the KV tier keys of a new sequence's blocks; return whether it waits for blocks read from disk.

        A sequence whose request asks for prompt log probabilities computes all its tokens and shares no block,
        so it has no keys.
        """
        if sequence.scores:
            return False
        size, salt = self.manager.block_size, sequence.request.cache_salt.encode("utf-8", "surrogatepass")
        shared = whole_blocks(sequence.tokens, self._shared, size) if salt else 0
        sequence.keys = ContentKeys(salt, shared, size)
        keys = sequence.keys.first((sequence.length - 1) // size, sequence.tokens)
        found = self.manager.cached_tokens(sequence.token_ids(), sequence.salt)
        return tier.fetch(sequence, keys[found // size :])

    def abort(self, request_id: str, index: int | None = None) -> list[Chunk]:
        """Drop a request in any state, or only its sequence ``index``, and free its KV blocks.

        The n sequences of a request share one prefill and fork after it. Before the fork they can only be
        dropped together.

        Returns:
            One chunk per dropped sequence; none if the request is unknown.
        """
        ended: list[int] = []
        for sequence in [*self.entries.values(), *self.running.values()]:
            if sequence.request.request_id == request_id and sequence.includes(index):
                self._leave(sequence)
                self.core.drop(sequence)
                ended += sequence.indices
        for sequence in self.fetching:
            if sequence.request.request_id == request_id and sequence.includes(index):
                assert self.tier is not None
                self.tier.forget(sequence)
                ended += sequence.indices
        return [Chunk(request_id, index, (), "abort") for index in ended]

    def schedule(self) -> tuple[Batch | None, list[HFSequence], list[Chunk]]:
        """Decide what one step computes, and build the batch of its tokens.

        Returns:
            The batch (None if there is nothing to compute), its sequences in batch order, and error chunks of
                rejected requests.

        Raises:
            InvariantViolation: the pool is full in an admission mode that never preempts.
        """
        sample_laws(self.manager, self.core.steps + 1)
        self._begun = time.perf_counter()
        if self.manager.admission.shares.several:
            self._set_budget()
        for sequence in [] if self.tier is None else self.tier.collect():
            self.core.add(sequence)
        step = self.core.step()
        for sequence in [*self.core.loading.values()]:
            self._load(sequence)
        for sequence in step.preempted:
            sequence.prompt_logprobs = [None]
        for sequence in step.admitted:
            sequence.asked = None
            if not sequence.generated:
                sequence.queued = time.monotonic() - sequence.arrival
        refused = [
            Chunk(sequence.request.request_id, index, (), "error", error=str(never))
            for sequence, never in step.refused
            for index in sequence.indices
        ]
        return (self._batch(step.picked, step.copies) if step.picked else None), step.picked, refused

    def _tokens_in_tier(self, sequence: HFSequence) -> int:
        """Return how many tokens after a sequence's prefix hit in the KV pool have their KV in host memory."""
        if self.tier is None or sequence.keys is None:
            return 0
        size = self.manager.block_size
        sequence.hit, sequence.kept = sequence.computed // size, 0
        keys = sequence.keys.first((sequence.length - 1) // size, sequence.tokens)
        return self.tier.match(keys[sequence.hit :]) * size

    def _load(self, sequence: HFSequence) -> None:
        """Copy KV blocks of an admitted sequence from the KV tier to the pool, and let the sequence run.

        The scheduler has allocated these blocks and counts their tokens as computed. Nothing reads them before
        the forward of this step.
        """
        assert self.tier is not None
        assert sequence.keys is not None
        size, start = self.manager.block_size, sequence.hit
        end = -(-sequence.computed // size)
        blocks = self.manager.tables[0][self.manager.row(sequence.id), start:end].tolist()
        self.tier.load(sequence.keys.first(end, sequence.tokens)[start:], blocks)
        if not sequence.generated:
            sequence.cached = sequence.computed
        self.core.resume(sequence)

    def _keep(self, sequence: HFSequence) -> None:
        """Copy a sequence's KV blocks that are newly full from the pool to the KV tier."""
        assert self.tier is not None
        assert sequence.keys is not None
        start, end = sequence.kept, sequence.computed // self.manager.block_size
        if end > start:
            blocks = self.manager.tables[0][self.manager.row(sequence.id), start:end].tolist()
            self.tier.keep(sequence.keys.first(end, sequence.tokens), start, blocks)
            sequence.kept, sequence.offered = end, max(sequence.offered, end)

    def _leave(self, sequence: HFSequence) -> None:
        """Report the end of a sequence to the KV tier, if there is one."""
        if self.tier is not None and sequence.keys is not None:
            reused = sequence.cached // self.manager.block_size
            self.tier.finish(sequence.keys.first(sequence.offered, sequence.tokens), reused)

    def _set_budget(self) -> None:
        """Set a smaller token budget for the step if a prompt would delay the decodes of other API keys."""
        decoding = [s.tenant for s in self.running.values() if s.length - s.computed == 1]
        prompts = {s.tenant for s in self.running.values() if s.length - s.computed > 1}
        prompts |= {s.tenant for s in self.entries.values()}
        others = len({*decoding, *prompts}) > 1 and decoding and prompts
        most = self.manager.limits.max_num_batched_tokens
        self.core.budget = self._pace.budget(len(decoding)) if others else most

    def _match(self, request: GenerationRequest) -> Matcher | None:
        grammar = request.params.grammar
        if grammar is None or self._matcher is None:
            return None
        return self._matcher(grammar, request.params.stop_token_ids)

    def _batch(self, picked: list[HFSequence], copies: list[BlockCopy]) -> Batch:
        manager = self.manager
        rows = np.array([manager.row(s.id) for s in picked])
        starts = np.array([s.computed for s in picked], dtype=np.int64)
        counts = np.array([s.chunk for s in picked], dtype=np.int64)
        query_start = np.concatenate(([0], np.cumsum(counts)))
        owner = np.repeat(np.arange(len(picked)), counts)
        positions = np.arange(query_start[-1]) - query_start[:-1][owner] + starts[owner]
        token_ids = np.concatenate([s.tokens[s.computed : s.computed + s.chunk] for s in picked]).astype(
            np.int64
        )
        size = self.plan.kv_cache.layout.block_size
        width = int(-(-(starts + counts).max() // size))
        tables = tuple(table[rows, :width] for table in manager.tables)
        slots = tuple(manager.slot_mapping(group, rows[owner], positions) for group in range(len(tables)))
        if any(s.scores for s in picked):
            wanted = [
                np.arange(s.logits_at.start, s.logits_at.stop) - s.computed + start
                for s, start in zip(picked, query_start[:-1], strict=True)
            ]
            logits_at = np.concatenate(wanted)
        else:
            logits_at = query_start[1:][[s.samples for s in picked]] - 1
        return Batch(
            token_ids=token_ids,
            positions=positions,
            query_start=query_start,
            kv_len=starts + counts,
            slots=slots,
            tables=tables,
            logits_at=logits_at,
            copies=tuple(copies),
        )

    def publish(self, picked: list[HFSequence]) -> None:
        """Record the step's tokens as computed and add its full blocks to the prefix index.

        Call it after the model's forward; ``picked`` are the sequences of the batch.
        """
        tokens = sum([sequence.chunk for sequence in picked])
        seconds = time.perf_counter() - self._begun
        prompts = sum([s.chunk for s in picked if s.chunk > 1])
        self._pace.took(prompts, seconds)
        # These sequences have logits in this step. The engine loop has found them finite, so the sequences'
        # blocks hold no NaN and may be copied to the KV tier.
        finite = [s for s in picked if s.keys is not None and s.samples]
        self.core.computed(picked)
        if self.tier is not None:
            self.tier.computed(prompts, seconds, self.manager.block_size)
            for sequence in finite:
                self._keep(sequence)
        self.core.took(tokens, len(picked), seconds)

    def fork(self, draws: list[Draw]) -> list[Draw]:
        """Fork each sequence whose request wants n > 1 outputs; return the draws of parents and forks.

        Call it after `publish`. A fork draws its first token from the row of logits of its parent.
        """
        drawing = []
        for draw in draws:
            drawing.append(draw)
            parent = draw.sequence
            if parent.forks:
                request = parent.request
                forks = [forked(parent, index, self._match(request)) for index in range(1, request.n)]
                self.core.fork(parent, forks)
                drawing += [Draw(fork, draw.row, draw.token) for fork in forks]
        return drawing

    def finish(self, draws: list[Draw]) -> list[Chunk]:
        """Append the drawn tokens, free the KV blocks of ended sequences, and return one chunk per draw."""
        chunks = []
        going: list[HFSequence] = []
        for draw in draws:
            sequence, token = draw.sequence, draw.token
            params = sequence.request.params
            self.generation_tokens += 1
            one = () if draw.logprobs is None else (draw.logprobs,)
            try:
                complete = sequence.matcher is not None and sequence.matcher.accept(token)
            # The grammar exceeds the matcher's limits, which fails this sequence only.
            except TonnageError as error:
                chunks += self.fail([sequence], str(error), refused=isinstance(error, Refused))
                continue
            if token in params.stop_token_ids:
                chunks.append(self._end(sequence, (), "stop"))
            elif complete:
                chunks.append(self._end(sequence, (token,), "stop", one))
            elif sequence.generated + 1 == params.max_tokens:
                chunks.append(self._end(sequence, (token,), "length", one))
            else:
                chunks.append(self._said(sequence, (token,), None, one))
                sequence.tokens.append(token)
                going.append(sequence)
        if going:
            self.core.append(going, [s.tokens[-1] for s in going])
        return chunks

    def fail(self, picked: list[HFSequence], error: str, *, refused: bool = False) -> list[Chunk]:
        """End the sequences ``picked`` with an error, and return their error chunks.

        ``refused`` means that the request caused the error, not the engine.
        """
        chunks = []
        for sequence in picked:
            self._leave(sequence)
            self.core.drop(sequence)
            chunks += [
                Chunk(sequence.request.request_id, index, (), "error", sequence.cached, error, refused=refused)
                for index in sequence.indices
            ]
        return chunks

    def _said(
        self,
        sequence: HFSequence,
        token_ids: tuple[int, ...],
        reason: FinishReason | None,
        scored: tuple[TokenLogprobs, ...] = (),
    ) -> Chunk:
        return Chunk(
            sequence.request.request_id,
            sequence.index,
            token_ids,
            reason,
            sequence.cached,
            logprobs=scored,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if sequence.scores else (),
            queued_seconds=sequence.queued,
        )

    def _end(
        self,
        sequence: HFSequence,
        token_ids: tuple[int, ...],
        reason: FinishReason,
        scored: tuple[TokenLogprobs, ...] = (),
    ) -> Chunk:
        self._leave(sequence)
        self.core.end(sequence, sequence.generated + 1)
        return self._said(sequence, token_ids, reason, scored)

    def stats(self) -> EngineStats:
        """Return the current statistics of the scheduler and the KV block pool."""
        stats = engine_stats(self.manager, self.core, self.generation_tokens)
        if self.tier is None:
            return stats
        return replace(stats, waiting=stats.waiting + len(self.fetching), tier=self.tier.stats())
