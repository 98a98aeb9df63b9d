"""The admission mode ``auto``: it lets requests start by vLLM's rule or later, as simulations recommend.

By vLLM's rule a request starts when its prompt fits the free blocks. If a running sequence later needs a block
and none is free, vLLM preempts a request and recomputes it later. Whether that is expensive depends on the
engine, the lengths and the queue, so no constant of the machine is assumed. `Auto` learns three things: the
seconds of a step (`tonnage.cache.admission.cost`), the lengths of requests, and their number (running and
waiting).

A *rehearsal* (`tonnage.cache.admission.rehearsal`) simulates these requests under vLLM's rule and under several
rules that hold requests back. Among the rules that worsen neither the time to the first token nor the time
between tokens, `Auto` takes the one with the most tokens per second. vLLM's rule stays while too little is
learned, while nothing is recomputed, and where no other rule serves more.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from tonnage.cache.admission.cost import CostFit, StepCost
from tonnage.cache.admission.observed_lengths import Lengths, draw, weigh
from tonnage.cache.admission.policy import VLLM, Policy, Rule
from tonnage.cache.admission.rehearsal import Engine, Load, Outcome, compile_rehearsal, rehearse
from tonnage.cache.admission.types import AdmissionMode, Limits
from tonnage.cache.blocks.state import Int64Array

log = logging.getLogger("tonnage.cache")

# The admission rules that are simulated beside vLLM's rule. A rule with a higher share holds back fewer
# requests. The shares, and the bounds START and STAY, were chosen with benchmarks/vllm_admission.py --matrix
# --costs cpu --pools 200 --first-seed 10 (benchmarks/README.md).
RULES = tuple(Rule(share) for share in (0.6, 0.7, 0.8, 0.9))
# Three counts of finished requests: `_REMEMBERED` lengths are remembered, a rehearsal (simulation) needs
# `_KNOWN` of them, and `_ANEW` requests finish between two rehearsals.
_REMEMBERED, _KNOWN, _ANEW = 256, 64, 48
# A rehearsal (simulation) runs only if recomputed tokens take at least this share of the engine's time. Another
# admission rule can save no more than the time that recomputed tokens take.
_LOST = 0.02
# vLLM's admission rule stays while the output length of more than this share of the requests is unknown.
# Without this bound, the P99 time to the first token was 1.12 times vLLM's in a case of
# benchmarks/vllm_admission.py
# (--matrix --costs cpu --pools 1500 --first-seed 10).
_UNKNOWN = 0.25
# The number of running and waiting requests is averaged over this many steps. That is several times the number
# of steps that a request runs. A queue that forms and empties in less time is no reason to hold requests back.
_LIFETIME = 128
# Two values of the P99 time between tokens count as equal if their relative difference is below this.
_SAME = 1e-3
# The number of running and waiting requests is rounded to a power of `_LEVEL`, and each power (a level) has one
# simulation. The level changes only when the number is more than `_LEVEL_WIDTH` levels away. A number between
# two levels therefore does not change the admission rule at each step.
_LEVEL, _LEVEL_WIDTH = 1.4, 0.8
# A window of steps measures the throughput of a rule only if requests waited in at least this share of its
# steps.
_QUEUED = 0.9
# A window of steps counts as steady if the total output tokens of the running requests changed by at most this
# share of the output tokens of the requests that finished in it. Other windows are not compared with the
# simulation: while requests of similar age fill the pool, the measured throughput exceeds the simulated one.
_STEADY = 0.25
# `Auto._guard` compares the measured tokens per second with the simulated tokens per second of vLLM's rule. If
# they are below `_BEHIND` times the simulated value for `_WINDOWS` windows of steps in a row, vLLM's rule is
# used until `_BANNED` more requests have finished.
_BEHIND, _WINDOWS, _BANNED = 0.95, 3, 1024
# Upper bound of the share of one CPU core that simulations of admission rules use.
_DUTY = 0.05
# Requests that a rehearsal (simulation) serves, in addition to two per simulated client.
_STEADY_REQUESTS = 1536

# Upper bound of the output tokens of a rehearsal (simulation), 8 bytes each: 32 MiB. If two requests per client
# exceed it, no rehearsal runs.
_MOST_TOKENS = 1 << 22


def _none_running() -> Int64Array:
    """Return an empty array of request lengths, int64 [0, 3], for the case that no request runs."""
    return np.empty((0, 3), np.int64)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Conditions that an admission rule must meet: ratios of its simulated figures to those of vLLM's rule.

    Attributes:
        tokens: Lower bound of the ratio of tokens per second.
        first: Upper bound of the ratio of the time to the first token, for P50 and P99.
        between: Upper bound of the ratio of the P99 time between tokens.
    """

    tokens: float
    first: float
    between: float


