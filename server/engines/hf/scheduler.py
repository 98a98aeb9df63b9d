"""Decides what each step computes: decodes first, then prefill chunks, under one token budget. No torch.

A sequence is "computed up to" some position and has some tokens; a step catches computed up to total. Decode,
chunked prefill and the rest of a prompt after a prefix hit are all that one rule.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tonnage.cache.admission import Head, Never, Policy, Wait
from tonnage.cache.manager import Admitted, BlockCopy, KVCacheManager
from tonnage.cache.scheduler.queue import Waiting, WaitingQueue
from tonnage.planner.errors import TonnageError
from tonnage.planner.plan import Plan
from tonnage.server.engines.base import (
    Chunk,
    EngineStats,
    GenerationRequest,
    Grammar,
    TokenLogprobs,
    limits_of,
)
from tonnage.server.engines.hf.batch import Batch
from tonnage.server.engines.hf.sampling.adjust import Matcher
from tonnage.server.engines.hf.sequence import Entry, Sequence, generator
from tonnage.server.engines.pool_stats import pool_stats, sample_laws, share
from tonnage.server.engines.sharing import Sharing

# Makes the matcher of a grammar for the stop tokens of a request; raises TonnageError.
MakeMatcher = Callable[[Grammar, tuple[int, ...]], Matcher]


@dataclass(slots=True)
class Counters:
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_hit_tokens: int = 0
    shared_hit_tokens: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0
    admissions: dict[tuple[str, str], int] = field(default_factory=dict)
    refused_blocks: dict[tuple[str, str], int] = field(default_factory=dict)


class Scheduler:
    """State of all requests on this rank. One step: ``schedule`` -> forward -> ``finish``."""

    def __init__(
        self,
        plan: Plan,
        matcher: MakeMatcher | None = None,
        policy: Policy | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        limits = limits_of(plan)
        self.plan = plan
        self.budget = limits.max_num_batched_tokens
        self.most_logits = limits.max_num_seqs
        policy = policy or Policy()
        self.manager = KVCacheManager(
            plan.kv_cache.layout,
            plan.kv_cache.num_blocks,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            enable_prefix_caching=plan.deployment.enable_prefix_caching,
            policy=policy,
            kv_events=sharing is not None and sharing.events is not None,
        )
        if sharing is not None:
            share(self.manager, sharing)
        self.queue = WaitingQueue(lookahead=policy.lookahead)
        self.entries: dict[int, Entry] = {}  # of the queue, by the id their sequence will have
        self.running: dict[int, Sequence] = {}
        self._ids = itertools.count()
        self._matcher = matcher
        self.counters = Counters()
        self._steps = 0
        self._waited: set[int] = set()  # entries whose wait was already counted

    @property
    def idle(self) -> bool:
        return not self.running and not self.entries

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; the API process has already refused what can never fit.

        Raises TonnageError for a grammar that is not understood, before anything is queued.
        """
        self._match(request)
        tokens = np.array(request.prompt_token_ids, dtype=np.int32)
        self._queue(Entry(request, tokens, time.monotonic()))

    def _queue(self, entry: Entry) -> None:
        number = next(self._ids)
        self.entries[number] = entry
        self.queue.push(Waiting(number, entry.wish, entry.arrived))

    def abort(self, request_id: str, index: int | None = None) -> list[Chunk]:
        """Forget a request wherever it is, or one of its n sequences, and give back the blocks; chunks that say
        so, none if it is unknown. A sequence that is still to be forked goes with the whole request only."""
        ended: list[int] = []
        for number, entry in list(self.entries.items()):
            if entry.request.request_id == request_id and entry.includes(index):
                self.queue.remove(number)
                self._waited.discard(number)
                del self.entries[number]
                ended += entry.indices
        for sequence in list(self.running.values()):
            if sequence.request.request_id == request_id and sequence.includes(index):
                self._release(sequence)
                ended += sequence.indices
        return [Chunk(request_id, index, (), "abort") for index in ended]

    def schedule(self) -> tuple[Batch | None, list[Sequence], list[Chunk]]:
        """The next batch, its sequences in order, and refusals. None when there is nothing to compute."""
        self._steps += 1
        sample_laws(self.manager, self._steps)
        copies: list[BlockCopy] = []
        picked, budget = self._pick_running(copies)
        while self.running and not picked:  # only where admission reserved more than there is
            self._preempt()
            picked, budget = self._pick_running(copies)
        refused: list[Chunk] = []
        while budget > 0 and self.entries and sum(s.rows for s in picked) < self.most_logits:
            sequence = self._admit(refused)
            if sequence is None:
                break
            more, _, budget = self._pick([sequence], budget, copies, picked)
            picked += more
        return (self._batch(picked, copies) if picked else None), picked, refused

    def _pick_running(self, copies: list[BlockCopy]) -> tuple[list[Sequence], int]:
        """The running sequences that compute in this step, and the budget left.

        The budget of those that stall is offered to the next ones: the proof that a safe state always makes
        progress (`tonnage.cache.admission.safety`) rests on it.
        """
        waiting, picked, budget = list(self.running.values()), [], self.budget
        while waiting and budget > 0:
            more, asked, budget = self._pick(waiting, budget, copies, picked)
            picked += more
            waiting = [s for s in waiting if s.id not in asked]
        return picked, budget

    def _pick(
        self, sequences: list[Sequence], budget: int, copies: list[BlockCopy], before: list[Sequence]
    ) -> tuple[list[Sequence], set[int], int]:
        """Those that compute in this step beside ``before``, their blocks allocated; the ids of all that were
        asked; the budget left: decodes first, then prefills while the budget lasts. Who is granted no block
        stalls until the next step."""
        order = [s for s in sequences if s.decodes][:budget]
        for sequence in order:
            sequence.chunk = 1
        left = budget - len(order)
        # The plan has room for the logits of max_num_seqs tokens, and each sequence may want those of one.
        spare = self.most_logits - sum(s.rows for s in before) - len(sequences)
        for sequence in sequences:
            if left and not sequence.decodes:
                sequence.chunk = min(left, len(sequence.tokens) - sequence.computed)
                if sequence.scores:
                    sequence.chunk = min(sequence.chunk, 1 + max(0, spare))
                    spare -= sequence.chunk - 1
                left -= sequence.chunk
                order.append(sequence)
        if not order:
            return [], {s.id for s in sequences}, budget
        ends = self.manager.grant([s.id for s in order], [s.computed + s.chunk for s in order]).tolist()
        for sequence, end in zip(order, ends, strict=True):
            sequence.chunk = end - sequence.computed
        picked = [s for s in order if s.chunk > 0]
        if picked:
            copies += self.manager.extend_many([s.id for s in picked], [s.computed + s.chunk for s in picked])
        return picked, {s.id for s in order}, budget - sum(s.chunk for s in picked)

    def _preempt(self) -> None:
        """Give back the blocks of one request; its sequences wait, with what they have said, to be computed
        again. Each comes back by itself."""
        manager = self.manager
        assert manager.admission is not None
        victim = manager.admission.victim(manager.running())
        places = manager.entries(list(self.running)).tolist()
        for sequence in [s for s, place in zip(self.running.values(), places, strict=True) if place == victim]:
            self.counters.preemptions += 1
            self.counters.preempted_tokens += sequence.computed
            self._release(sequence)
            sequence.chunk = 0
            resumed = sequence if sequence.generated else None
            sequence.prompt_logprobs = [None]
            tokens = np.array(sequence.tokens, dtype=np.int32)
            self._queue(Entry(sequence.request, tokens, sequence.arrived, resumed, again=True))

    def _admit(self, refused: list[Chunk]) -> Sequence | None:
        """Admit the next of the queue; None when all have to wait."""
        while (taken := self.queue.take(self._ask, self._start_of, self._steps)) is not None:
            waiting, answer = taken
            entry = self.entries.pop(waiting.id)
            self._waited.discard(waiting.id)
            request = entry.request
            if isinstance(answer, Never):
                self._count("never", answer.reason, answer.needed_blocks - answer.usable_blocks)
                refused += [
                    Chunk(request.request_id, index, (), "error", error=str(answer)) for index in entry.indices
                ]
                continue
            self._count("admit", "resumed" if entry.again else "fits")
            return self._start(waiting.id, entry, answer)
        return None

    def _ask(self, waiting: Waiting, head: Head | None) -> Admitted | Never | Wait:
        entry, wish = self.entries[waiting.id], waiting.request
        scored = entry.request.params.prompt_logprobs is not None and entry.resumed is None
        answer = self.manager.admit(
            waiting.id,
            entry.tokens,
            wish.max_tokens,
            n=wish.n,
            # A prompt whose log probabilities are wanted is computed whole: it may not hit the cache.
            salt=secrets.token_bytes(16) if scored else entry.request.cache_salt,
            tenant=wish.tenant,
            produced=wish.produced,
            head=head,
        )
        if isinstance(answer, Wait) and waiting.id not in self._waited:
            self._waited.add(waiting.id)
            self._count("wait", answer.reason, answer.blocks_short)
        return answer

    def _start_of(self, waiting: Waiting) -> Head:
        return self.manager.start_of(waiting.request)

    def _start(self, number: int, entry: Entry, answer: Admitted) -> Sequence:
        """The sequence under its new id, new or resumed."""
        request, cached = entry.request, answer.cached_tokens
        sequence = entry.resumed
        if sequence is not None:
            sequence.id, sequence.computed = number, cached
        else:
            if not entry.again:
                self.counters.prompt_tokens += len(request.prompt_token_ids)
                self.counters.prefix_hit_tokens += cached
                self.counters.shared_hit_tokens += answer.shared_tokens
            sequence = Sequence(
                number,
                request,
                0,
                list(request.prompt_token_ids),
                cached,
                cached,
                generator(request.params.seed, 0),
                entry.arrived,
                queued=time.monotonic() - entry.arrived,
                matcher=self._match(request),
            )
        self.running[number] = sequence
        return sequence

    def _match(self, request: GenerationRequest) -> Matcher | None:
        grammar = request.params.grammar
        if grammar is None or self._matcher is None:
            return None
        return self._matcher(grammar, request.params.stop_token_ids)

    def _batch(self, picked: list[Sequence], copies: list[BlockCopy]) -> Batch:
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
        last = query_start[1:] - 1
        logits_at = last[[s.samples for s in picked]]
        if any(s.scores for s in picked):
            wanted = [
                np.arange(query_start[i] if s.scores else last[i], last[i] + 1)
                for i, s in enumerate(picked)
                if s.scores or s.samples
            ]
            logits_at = np.concatenate(wanted)
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

    def fork(self, picked: list[Sequence]) -> list[Sequence]:
        """The sequences that draw a token now: those that reached their last token, and for n > 1 their forks.

        Call after the forward. Also publishes what the step wrote in the prefix index.
        """
        reached = [sequence for sequence in picked if sequence.samples]
        for sequence in picked:
            sequence.computed += sequence.chunk
            sequence.chunk = 0
        self.manager.commit_many([s.id for s in picked], [s.computed for s in picked])
        drawing = []
        for sequence in reached:
            drawing.append(sequence)
            if sequence.unforked:
                drawing.extend(self._fork(sequence))
        return drawing

    def _fork(self, parent: Sequence) -> list[Sequence]:
        request, parent.forked = parent.request, True
        forks = []
        for index in range(1, request.n):
            sequence_id = next(self._ids)
            self.manager.fork(parent.id, sequence_id)
            fork = Sequence(
                sequence_id,
                request,
                index,
                list(parent.tokens),
                parent.computed,
                parent.cached_tokens,
                generator(request.params.seed, index),
                parent.arrived,
                matcher=self._match(request),
            )
            self.running[fork.id] = fork
            forks.append(fork)
        return forks

    def finish(
        self,
        drawing: list[Sequence],
        token_ids: list[int],
        scored: dict[int, TokenLogprobs] | None = None,
    ) -> list[Chunk]:
        """Append the drawn tokens; one chunk a sequence, blocks of the finished given back. ``scored``: log
        probabilities by sequence id, for those that asked."""
        chunks = []
        going: list[Sequence] = []
        for sequence, token in zip(drawing, token_ids, strict=True):
            params = sequence.request.params
            self.counters.generation_tokens += 1
            one = (scored[sequence.id],) if scored and sequence.id in scored else ()
            try:
                complete = sequence.matcher is not None and sequence.matcher.accept(token)
            except TonnageError as error:  # the mask and the matcher disagree: nobody else's affair
                chunks += self.fail([sequence], str(error))
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
            self.manager.append_many([s.id for s in going], [s.tokens[-1] for s in going])
        return chunks

    def fail(self, picked: list[Sequence], error: str) -> list[Chunk]:
        """End these sequences with an error; the others go on."""
        chunks = []
        for sequence in picked:
            self._release(sequence)
            chunks += [
                Chunk(sequence.request.request_id, index, (), "error", sequence.cached_tokens, error)
                for index in sequence.indices
            ]
        return chunks

    def _said(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        reason: str | None,
        scored: tuple[TokenLogprobs, ...] = (),
    ) -> Chunk:
        return Chunk(
            sequence.request.request_id,
            sequence.index,
            token_ids,
            reason,  # type: ignore[arg-type]
            sequence.cached_tokens,
            logprobs=scored,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if sequence.scores else (),
            queued_seconds=sequence.queued,
        )

    def _end(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        reason: str,
        scored: tuple[TokenLogprobs, ...] = (),
    ) -> Chunk:
        """It ended by itself: what it needed teaches the forecast of those to come."""
        if self.manager.admission is not None:
            self.manager.admission.ended(sequence.generated + 1, sequence.request.tenant)
        self._release(sequence)
        return self._said(sequence, token_ids, reason, scored)

    def _release(self, sequence: Sequence) -> None:
        self.manager.free(sequence.id)
        del self.running[sequence.id]

    def _count(self, outcome: str, reason: str, missing_blocks: int = 0) -> None:
        key, counters = (outcome, str(reason)), self.counters
        counters.admissions[key] = counters.admissions.get(key, 0) + 1
        if missing_blocks > 0:
            counters.refused_blocks[key] = counters.refused_blocks.get(key, 0) + missing_blocks

    def stats(self) -> EngineStats:
        counters = self.counters
        return EngineStats(
            ready=True,
            running=len(self.running),
            waiting=len(self.entries),
            pool=pool_stats(self.manager),
            admissions=tuple((*key, count) for key, count in counters.admissions.items()),
            prompt_tokens=counters.prompt_tokens,
            refused_blocks=tuple((*key, count) for key, count in counters.refused_blocks.items()),
            preemptions=counters.preemptions,
            preempted_tokens=counters.preempted_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            shared_hit_tokens=counters.shared_hit_tokens,
            invariant_violations=self.manager.stats().violations,
        )
