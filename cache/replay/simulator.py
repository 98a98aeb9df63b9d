"""The simulation of a trace replay: the server's scheduler with a simulated clock and the trace's lengths.

A step is one forward pass of an engine. `tonnage.cache.scheduler` decides what it computes, with the real
`KVCacheManager` and its `Admission`. The simulation supplies the clock (a roofline) and the sampled tokens. It
knows the true output lengths and hides them from the scheduler. Several consecutive steps that only decode are
simulated at once (a *leap*).

The token budget of a step has two meanings. By default it is vLLM's ``max_num_batched_tokens`` for decodes and
prefill chunks together. With ``whole_prompts`` it limits the prompt tokens admitted in a step, decodes cost
nothing, and a prompt longer than the budget is computed alone. Most published simulations use this second loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tonnage.cache.admission import Policy
from tonnage.cache.blocks.groups import can_cache_states
from tonnage.cache.blocks.state import Int32Array
from tonnage.cache.manager import KVCacheManager
from tonnage.cache.replay.result import Replay, Samples
from tonnage.cache.replay.step_time import StepTime
from tonnage.cache.replay.tiers import Tiers, TierSetup, chunk_tokens_of
from tonnage.cache.replay.trace import Trace
from tonnage.cache.replay.trace_request import TraceRequest
from tonnage.cache.scheduler import Scheduler, Sequence, Step
from tonnage.planner.model.layout import KVLayout

# First token id for prompts without hash ids. Each such prompt repeats one id of its own, so it shares no
# prefix.
_UNIQUE = 2**30
# Upper bound of decode steps simulated at once while requests wait, so that newly learned lengths soon take
# effect.
_LEAP = 16


@dataclass(frozen=True, slots=True)
class Setup:
    """The configuration of one engine whose serving of a trace is simulated.

    Attributes:
        layout: KV cache groups and block size.
        num_blocks: Blocks of the pool, with the null block.
        max_num_seqs: Upper bound of live sequences.
        max_model_len: Upper bound of prompt + output tokens.
        budget: Token budget of a step for prompts and decodes; with ``whole_prompts``, for prompts only.
        max_tokens: Upper bound of output tokens for requests without max_tokens in the trace.
        policy: Admission policy.
        step_time: Duration of a step.
        whole_prompts: Whether each prompt is computed in one step, instead of in chunks.
        scale: Multiplier of the arrival rate; None: all requests arrive at the start (closed loop).
        enable_prefix_caching: Whether the prefix cache is on.
        lookahead: Number of requests behind the first in the queue that may start before it; None: the
            policy's.
        leap: Whether consecutive decode steps are simulated at once.
        check: Function that is called with the block manager in every step, to check its invariants.
        tiers: KV tiers behind the pool; None: no tier.
    """

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
    lookahead: int | None = None
    leap: bool = True
    check: Callable[[KVCacheManager], None] | None = None
    tiers: TierSetup | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class _Sequence(Sequence):
    """A request of the trace, which ends after ``wanted`` output tokens."""

    trace: TraceRequest
    wanted: int
    prefixes: bool  # whether the prompt's tokens are made from the trace's hash ids
    admitted: float = -1.0
    first_token: float = -1.0
    loaded: float = -1.0  # simulated time at which the load of the prompt's chunks from a tier ends
    tokens: Int32Array | None = None  # token ids, kept while the request waits for admission

    def token_ids(self) -> Int32Array:
        if self.tokens is None or len(self.tokens) != self.length:
            self.tokens = np.full(self.length, _UNIQUE + self.id, np.int32)
            if self.trace.hash_ids is not None and self.prefixes:
                ids, prompt = np.array(self.trace.hash_ids, np.int32), self.trace.prompt_tokens
                self.tokens[:prompt] = np.repeat(ids, self.trace.hash_block)[:prompt]
        return self.tokens


class Simulator:
    """A simulation of one engine that serves the requests of a trace once.

    ``progress`` is called with the number of finished requests from time to time.
    """

    def __init__(self, trace: Trace, setup: Setup, progress: Callable[[int], None] | None = None) -> None:
        self.trace, self.setup, self.progress = trace, setup, progress
        # Cached recurrent states cost blocks and steps whether or not a prefix is hit.
        self.caching = setup.enable_prefix_caching and (trace.has_prefixes or can_cache_states(setup.layout))
        self.manager = KVCacheManager(
            setup.layout,
            setup.num_blocks,
            max_num_seqs=setup.max_num_seqs,
            max_model_len=setup.max_model_len,
            max_num_batched_tokens=setup.max_model_len if setup.whole_prompts else setup.budget,
            enable_prefix_caching=self.caching,
            policy=setup.policy,
            # The hash key is fixed. Eviction depends on the blocks' hashes, so with random keys the result of a
            # trace would vary.
            hash_seed=0,
        )
        self.scheduler: Scheduler[_Sequence] = Scheduler(
            self.manager,
            budget=setup.budget,
            lookahead=setup.lookahead,
            whole_prompts=setup.whole_prompts,
            load=self._load if setup.tiers is not None else None,
        )
        self.tiers = None if setup.tiers is None else Tiers(setup.tiers, chunk_tokens_of(trace))
        if (auto := self.manager.admission.auto) is not None:
            # Auto mode's simulations run within the call. In a thread, they would make the replay depend on
            # real time.
            auto.background = False
        self.now = 0.0
        self._arrived = 0
        self._computed = 0  # number of computed tokens
        self._stalled: dict[int, int] = {}  # sequence id -> number of consecutive stalled steps
        self.samples = Samples()
        self.result = Replay(trace.name, setup.policy.mode.value, len(trace.requests))

    @property
    def steps(self) -> int:
        """Number of engine steps that the replay has simulated so far."""
        return self.scheduler.steps

    def run(self) -> Replay:
        """Replay the whole trace and return the replay's figures."""
        while self._arrived < len(self.trace.requests) or not self.scheduler.idle:
            self._arrive()
            self._resume()
            if not self.scheduler.idle:
                self.step()
            elif self._arrived < len(self.trace.requests):
                self.now = self._arrival(self._arrived)
        result, stats = self.result, self.manager.stats()
        result.steps, result.seconds = self.steps, self.now
        # All output tokens but the last of each request are computed; recomputed tokens count as prompt tokens.
        result.prompt_tokens = self._computed - (result.output_tokens - result.finished)
        result.preemptions = self.scheduler.counters.preemptions
        result.recomputed_tokens = self.scheduler.counters.preempted_tokens
        result.query_tokens, result.hit_tokens = stats.query_tokens, stats.hit_tokens
        result.evictions = stats.evictions
        result.tiers = None if self.tiers is None else self.tiers.result()
        result.samples = self.samples
        return result

    # -- arrivals ------------------------------------------------------------------------------------------

    def _arrival(self, place: int) -> float:
        scale = self.setup.scale
        return 0.0 if scale is None else self.trace.requests[place].arrival / scale

    def _arrive(self) -> None:
        requests = self.trace.requests
        while self._arrived < len(requests) and self._arrival(self._arrived) <= self.now:
            trace = requests[self._arrived]
            most = trace.max_tokens if trace.max_tokens is not None else self.setup.max_tokens
            most = max(1, min(most, self.setup.max_model_len - trace.prompt_tokens))
            sequence = _Sequence(
                prompt=trace.prompt_tokens,
                max_tokens=most,
                arrival=self._arrival(self._arrived),
                tenant=trace.tenant,
                priority=trace.priority,
                trace=trace,
                wanted=min(trace.output_tokens, most),
                prefixes=self.caching,
            )
            self._arrived += 1
            self.scheduler.add(sequence)

    # -- one step ------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Simulate one engine step, or several decode steps at once; advance the clock by the duration."""
        before, scheduler = self.now, self.scheduler
        step = scheduler.step(self._leap() if self.setup.leap else None)
        self._note(step)
        if not step.picked and scheduler.loading:
            self._wait_for_load()
            return
        computed = sum([s.chunk for s in step.picked])
        self._computed += computed
        if step.drawing:
            own = np.array([s.id for s in step.drawing], np.int32) + np.int32(_UNIQUE)
            scheduler.append(step.drawing, np.repeat(own, step.turns).reshape(-1, step.turns))
        if step.picked:
            scheduler.computed(step.picked)
        if self.tiers is not None:
            unstored = self.tiers.unstored
            for sequence in [s for s in step.picked if s.id in unstored]:
                self.tiers.computed(sequence.id, min(sequence.computed, sequence.prompt))
            self.tiers.step_ended()
        context = sum([s.computed for s in scheduler.running.values()])
        seconds = step.turns * self.setup.step_time.seconds(computed // step.turns, context)
        scheduler.took(computed // step.turns, len(step.picked), seconds, step.turns)
        self.now += seconds
        self._end(step)
        if self.setup.check is not None:
            self.setup.check(self.manager)
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        self.samples.add(before, self.now - before, running, self.manager.pool, waiting)

    def _leap(self) -> int:
        """Return how many decode steps can be simulated at once, until a request ends or arrives."""
        running = self.scheduler.running.values()
        if not running:
            return 1
        steps = min([s.wanted - s.length + s.prompt for s in running])
        if self.scheduler.waiting:
            steps = min(steps, _LEAP)
        if steps > 1 and self._arrived < len(self.trace.requests) and self.setup.scale is not None:
            context = sum([s.computed for s in running])
            seconds = self.setup.step_time.seconds(len(running), context)
            steps = min(steps, int((self._arrival(self._arrived) - self.now) / seconds) + 1)
        return 1 if self.scheduler.loading else max(1, steps)

    # -- loads from tiers ----------------------------------------------------------------------------------

    def _load(self, sequence: _Sequence) -> int:
        """Return how many tokens a starting sequence loads from a KV tier, and record when the load ends."""
        assert self.tiers is not None
        tokens, sequence.loaded = self.tiers.load(sequence.id, sequence.trace, sequence.computed, self.now)
        return tokens

    def _resume(self) -> None:
        """Let sequences run whose loads from a KV tier have ended by now."""
        for sequence in [s for s in self.scheduler.loading.values() if s.loaded <= self.now]:
            assert self.tiers is not None
            self.scheduler.resume(sequence)
            self.tiers.loaded(sequence.id)

    def _wait_for_load(self) -> None:
        """Advance the simulated clock to the next end of a load from a KV tier, or to the next arrival."""
        times = [s.loaded for s in self.scheduler.loading.values()]
        if self._arrived < len(self.trace.requests):
            times.append(self._arrival(self._arrived))
        self.now = max(self.now, min(times))

    def _note(self, step: Step[_Sequence]) -> None:
        """Record the scheduler's decisions of a step (admitted, rejected, stalled) in the replay's figures."""
        result, scheduler = self.result, self.scheduler
        for sequence in step.admitted:
            sequence.tokens = None
            if sequence.admitted < 0:
                sequence.admitted = self.now
        for _, never in step.refused:
            result.rejected += 1
            result.reasons[never.reason.value] = result.reasons.get(never.reason.value, 0) + 1
        result.most_running = max(result.most_running, len(scheduler.running))
        if step.stalled or self._stalled:
            self._stalled = {s.id: self._stalled.get(s.id, 0) + 1 for s in step.stalled}
            result.stalls += len(step.stalled)
            result.stall_steps += bool(step.stalled)
            result.longest_stall = max(result.longest_stall, *self._stalled.values(), 0)
        result.output_tokens += step.turns * len(step.drawing)

    def _end(self, step: Step[_Sequence]) -> None:
        """Record the times of requests' first and last tokens, and end requests that have all output tokens."""
        result, now = self.result, self.now
        for sequence in [s for s in step.drawing if s.first_token < 0]:
            sequence.first_token = now
        for sequence in [s for s in step.drawing if s.length - s.prompt >= s.wanted]:
            self.scheduler.end(sequence, sequence.generated)
            if self.tiers is not None:
                self.tiers.ended(sequence.id)
            result.finished += 1
            result.waits.append(sequence.admitted - sequence.arrival)
            result.first_tokens.append(sequence.first_token - sequence.arrival)
            result.totals.append(now - sequence.arrival)
            if self.progress is not None and result.finished % 64 == 0:
                self.progress(result.finished + result.rejected)