# A rule that holds requests back replaces vLLM's rule if it meets one of the `Bounds` in START. It then stays
# in effect while it meets one of the `Bounds` in STAY. These are looser, because a rule that starts and stops
# often gains nothing.
#
# The margins of START's first entry exceed the scatter of vLLM's rule: if the prompt of one of 300 requests is
# a block longer, tokens/s change by 0.4 to 0.7 % (standard deviation), times to the first token by 1.0 to 1.4 %
# and the P99 time between tokens by 5 %
# (test_gain_required_to_leave_vllms_admission_rule_exceeds_the_random_variation_of_its_results).
#
# The second entry demands a larger gain in throughput but accepts times nearly equal to vLLM's, because steps
# with long prompts can determine the P99 under every rule. Without the second entry, benchmarks/admission.py
# has 320 preemptions on the Azure conversations instead of 23.
START = (Bounds(1.06, 0.98, 0.85), Bounds(1.08, 1.0, 0.99))
STAY = (Bounds(1.01, 1.02, 0.95), Bounds(1.08, 1.0, 1.0))


@dataclass(frozen=True, slots=True)
class Choice:
    """The admission rule chosen for a number of requests in the system, with its simulated figures.

    ``outcome`` has the figures of the chosen rule, ``own`` the figures of vLLM's rule.
    """

    rule: Rule
    outcome: Outcome
    own: Outcome


