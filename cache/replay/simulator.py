"""The discrete-event simulation: one engine, its queue, and the block manager that a server would run.

A step is what an engine does in one forward: every running sequence whose prompt is computed gets a token, then
prompts are computed in chunks and new requests are admitted, both within the token budget of the step. Every
block goes through `KVCacheManager`, every decision through its `Admission`; the simulation knows the true
output lengths and tells nobody. Steps in which nothing but decoding happens are taken in one leap.

Two budgets: ``whole_prompts`` admits prompts as long as fewer than the budget's tokens were admitted in the
step (a longer one goes alone), decodes aside, which is the loop of most published simulations; otherwise the
budget is vLLM's ``max_num_batched_tokens`` for decodes and prefill chunks together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tonnage.cache.admission import (
    AdmissionMode,
    AdmissionRequest,
    Head,
    Never,
    Policy,
    Wait,
    WaitReason,
    committed_peak,
)
from tonnage.cache.errors import InvariantViolation
from tonnage.cache.manager import Admitted, KVCacheManager
from tonnage.cache.replay.result import Replay, Samples
from tonnage.cache.replay.step_time import StepTime
from tonnage.cache.replay.trace import Trace, TraceRequest
from tonnage.cache.scheduler.queue import Waiting, WaitingQueue
from tonnage.planner.layout import KVLayout

Int32Array = npt.NDArray[np.int32]

# Tokens that no hash id names: unique per request.
_UNIQUE = 2**30
# At most so many steps are taken in one leap while somebody waits: learned lengths are asked anew.
_LEAP = 16


@dataclass(frozen=True, slots=True)
class Setup:
    """One engine. ``budget``: see the module; ``max_tokens`` of requests whose trace has none. ``scale``
    multiplies the rate of arrivals; None: all are there at the start (closed loop)."""

    layout: KVLayout
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    budget: int
    max_tokens: int
    policy: Policy
    step_time: StepTime
    whole_prompts: bool = False
    scale: float | None = 1.0
    enable_prefix_caching: bool = True
    lookahead: int | None = None  # None: the policy's
    leap: bool = True
    check: bool = False  # the law of guaranteed mode and all invariants, at every step


@dataclass(slots=True)
class _Sequence:
    """A request that waits or runs. ``output`` of its true ``output_tokens`` are produced."""

    id: int
    trace: TraceRequest
    arrival: float
    max_tokens: int
    output: int = 0
    produced: int = 0  # of ``output``, before the last preemption
    computed: int = 0
    stalled: int = 0
    admitted: float = -1.0
    first_token: float = -1.0

    @property
    def prompt(self) -> int:
        return self.trace.prompt_tokens + self.produced

    @property
    def wanted(self) -> int:
        return min(self.trace.output_tokens, self.max_tokens)


class Simulator:
    """``run`` once. ``progress`` is called with the number of requests that have ended, now and then."""

    def __init__(self, trace: Trace, setup: Setup, progress: Callable[[int], None] | None = None) -> None:
        self.trace, self.setup, self.progress = trace, setup, progress
        caching = setup.enable_prefix_caching and trace.has_prefixes
        self.manager = KVCacheManager(
            setup.layout,
            setup.num_blocks,
            max_num_seqs=setup.max_num_seqs,
            max_model_len=setup.max_model_len,
            max_num_batched_tokens=setup.max_model_len if setup.whole_prompts else setup.budget,
            enable_prefix_caching=caching,
            policy=setup.policy,
        )
        assert self.manager.admission is not None
        self.admission = self.manager.admission
        self.caching = caching
        lookahead = setup.policy.lookahead if setup.lookahead is None else setup.lookahead
        self.queue = WaitingQueue(lookahead=lookahead)
        self.requests: dict[int, _Sequence] = {}  # waiting
        self.running: dict[int, _Sequence] = {}  # in order of admission
        self.now = 0.0
        self.steps = 0
        self._arrived = 0
        self._changed = True  # something ended or arrived since everybody was asked
        self.samples = Samples()
        self.result = Replay(trace.name, setup.policy.mode.value, len(trace.requests))

    def run(self) -> Replay:
        """Replay the whole trace."""
        while self._arrived < len(self.trace.requests) or self.queue or self.running:
            self._arrive()
            if not self.running and not self.queue:
                if self._arrived < len(self.trace.requests):
                    self.now = self._arrival(self._arrived)
                continue
            self._step()
        result, stats = self.result, self.manager.stats()
        result.steps, result.seconds = self.steps, self.now
        result.query_tokens, result.hit_tokens = stats.query_tokens, stats.hit_tokens
        result.evictions = stats.evictions
        result.samples = self.samples
        return result

    # -- arrivals ----------------------------------------------------------------------------------------

    def _arrival(self, place: int) -> float:
        scale = self.setup.scale
        return 0.0 if scale is None else self.trace.requests[place].arrival / scale

    def _arrive(self) -> None:
        requests = self.trace.requests
        while self._arrived < len(requests) and self._arrival(self._arrived) <= self.now:
            trace = requests[self._arrived]
            most = trace.max_tokens if trace.max_tokens is not None else self.setup.max_tokens
            most = max(1, min(most, self.setup.max_model_len - trace.prompt_tokens))
            sequence = _Sequence(self._arrived, trace, self._arrival(self._arrived), most)
            self._arrived += 1
            self._enqueue(sequence)

    def _enqueue(self, sequence: _Sequence) -> None:
        trace = sequence.trace
        request = AdmissionRequest(
            sequence.prompt,
            sequence.max_tokens - sequence.produced,
            tenant=trace.tenant,
            priority=trace.priority,
            produced=sequence.produced,
        )
        self.requests[sequence.id] = sequence
        self.queue.push(Waiting(sequence.id, request, sequence.arrival))
        self._changed = True

    # -- one step ----------------------------------------------------------------------------------------

    def _step(self) -> None:
        before = self.now
        decoding = [s for s in self.running.values() if s.computed >= s.prompt]
        steps, decoded = self._decode(decoding)
        budget = self.setup.budget if self.setup.whole_prompts else self.setup.budget - decoded
        prefilled = self._prefill(budget)
        context = sum(s.computed for s in self.running.values())
        self.now += steps * self.setup.step_time.seconds(decoded + prefilled, context)
        self.steps += steps
        for sequence in decoding:
            if sequence.output and sequence.first_token < 0:
                sequence.first_token = self.now
        self._end(decoding)
        self._check()
        self.samples.add(before, self.now - before, len(self.running), self.manager.pool, len(self.queue))

    def _decode(self, decoding: list[_Sequence]) -> tuple[int, int]:
        """Give a token to each; returns (steps taken, tokens of one step)."""
        if not decoding:
            return 1, 0
        leap = self._leap(decoding)
        while True:
            ids = [s.id for s in decoding]
            wanted = np.array([s.computed for s in decoding]) + leap
            ends = self.manager.grant(ids, wanted)
            stalled = ends < wanted
            if not stalled.any():
                break
            if leap > 1:
                leap = 1
                continue
            if self._must_preempt(len(decoding), int(stalled.sum())):
                decoding[:] = [s for s in decoding if s.id in self.running]
                if not decoding:
                    return 1, 0
                continue
            self._stalled(decoding, stalled)
            decoding = [s for s, late in zip(decoding, stalled.tolist(), strict=True) if not late]
            break
        self._advance(decoding, leap)
        return leap, len(decoding)

    def _leap(self, decoding: list[_Sequence]) -> int:
        """Steps until something other than decoding happens."""
        if not self.setup.leap or len(decoding) < len(self.running) or (self.queue and self._changed):
            return 1
        steps = min(s.wanted - s.output for s in decoding)
        if self.queue:
            steps = min(steps, _LEAP)
        if not self.setup.whole_prompts:
            steps = min(steps, self.setup.budget)
        if self._arrived < len(self.trace.requests) and self.setup.scale is not None:
            context = sum(s.computed for s in decoding)
            seconds = self.setup.step_time.seconds(len(decoding), context)
            steps = min(steps, int((self._arrival(self._arrived) - self.now) / seconds) + 1)
        return max(1, steps)

    def _must_preempt(self, decoding: int, stalled: int) -> bool:
        """Preempt one request if the mode does so now."""
        mode = self.setup.policy.mode
        if mode is AdmissionMode.PREDICTIVE and (stalled < decoding or self._prefilling()):
            return False
        if mode is AdmissionMode.GUARANTEED:
            if stalled == len(self.running):
                raise InvariantViolation("everybody stalls in guaranteed mode", field="progress")
            return False
        ids = list(self.running)
        entry = self.admission.victim(self.manager.running())
        sequence = self.running.pop(ids[entry])
        self.manager.free(sequence.id)
        self.result.preemptions += 1
        self.result.recomputed_tokens += sequence.computed
        sequence.produced, sequence.computed = sequence.output, 0
        self._enqueue(sequence)
        return True

    def _prefilling(self) -> bool:
        return any(s.computed < s.prompt for s in self.running.values())

    def _stalled(self, decoding: list[_Sequence], stalled: npt.NDArray[np.bool_]) -> None:
        self.result.stall_steps += 1
        for at in np.flatnonzero(stalled).tolist():
            sequence = decoding[at]
            sequence.stalled += 1
            self.result.stalls += 1
            self.result.longest_stall = max(self.result.longest_stall, sequence.stalled)

    def _advance(self, decoding: list[_Sequence], leap: int) -> None:
        """The granted decode ``leap`` tokens each."""
        manager, ids = self.manager, [s.id for s in decoding]
        ends = np.array([s.computed for s in decoding]) + leap
        manager.extend_many(ids, ends)
        own = np.array(ids, np.int32) + np.int32(_UNIQUE)
        manager.append_many(ids, np.repeat(own, leap).reshape(-1, leap))
        manager.commit_many(ids, ends)
        for sequence in decoding:
            sequence.computed += leap
            sequence.output += leap
            sequence.stalled = 0
        self.result.output_tokens += leap * len(decoding)

    def _end(self, decoding: list[_Sequence]) -> None:
        for sequence in decoding:
            if sequence.output < sequence.wanted or sequence.id not in self.running:
                continue
            self.manager.free(sequence.id)
            del self.running[sequence.id]
            self.admission.ended(sequence.output, sequence.trace.tenant)
            self._changed = True
            result = self.result
            result.finished += 1
            result.waits.append(sequence.admitted - sequence.arrival)
            result.first_tokens.append(sequence.first_token - sequence.arrival)
            result.totals.append(self.now - sequence.arrival)
            if self.progress is not None and result.finished % 64 == 0:
                self.progress(result.finished + result.rejected)

    # -- prompts -----------------------------------------------------------------------------------------

    def _prefill(self, budget: int) -> int:
        """Chunks of prompts under way, then new requests; returns the tokens computed."""
        left = budget
        for sequence in list(self.running.values()):
            if left > 0 and sequence.computed < sequence.prompt:
                left -= self._chunk(sequence, left)
        if left > 0 and self.queue and (self._changed or not self.setup.leap):
            self._changed = False
            left = self._admit(left, budget)
        return budget - left

    def _admit(self, left: int, budget: int) -> int:
        """Admit from the queue while it is somebody's turn and tokens are left."""
        too_long = False

        def ask(entry: Waiting, head: Head | None) -> Admitted | Wait | Never | None:
            nonlocal too_long
            if self.setup.whole_prompts and entry.request.prompt_tokens > left and left < budget:
                too_long = True  # the next step's turn: nobody may take it
                return Wait(WaitReason.SEQUENCES)
            return self.manager.admit(
                entry.id,
                self._prompt_of(self.requests[entry.id]),
                entry.request.max_tokens,
                tenant=entry.request.tenant,
                produced=entry.request.produced,
                head=head,
            )

        def start_of(entry: Waiting) -> Head:
            return self.manager.start_of(entry.request)

        while left > 0 and len(self.queue):
            taken = self.queue.take(ask, start_of, self.steps)
            if taken is None:
                self._changed = self._changed or too_long
                return left
            entry, answer = taken
            sequence = self.requests.pop(entry.id)
            if isinstance(answer, Never):
                self.result.rejected += 1
                self.result.reasons[answer.reason.value] = self.result.reasons.get(answer.reason.value, 0) + 1
                continue
            assert isinstance(answer, Admitted)
            sequence.computed = answer.cached_tokens
            if sequence.admitted < 0:
                sequence.admitted = self.now
            self.running[sequence.id] = sequence
            self.result.most_running = max(self.result.most_running, len(self.running))
            if self.setup.whole_prompts:
                left -= sequence.prompt
                self._chunk(sequence, sequence.prompt)
            else:
                left -= self._chunk(sequence, left)
        self._changed = self._changed or len(self.queue) > 0
        return left

    def _chunk(self, sequence: _Sequence, left: int) -> int:
        """Compute up to ``left`` more prompt tokens; returns how many."""
        wanted = min(sequence.prompt, sequence.computed + left)
        end = int(self.manager.grant([sequence.id], [wanted])[0])
        if end <= sequence.computed:
            sequence.stalled += 1
            self.result.stalls += 1
            self.result.longest_stall = max(self.result.longest_stall, sequence.stalled)
            return 0
        self.manager.extend_many([sequence.id], [end])
        self.manager.commit_many([sequence.id], [end])
        done, sequence.computed, sequence.stalled = end - sequence.computed, end, 0
        self.result.prompt_tokens += done
        return done

    def _prompt_of(self, sequence: _Sequence) -> Int32Array:
        trace = sequence.trace
        tokens = np.empty(sequence.prompt, np.int32)
        if trace.hash_ids is not None and self.caching:
            ids = np.array(trace.hash_ids, np.int32)
            tokens[: trace.prompt_tokens] = np.repeat(ids, trace.hash_block)[: trace.prompt_tokens]
            tokens[trace.prompt_tokens :] = _UNIQUE + sequence.id
        else:
            tokens[:] = _UNIQUE + sequence.id
        return tokens

    # -- laws --------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if not self.setup.check:
            return
        self.manager.check_invariants()
        snapshot = self.manager.running()
        if self.setup.policy.safe and committed_peak(snapshot) > snapshot.capacity:
            raise InvariantViolation(
                f"{committed_peak(snapshot)} blocks committed, {snapshot.capacity} there",
                field="committed peak",
            )
