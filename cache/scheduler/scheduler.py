"""The step of the scheduler: how much each sequence computes, which are preempted and which are admitted.

Preemption is by recompute. Each admission mode has one rule:

=============== =============================================================================================
``guaranteed``  never: some sequence can always continue (`tonnage.cache.admission.safety`). If all running
                sequences stall, the safety invariant is broken and the step raises.
``no_evict``    never, because all reservations fit together.
``greedy``      vLLM's (v1/core/sched/scheduler.py, 0.32): while the running sequences need more blocks than
                the pool has, the last of them is preempted. (vLLM asks one sequence after the other, and
                preempts the last one until the asking one has its blocks or is itself the victim. A
                sequence's need does not depend on later ones, so both preempt the same sequences.)
``predictive``  only if no sequence can compute: then `Admission.victim` names the request to preempt, and all
                other sequences try again. A stall costs one step, a preemption costs a prefill
                (benchmarks/admission.py).
``auto``        as ``greedy`` or as ``predictive``, whichever is in effect in this step.
=============== =============================================================================================
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Generic

import numpy as np

from tonnage.cache.admission.types import AdmissionMode, Head, Never, Wait, WaitReason
from tonnage.cache.block_manager import BlockManager
from tonnage.cache.blocks.state import Int64Array
from tonnage.cache.errors import InvariantViolation
from tonnage.cache.results import Admitted
from tonnage.cache.scheduler.chunks import aligned_chunk, divided
from tonnage.cache.scheduler.queue import Waiting, WaitingQueue
from tonnage.cache.scheduler.sequence import Counters, S, Step
from tonnage.cache.sequences.tables import TokenIds


@dataclass(frozen=True, slots=True)
class _Wishes(Generic[S]):
    """The lengths in tokens to which sequences would grow in a step, before blocks are granted.

    ``order`` lists the sequences; the first ``decodes`` of them compute one token. ``ends`` are the requested
    lengths.
    """

    order: list[S]
    ids: list[int]
    ends: list[int]
    decodes: int


class Scheduler(Generic[S]):
    """The scheduler of one engine: it owns the running and waiting sequences and calls the block manager.

    Args:
        manager: The block manager.
        budget: Token budget of a step (max_num_batched_tokens).
        lookahead: Number of requests behind the first in the queue that may start before it; None: the
            policy's.
        whole_prompts: Whether a prompt is computed whole in the step that admits it, and decodes cost no token
            budget. A prompt longer than the budget is computed alone. Most published simulations use this loop.
        load: Function that returns how many tokens behind the prefix hit of a starting sequence are loaded from
            a KV tier. Such a sequence is in `loading` until `resume` is called.
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        budget: int,
        lookahead: int | None = None,
        whole_prompts: bool = False,
        load: Callable[[S], int] | None = None,
    ) -> None:
        self.load = load
        self.loading: dict[int, S] = {}
        self.manager, self.admission = manager, manager.admission
        self.budget = budget
        self.whole_prompts = whole_prompts
        # Prompt chunks are cut to a multiple of this block size; 0 means that they are not cut.
        self._aligned = manager.block_size if manager.cached_states else 0
        self.queue = WaitingQueue(lookahead=self.admission.lookahead if lookahead is None else lookahead)
        self.waiting: dict[int, S] = {}
        # running sequences in order of admission; forks follow their parent's request
        self.running: dict[int, S] = {}
        self.steps = 0
        self.counters = Counters()
        self._ids = itertools.count()
        self._changed = True  # whether a request ended or arrived since all waiting requests were tried

    @property
    def mode(self) -> AdmissionMode:
        """The admission mode in effect now."""
        return self.admission.mode

    @property
    def idle(self) -> bool:
        """Whether the scheduler has no running and no waiting request."""
        return not self.running and not self.waiting and not self.loading

    # -- arrival and departure -----------------------------------------------------------------------------

    def add(self, sequence: S) -> None:
        """Queue a new sequence and give it an id."""
        sequence.id = next(self._ids)
        self._push(sequence)

    def _push(self, sequence: S) -> None:
        self.waiting[sequence.id] = sequence
        self.queue.push(Waiting(sequence.id, sequence.wish, sequence.arrival))
        self._changed = True

    def drop(self, sequence: S) -> None:
        """Remove a cancelled sequence and release its blocks; its length does not train the length forecast."""
        if self.waiting.pop(sequence.id, None) is not None:
            self.queue.remove(sequence.id)
        else:
            del self.running[sequence.id]
            self.manager.free([sequence.id])
        self._changed = True

    def end(self, sequence: S, output_tokens: int) -> None:
        """Remove a finished sequence and train the length forecast with its ``output_tokens``."""
        self.admission.ended(
            output_tokens, sequence.tenant, sequence.prompt - sequence.cached, sequence.max_tokens
        )
        self.drop(sequence)

    # -- the step ------------------------------------------------------------------------------------------

    def took(self, tokens: int, sequences: int, seconds: float, turns: int = 1) -> None:
        """Report the measured duration of an engine step to admission, which learns from it.

        Args:
            tokens: Positions computed in each decode step.
            sequences: Sequences that computed at least one position.
            seconds: Duration of the step, or of all ``turns`` decode steps together.
            turns: Number of decode steps taken at once.
        """
        auto = self.admission.auto
        if auto is None or not sequences:
            return
        context = sum([s.computed for s in self.running.values()])
        for _ in range(turns):
            auto.stepped(tokens, sequences, context, seconds / turns, len(self.running) + len(self.waiting))

    def step(self, leap: int | None = None) -> Step[S]:
        """Decide which sequences compute in the next step, and allocate their blocks.

        A replay sets ``leap``: if all sequences decode and no request can be admitted, up to ``leap`` steps are
        taken at once. The caller chooses ``leap`` so that no sequence ends before the last of these steps. With
        ``leap``, waiting requests are tried again only after a request ended or arrived.

        Raises InvariantViolation if all running sequences stall and the admission mode never preempts.
        """
        step: Step[S] = Step()
        if self.waiting:
            self.admission.choose(len(self.running) + len(self.waiting))
        if leap is not None and leap > 1 and not (self.waiting and self._changed):
            self._leap(step, leap)
        if step.turns == 1:
            budget = self._run_last_out(step) if self.mode is AdmissionMode.GREEDY else self._run(step)
            if self.waiting and not step.preempted and (leap is None or self._changed):
                self._admit(step, budget)
        self.steps += step.turns
        return step

    def _leap(self, step: Step[S], turns: int) -> None:
        """Schedule ``turns`` decode steps at once, if all sequences decode and blocks are available."""
        order = list(self.running.values())
        if not self.whole_prompts:
            turns = min(turns, self.budget)  # `extend` adds at most `budget` tokens to a sequence per call.
        if self._aligned:  # No sequence passes a block boundary, because recurrent states are cached there.
            turns = min([turns, *(self._aligned - s.computed % self._aligned for s in order)])
        if turns < 2 or not order or any(s.length - s.computed != 1 for s in order):
            return
        ids = list(self.running)
        ends = np.array([s.computed for s in order]) + turns
        if (self.manager.grant(ids, ends) < ends).any():
            return
        step.copies += self.manager.extend(ids, ends)
        for sequence in order:
            sequence.chunk = turns
        step.picked, step.drawing, step.turns = order, order, turns

    def _run(self, step: Step[S]) -> int:
        """Schedule the running sequences for a step, and return the rest of its token budget.

        The budget of a stalled sequence is offered to the next. The proof that a safe state always makes
        progress (`tonnage.cache.admission.safety`) requires it.
        """
        spared = self._spared()
        while True:
            todo, budget = list(self.running.values()), self.budget - spared
            while todo and budget > 0:
                wishes = self._order(step, todo, budget)
                budget -= self._take(step, wishes, self._grant(wishes))
                if len(wishes.order) == len(todo) or not wishes.order:
                    break
                asked = {s.id for s in wishes.order}
                todo = [s for s in todo if s.id not in asked]
            if step.picked or not self.running:
                return budget + spared
            if self.loading:  # Sequences that load from a KV tier will run later and release their blocks.
                return budget + spared
            if self.mode is not AdmissionMode.PREDICTIVE:
                raise InvariantViolation(f"all running sequences stall in {self.mode} mode", field="progress")
            self._preempt(step, self._victims())
            step.stalled.clear()

    def _run_last_out(self, step: Step[S]) -> int:
        """Schedule the running sequences by vLLM's rule, and return the rest of the token budget.

        While blocks are missing, the sequence admitted last is preempted.
        """
        spared = self._spared()
        while self.running:
            wishes = self._order(step, list(self.running.values()), self.budget - spared)
            granted = self._grant(wishes)
            if granted.tolist() == wishes.ends:
                return self.budget - self._take(step, wishes, granted)
            self._preempt(step, [next(reversed(self.running.values()))])
        return self.budget

    def _order(self, step: Step[S], sequences: list[S], budget: int) -> _Wishes[S]:
        """Return the length in tokens to which each sequence would grow in this step.

        Decodes come first, then prompt chunks while the budget lasts.
        """
        order = [s for s in sequences if s.length - s.computed == 1]
        if not self.whole_prompts:
            order = order[:budget]
            budget -= len(order)
        ends, decodes = [s.length for s in order], len(order)
        if decodes < len(sequences):
            parts = self._parts(sequences, budget)
            for sequence in sequences:
                left = sequence.length - sequence.computed
                if left == 1:
                    continue
                if budget <= 0:
                    break
                chunk = min(budget, left) if parts is None else min(budget, left, parts[sequence.tenant])
                if chunk == 0:  # the sequence's API key has used up its tokens of this step's budget
                    continue
                if self._aligned:
                    chunk = self._cut(sequence, chunk, bool(order or step.picked))
                    if chunk == 0:
                        continue
                budget -= chunk
                if parts is not None:
                    parts[sequence.tenant] -= chunk
                order.append(sequence)
                ends.append(sequence.computed + chunk)
        return _Wishes(order, [s.id for s in order], ends, decodes)

    def _parts(self, sequences: list[S], budget: int) -> dict[str, int] | None:
        """Divide a step's token budget among the API keys with prompts to compute; return tokens by key.

        Returns None if any key may use the whole budget. This includes models whose prompt chunks must end at
        block boundaries, since a key with a budget below one block would compute nothing.
        """
        if not self.admission.several_keys or self._aligned:
            return None
        wanted: dict[str, int] = {}
        for sequence in sequences:
            if (left := sequence.length - sequence.computed) > 1:
                wanted[sequence.tenant] = wanted.get(sequence.tenant, 0) + left
        return divided(max(0, budget), wanted) if len(wanted) > 1 else None

    def _spared(self) -> int:
        """Return how much of a step's token budget running prompts must leave to a waiting request.

        The waiting request belongs to an API key without a running prompt. The result is 0 if max_num_seqs
        leaves no place for such a request. It is 0 if no request has ended or arrived since admission last
        tried all requests, because the decisions would be the same. It is also 0 for models whose prompt chunks
        must end at block boundaries.
        """
        several = self.admission.several_keys and not self._aligned
        if not several or not self.waiting or not self._changed:
            return 0
        computing = {s.tenant for s in self.running.values() if s.length - s.computed > 1}
        if not computing:
            return 0
        seats = self.manager.limits.max_num_seqs - self.manager.reservations.sequences
        others = [e for e in self.queue if e.request.tenant not in computing and e.request.n <= seats]
        if not others:
            return 0
        first = min((entry.request for entry in others), key=self.admission.ranking())
        return min(first.prompt_tokens, self.budget // (1 + len(computing)))

    def _cut(self, sequence: S, chunk: int, may_wait: bool) -> int:
        """Return the tokens of a prompt chunk, reduced so that it ends where a recurrent state is kept.

        The result is 0 if the chunk must wait for a later step; ``may_wait`` says whether that is allowed.
        """
        cut = aligned_chunk(
            chunk,
            computed=sequence.computed,
            length=sequence.length,
            prompt=sequence.prompt,
            junction=sequence.junction,
            block_size=self._aligned,
            budget=self.budget,
        )
        return cut if cut or may_wait else chunk

    def _grant(self, wishes: _Wishes[S]) -> Int64Array:
        return self.manager.grant(wishes.ids, wishes.ends)

    def _take(self, step: Step[S], wishes: _Wishes[S], granted: Int64Array) -> int:
        """Allocate the granted KV blocks and return how much token budget the sequences use.

        A sequence that was granted no block stalls in this step.
        """
        order, ids, decodes, ends = wishes.order, wishes.ids, wishes.decodes, granted.tolist()
        for sequence, end in zip(order, ends, strict=True):
            sequence.chunk = end - sequence.computed
        if ends != wishes.ends and (stalled := [s for s in order if s.chunk <= 0]):
            step.stalled += stalled
            decodes = sum([s.chunk > 0 for s in order[:decodes]])
            order = [s for s in order if s.chunk > 0]
            ids, granted = [s.id for s in order], np.array([s.computed + s.chunk for s in order], np.int64)
        cost = 0 if self.whole_prompts else decodes
        step.drawing += order[:decodes]
        for sequence in order[decodes:]:
            cost += sequence.chunk
            if sequence.samples:
                step.drawing.append(sequence)
        if order:
            step.copies += self.manager.extend(ids, granted)
            step.picked += order
        return cost

    # -- preemption ----------------------------------------------------------------------------------------

    def _victims(self) -> list[S]:
        """Return all sequences of the request that costs least to recompute."""
        victim = self.admission.victim(self.manager.running())
        entries = self.manager.entries(list(self.running)).tolist()
        return [s for s, entry in zip(self.running.values(), entries, strict=True) if entry == victim]

    def _preempt(self, step: Step[S], victims: list[S]) -> None:
        self.manager.free([s.id for s in victims])
        for sequence in victims:
            self.counters.preemptions += 1
            self.counters.preempted_tokens += sequence.computed
            del self.running[sequence.id]
            sequence.computed = sequence.chunk = 0
            sequence.preempted, sequence.waited = True, False
            step.preempted.append(sequence)
            self._push(sequence)

    # -- admission -----------------------------------------------------------------------------------------

    def _admit(self, step: Step[S], budget: int) -> None:
        """Admit requests from the waiting queue while the step has token budget left."""
        self._changed = False
        too_long = False

        def ask(entry: Waiting, head: Head | None) -> Admitted | Never | Wait:
            nonlocal too_long
            if self.whole_prompts and entry.request.prompt_tokens > budget and budget < self.budget:
                # a prompt too long for this step starts in the next; no other request overtakes it
                too_long = True
                return Wait(WaitReason.SEQUENCES)
            return self._ask(entry, head)

        while budget > 0 and self.waiting:
            ranking = self.admission.ranking() if self.admission.several_keys else None
            taken: tuple[Waiting, Admitted | Never] | None = self.queue.take(
                ask, self.admission.start_of, self.steps, ranking
            )
            if taken is None:
                self._changed = too_long
                return
            entry, answer = taken
            sequence = self.waiting.pop(entry.id)
            if isinstance(answer, Never):
                self.counters.count("never", answer.reason, answer.needed_blocks - answer.usable_blocks)
                step.refused.append((sequence, answer))
                continue
            self._start(sequence, answer)
            step.admitted.append(sequence)
            if self.load is not None and (tokens := self.load(sequence)):
                self._load(step, sequence, tokens)
                continue
            room = max(budget, sequence.length) if self.whole_prompts else budget
            wishes = self._order(step, [sequence], room)
            # The rest of the budget is less than a block of this prompt. The next step begins to compute it.
            if not wishes.order:
                break
            budget -= self._take(step, wishes, self._grant(wishes))
        self._changed = bool(self.waiting)

    def _ask(self, entry: Waiting, head: Head | None) -> Admitted | Never | Wait:
        sequence, request = self.waiting[entry.id], entry.request
        answer = self.manager.admit(
            entry.id, sequence.token_ids(), request.max_tokens, salt=sequence.salt, head=head, request=request
        )
        if isinstance(answer, Wait) and not sequence.waited:
            sequence.waited = True
            self.counters.count("wait", answer.reason, answer.blocks_short)
        return answer

    def _start(self, sequence: S, answer: Admitted) -> None:
        sequence.computed, sequence.junction = answer.cached_tokens, answer.junction
        if not sequence.generated:
            sequence.cached = answer.cached_tokens
        if sequence.preempted and self.admission.auto is not None:
            self.admission.auto.recomputed(sequence.length - 1 - answer.cached_tokens)
        if not sequence.preempted:
            self.counters.prompt_tokens += sequence.prompt
            self.counters.prefix_hit_tokens += answer.cached_tokens
            self.counters.shared_hit_tokens += answer.shared_tokens
        self.counters.count("admit", "resumed" if sequence.preempted else "fits")
        self.running[sequence.id] = sequence

    def _load(self, step: Step[S], sequence: S, tokens: int) -> None:
        """Allocate KV blocks for ``tokens`` tokens of a tier; the sequence waits until they are loaded."""
        end = sequence.computed + tokens
        while sequence.computed < end:  # one call of `extend` adds at most a step's token budget
            reached = min(end, sequence.computed + self.budget)
            granted = int(self.manager.grant([sequence.id], [reached])[0])
            if granted <= sequence.computed:
                break
            step.copies += self.manager.extend([sequence.id], [granted])
            self.manager.commit([sequence.id], [granted])
            sequence.computed = granted
        self.loading[sequence.id] = self.running.pop(sequence.id)

    def resume(self, sequence: S) -> None:
        """Let a sequence run again after its K/V has been loaded from a KV tier."""
        self.running[sequence.id] = self.loading.pop(sequence.id)

    # -- reports of the engine -----------------------------------------------------------------------------

    def computed(self, picked: Rows[S]) -> None:
        """Commit the tokens that sequences computed in the step, and publish full blocks for prefix hits."""
        ends = [s.computed + s.chunk for s in picked]
        self.manager.commit([s.id for s in picked], ends)
        for sequence, end in zip(picked, ends, strict=True):
            sequence.computed, sequence.chunk = end, 0

    def fork(self, parent: S, children: Iterable[S]) -> None:
        """Start the other sequences of ``parent``'s request (n > 1) as forks that share its computed prompt."""
        parent.forks = 0
        for child in children:
            child.id = next(self._ids)
            self.manager.fork(parent.id, child.id)
            child.length, child.computed, child.cached = parent.length, parent.computed, parent.cached
            self.running[child.id] = child

    def append(self, sequences: Rows[S], token_ids: TokenIds) -> None:
        """Append the tokens that a step sampled to their sequences.

        Args:
            sequences: Sequences for which tokens were sampled.
            token_ids: One token id per sequence [sequences], or several per sequence [sequences, count].
        """
        count = token_ids.shape[1] if isinstance(token_ids, np.ndarray) and token_ids.ndim == 2 else 1
        self.manager.append([s.id for s in sequences], token_ids)
        for sequence in sequences:
            sequence.length += count