class Auto:
    """The admission mode ``auto``: it records observations of the engine and chooses the rule from simulations.

    Args:
        engine: Limits of the block pool and of a step.
        target_itl: Upper bound of the P99 seconds between tokens, at the price of throughput. None: at most the
            P99 of vLLM's rule.
        background: True: simulate in a thread while the last rule stays in effect. False: simulate within the
            call, for a simulated clock.
    """

    def __init__(self, engine: Engine, target_itl: float | None = None, *, background: bool = True) -> None:
        self.engine, self.target_itl, self.background = engine, target_itl, background
        self.fit = CostFit()
        self.log = log  # inside vLLM, the scheduler replaces this logger with vLLM's
        self._cost_said = False
        # How often low throughput or an exception has made the mode return to vLLM's rule.
        self.fallbacks = 0
        # The last choice of an admission rule. None: no simulation has run, and vLLM's rule is in effect.
        self.choice: Choice | None = None
        # One entry per remembered finished request: prompt tokens, output tokens, max_tokens, step of its end.
        self._requests: deque[tuple[int, int, int, int]] = deque()
        self._since = 0  # end step of the last request that was removed from `_requests`
        self._ended = 0
        # The admission rule chosen for each level. The level is the logarithm to base `_LEVEL` of the number of
        # running and waiting requests, rounded.
        self._choices: dict[int, Choice] = {}
        self._level = 0
        self._rehearsed_at = 0  # number of finished requests (`_ended`) at the last simulation
        self._pending: Future[None] | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._idle_until = 0.0
        self._recomputed = 0
        # Counts since the last simulation, for `_guard` and for the share of recomputed tokens (`_lost`).
        self._seconds = self._tokens = 0.0
        self._steps = self._held_steps = self._queued_steps = self._in_system = 0
        self._accuracy = 1.0  # under vLLM's rule: measured tokens per second, divided by the simulated ones
        self._usual = 0.0  # moving average of the number of running and waiting requests
        self._running_tokens = 0  # output tokens of the requests that ran at the last simulation
        self._lost = 0.0
        self._behind = self._banned_until = 0
        self._failed = False  # whether a simulation has raised an exception

    @property
    def cost(self) -> StepCost | None:
        """The fitted cost model of an engine step, or None while too few steps have been measured."""
        return self.fit.cost

    # -- observations --------------------------------------------------------------------------------------

    def stepped(self, tokens: int, sequences: int, context_tokens: int, seconds: float, in_system: int) -> None:
        """Record the size and duration of a finished engine step, for the cost model.

        Args:
            tokens: Token positions that the step computed.
            sequences: Sequences that computed at least one position.
            context_tokens: Tokens of KV cache held by running sequences.
            seconds: Duration of the step.
            in_system: Number of requests that ran or waited.
        """
        self.fit.observe(tokens, sequences, context_tokens, seconds)
        self._seconds += seconds
        self._tokens += sequences
        self._steps += 1
        self._in_system += in_system
        self._usual += (in_system - self._usual) / min(_LIFETIME, max(1, self.fit.steps))
        self._held_steps += self.choice is not None and self.choice.rule != VLLM

    def ended(self, prompt_tokens: int, output_tokens: int, max_tokens: int) -> None:
        """Record the lengths of a request that finished and was not cancelled.

        Args:
            prompt_tokens: Prompt tokens that were not found in the prefix cache, at least 1.
            output_tokens: Output tokens of the request, at least 1.
            max_tokens: Upper bound of the output tokens that the request asked for.
        """
        self._requests.append(
            (max(1, prompt_tokens), max(1, output_tokens), max(max_tokens, output_tokens, 1), self.fit.steps)
        )
        if len(self._requests) > _REMEMBERED:
            self._since = self._requests.popleft()[-1]
        self._ended += 1

    def recomputed(self, tokens: int) -> None:
        """Add ``tokens`` to the count of tokens that preempted requests compute again."""
        self._recomputed += tokens

    # -- the rule in effect --------------------------------------------------------------------------------

    def rule(self, in_system: int, running: Callable[[], Int64Array] = _none_running) -> Rule:
        """Return the admission rule to apply while requests wait.

        Args:
            in_system: Number of requests that run or wait.
            running: Function that returns prompt tokens, output tokens so far and max_tokens of the running
                requests, int64 [running, 3]. It is called only before a simulation.
        """
        self._queued_steps += 1
        if self._ended - self._rehearsed_at >= _ANEW and self._may_rehearse():
            self._anew(running)
        if not self._worth_it() or self._is_burst(in_system):
            self.choice = None
            return VLLM
        clients = max(1, round(min(in_system, self._usual)))
        place = math.log(clients, _LEVEL)
        if abs(place - self._level) > _LEVEL_WIDTH:
            self._level = round(place)
        if self._level not in self._choices:
            self._rehearse(self._level, clients, running)
        if (found := self._choices.get(self._level)) is not None:
            self.choice = found
        return VLLM if self.choice is None else self.choice.rule

    def _worth_it(self) -> bool:
        if self._failed or self.cost is None:
            return False
        if len(self._requests) < _KNOWN or self._ended < self._banned_until:
            return False
        if self.target_itl is not None:
            return True
        return self._lost >= _LOST or any(choice.rule != VLLM for choice in self._choices.values())

    def _is_burst(self, in_system: int) -> bool:
        """Return whether many more requests run or wait than usual (a burst).

        A burst finds free blocks, so its requests can start at once. A simulation, which looks at a full
        pool, would not show that.
        """
        return self.target_itl is None and min(in_system, self.engine.max_num_seqs) > _LEVEL * self._usual

    # -- rehearsals ----------------------------------------------------------------------------------------

    def _may_rehearse(self) -> bool:
        return not self.background or time.monotonic() >= self._idle_until

    def _anew(self, running: Callable[[], Int64Array]) -> None:
        """Discard the admission rules chosen so far, after comparing the last steps with the simulation.

        The last steps are those since the previous simulation.
        """
        cost, rows = self.cost, running()
        self._rehearsed_at = self._ended
        produced = int(rows[:, 1].sum())
        if cost is not None and self._seconds > 0:
            self._lost = self._recomputed * cost.prefill / self._seconds
            self._guard(cost, rows, abs(produced - self._running_tokens))
        self._running_tokens = produced
        held = self.choice is not None and self.choice.rule != VLLM
        self._choices = {}
        if held:  # keep the admission rule until a simulation with the same number of requests has run
            self._lost = max(self._lost, _LOST)
        self._recomputed = self._steps = self._held_steps = self._queued_steps = self._in_system = 0
        self._seconds = self._tokens = 0.0

    def _guard(self, cost: StepCost, running: Int64Array, changed: int) -> None:
        """Compare measured with simulated throughput, if the load was steady and requests waited in most steps.

        If vLLM's rule was in effect, the comparison shows how accurate the simulation is. If another rule was
        in effect, it shows whether that rule served less than vLLM's rule would have.

        Args:
            cost: The fitted cost of a step.
            running: Prompt tokens, output tokens so far and max_tokens of the running requests, int64
                [running, 3].
            changed: Absolute change of the running requests' total output tokens since the last simulation.
        """
        mixed = 0 < self._held_steps < self._steps
        finished = sum(output for _, output, _, end in self._requests if end > self.fit.steps - self._steps)
        steady = changed <= _STEADY * finished and self._queued_steps >= _QUEUED * self._steps
        if self.target_itl is not None or mixed or not steady:
            self._behind = 0
        elif self._held_steps or self._lost >= _LOST:
            served, clients = self._tokens / self._seconds, self._in_system // self._steps
            lengths = self._lengths(running, self._steps)
            self._run(self._judge, served, clients, lengths, cost, bool(self._held_steps))

    def _judge(self, served: float, clients: int, lengths: Lengths, cost: StepCost, held: bool) -> None:
        load = self._load(clients, lengths)
        if not len(load.output):
            return
        own = rehearse(load, self.engine, cost, VLLM).tokens_per_second
        if not held:
            self._accuracy += (served / own - self._accuracy) / 2
            return
        own *= self._accuracy
        self._behind = self._behind + 1 if served < _BEHIND * own else 0
        if self._behind < _WINDOWS:
            return
        self._behind, self._banned_until = 0, self._ended + _BANNED
        self.choice = None
        self.fallbacks += 1
        if self.fallbacks == 1:
            self.log.warning(
                "Tonnage admission: holding requests back served %.0f tokens/s, vLLM's rule is forecast to "
                "serve %.0f. vLLM's rule holds for the next %d requests.",
                served, own, _BANNED,
            )  # fmt: skip

    def _run(self, job: Callable[..., None], *arguments: object) -> None:
        """Run the simulation ``job`` in a thread of its own, or within this call for a simulated clock."""
        if not self.background:
            job(*arguments)
            return
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="tonnage-rehearsal")
        self._pending = self._worker.submit(self._alone, job, *arguments)

    def _alone(self, job: Callable[..., None], *arguments: object) -> None:
        """Run the simulation ``job`` in this thread; after an exception keep to vLLM's admission rule."""
        try:
            job(*arguments)
        except Exception:
            self._failed = True
            self.fallbacks += 1
            self.log.exception("Tonnage admission: a rehearsal failed, vLLM's rule holds from now on")

    def _rehearse(self, level: int, clients: int, running: Callable[[], Int64Array]) -> None:
        cost = self.cost
        assert cost is not None
        busy = self._pending is not None and not self._pending.done()
        if not self.background or (not busy and self._may_rehearse()):
            lengths = self._lengths(running(), self.fit.steps)
            self._run(self._choose, level, clients, lengths, cost, self._choices)

    def _lengths(self, running: Int64Array, window: int) -> Lengths:
        """Return prompt and output lengths of the requests of the last ``window`` engine steps, with weights.

        Fewer steps are used if requests that ended within the window are no longer remembered.
        """
        begin = max(self._since, self.fit.steps - window)
        rows = np.array(self._requests, np.int64)
        rows = rows[rows[:, 3] >= begin]
        return weigh(rows[:, :3], rows[:, 3] - begin, running, self.fit.steps - begin)

    def _choose(
        self, level: int, clients: int, lengths: Lengths, cost: StepCost, choices: dict[int, Choice]
    ) -> None:
        begin = time.monotonic()
        load = self._load(clients, lengths)
        if len(load.output) and lengths.unknown <= _UNKNOWN:
            own = rehearse(load, self.engine, cost, VLLM)
            others = [Choice(rule, rehearse(load, self.engine, cost, rule), own) for rule in RULES]
            holds = self.choice is not None and self.choice.rule != VLLM
            found = best([Choice(VLLM, own, own), *others], self.target_itl, STAY if holds else START)
            choices[level] = found
            self._say_cost(found)
        now = time.monotonic()
        self._idle_until = now + (now - begin) / _DUTY

    def _say_cost(self, choice: Choice) -> None:
        """Log once what ``target_itl`` costs in throughput, or that no admission rule meets it.

        ``target_itl`` is the upper bound of the P99 seconds between tokens.
        """
        if self.target_itl is None or self._cost_said:
            return
        self._cost_said = True
        begin = "target %.0f ms between tokens: P99 forecast %.0f ms"
        if choice.outcome.between_p99 > self.target_itl:
            begin = "no rule keeps the target of %.0f ms between tokens: the best has a P99 forecast of %.0f ms"
        self.log.info(
            f"Tonnage admission: {begin}, tokens/s %+.0f %% against vLLM's rule",
            1e3 * self.target_itl, 1e3 * choice.outcome.between_p99,
            100 * (choice.outcome.tokens_per_second / choice.own.tokens_per_second - 1),
        )  # fmt: skip

    def _load(self, clients: int, lengths: Lengths) -> Load:
        """Return a load to simulate: requests drawn from ``lengths``, without those longer than the pool.

        The load is empty if no request fits the pool, or if the requests are too long to be simulated.
        """
        most = (self.engine.blocks - 1) * self.engine.block_size
        fits = lengths.rows[:, 0] + lengths.rows[:, 1] <= most
        rows, weights, count = lengths.rows[fits], lengths.weights[fits], 0
        if weights.sum() > 0:
            weights = weights / weights.sum()
            count = min(2 * clients + _STEADY_REQUESTS, int(_MOST_TOKENS / float(rows[:, 1] @ weights)))
        # The simulation needs two requests per client.
        drawn = draw(Lengths(rows, weights, 0.0), count) if count >= 2 * max(1, clients) else rows[:0]
        prompt, output, max_tokens = np.ascontiguousarray(drawn.T)
        return Load(prompt, output, max_tokens, max(1, clients))


