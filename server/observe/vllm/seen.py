"""What vLLM has told of one engine, step by step, as the snapshots the families are made of.

vLLM tells a stat logger, after each step, how many run and wait, the share of blocks in use, and what became of
the tokens and requests of the step. It does not tell who came and who hung up, what was promised, and which of
the free blocks are cached: those families are absent, but for what our scheduler, where it runs, tells beside.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tonnage.cache.admission import AdmissionRequest, Limits, reserved_blocks
from tonnage.server.engines.stats import EngineStats, MeasuredMemory
from tonnage.server.engines.vllm.heard import Heard
from tonnage.server.engines.vllm.told import Told
from tonnage.server.observe.metrics.usage import RequestMix, TenantUsage
from tonnage.server.requests.counts import OUTCOMES, Outcome, RequestCounts

# FinishReason (v1/engine/__init__.py, 0.32) -> our outcome; vLLM ends what repeats itself as a stop.
_OUTCOMES: dict[str, Outcome] = {
    "stop": "stop", "length": "length", "abort": "aborted", "error": "error", "repetition": "stop",
}  # fmt: skip
# What a stat logger hears of.
_HEARD: tuple[Outcome, ...] = ("stop", "length", "error")


class Seen:
    """One engine. ``num_blocks``: of its pool, the null block included. ``limits`` None: there is no plan, so
    nobody knows what a request asks for. ``caching``: vLLM looks prompts up in its prefix cache."""

    def __init__(self, num_blocks: int, limits: Limits | None, *, caching: bool) -> None:
        self.num_blocks = num_blocks
        self.counts = RequestCounts()
        self.mix = RequestMix()
        self.tenant = TenantUsage()
        self._limits = limits
        self._heard = Heard(num_blocks, caching=caching)
        self._prompt_tokens = self._generation_tokens = self._hit_tokens = 0

    @property
    def told(self) -> Told | None:
        """None: our scheduler does not run."""
        return self._heard.told

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Those that are known."""
        return _HEARD if self.told is None else OUTCOMES

    def record(self, scheduler: Any, iteration: Any) -> None:
        """``scheduler``: a SchedulerStats or None, ``iteration``: an IterationStats or None."""
        self._heard.record(scheduler, iteration)
        if iteration is not None:
            self._of_iteration(iteration)
        if self.told is None:
            self.counts.in_flight = self._heard.unfinished
        else:
            self._settle(self.told)
        self.tenant.in_flight = self.counts.in_flight

    def _settle(self, told: Told) -> None:
        """received = outcomes + in flight. Who left without an outcome hung up; vLLM's front end ends a request
        at a stop string a step before the scheduler hears of it, so no count may go back."""
        counts = self.counts
        ended = sum(counts.outcomes[outcome] for outcome in _HEARD)
        aborted = max(counts.outcomes["aborted"], told.received - told.unfinished - ended)
        counts.outcomes["aborted"] = self.tenant.outcomes["aborted"] = aborted
        counts.received = told.received + counts.outcomes["rejected"]
        counts.in_flight = max(0, told.received - ended - aborted)
        self.tenant.asked_blocks = told.asked or 0

    def rejected(self, reason: str) -> None:
        """vLLM's front end has turned a request away (0.32: ``max_num_queued_reqs`` or ``_tokens``)."""
        self.counts.refused["wait", reason] += 1
        self.counts.outcomes["rejected"] += 1
        self.tenant.outcomes["rejected"] += 1
        self.counts.received += 1

    def _of_iteration(self, stats: Any) -> None:
        self._prompt_tokens += stats.prompt_token_stats.total
        self._hit_tokens += stats.prompt_token_stats.cached_tokens
        self._generation_tokens += stats.num_generation_tokens
        for seconds in stats.time_to_first_tokens_iter:
            self.counts.time_to_first_token.observe(seconds)
        for seconds in stats.inter_token_latencies_iter:
            self.counts.inter_token_latency.observe(seconds)
        for request in stats.finished_requests:
            self._finished(request)

    def _finished(self, request: Any) -> None:
        outcome = _OUTCOMES.get(str(request.finish_reason), "error")
        self.counts.outcomes[outcome] += 1
        self.tenant.outcomes[outcome] += 1
        self.tenant.prompt_tokens += request.num_prompt_tokens
        self.tenant.generation_tokens += request.num_generation_tokens
        self.counts.queue_wait.observe(request.queued_time)
        if outcome in ("stop", "length"):
            self.counts.completed(request.e2e_latency)
        if self._limits is not None:
            room = self._limits.max_model_len - request.num_prompt_tokens
            most = max(1, min(request.max_tokens_param or room, room))
            asked = AdmissionRequest(max(1, request.num_prompt_tokens), most)
            self.mix.observe(reserved_blocks(asked, self._limits), 1)

    def stats(self, memory: MeasuredMemory) -> EngineStats:
        """The snapshot now."""
        return replace(
            self._heard.stats(memory),
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_hit_tokens=self._hit_tokens,
            shared_hit_tokens=None,
        )