def best(choices: list[Choice], target_itl: float | None, bounds: tuple[Bounds, ...] = START) -> Choice:
    """Return the simulated admission rule with the most tokens per second that meets the latency conditions.

    Args:
        choices: Simulated admission rules with their figures; the first is vLLM's rule.
        target_itl: Upper bound of the P99 seconds between tokens, as the only condition. If no rule meets it,
            the rule with the smallest P99 is returned. None: ``bounds`` are the conditions.
        bounds: Alternative sets of bounds relative to vLLM's rule; a rule must meet one set.
    """
    if target_itl is not None:
        smooth = [each for each in choices if each.outcome.between_p99 <= target_itl]
        if not smooth:
            return min(choices, key=lambda each: each.outcome.between_p99)
        return max(smooth, key=lambda each: each.outcome.tokens_per_second)
    own = choices[0].own
    kept = [each for each in choices[1:] if any(_keeps(each.outcome, own, bound) for bound in bounds)]
    return max(kept, key=lambda each: each.outcome.tokens_per_second, default=choices[0])


def _keeps(outcome: Outcome, own: Outcome, bounds: Bounds) -> bool:
    """Return whether the figures of a simulated rule meet ``bounds`` relative to ``own``, vLLM's figures."""
    return (
        outcome.tokens_per_second >= bounds.tokens * own.tokens_per_second
        and outcome.first_p50 <= bounds.first * own.first_p50
        and outcome.first_p99 <= bounds.first * own.first_p99
        and _is_smooth(outcome.between_p99, own.between_p99, bounds.between)
    )


def _is_smooth(between: float, own: float, bound: float) -> bool:
    """Return whether a rule's P99 time between tokens is about equal to vLLM's, or at most ``bound`` times it.

    Steps whose prompts fill the token budget can determine the P99; it is then equal under every rule.
    """
    return between <= bound * own or own * (1 - _SAME) <= between <= own


def auto_of(policy: Policy, limits: Limits) -> Auto | None:
    """Return the `Auto` that chooses the rule in admission mode ``auto``.

    Returns None in other modes, and for a layout without KV cache groups, whose requests hold no blocks.
    """
    if policy.mode is not AdmissionMode.AUTO or not limits.layout.groups:
        return None
    engine = Engine(
        limits.usable_blocks // len(limits.layout.groups), limits.layout.block_size,
        limits.max_num_batched_tokens, limits.max_num_seqs, limits.prefix_caching,
    )  # fmt: skip
    compile_rehearsal()  # compile the simulation before the first request arrives
    return Auto(engine, policy.target_itl)
