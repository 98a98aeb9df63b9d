"""Statistics of one vLLM engine, summed up from the messages that vLLM sends to a stat logger after each step.

A message has the running and waiting requests, the fraction of used blocks, and the tokens and finished
requests of the step. It lacks received and aborted requests, reservations and cached blocks. The metrics of
these values are absent unless Tonnage's scheduler runs in vLLM and adds them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tonnage.cache.admission import AdmissionRequest, Limits, reserved_blocks
from tonnage.server.engines.stats import EngineStats, MeasuredMemory
from tonnage.server.engines.vllm.core_stats import CoreStats
from tonnage.server.engines.vllm.stats_transport import AdmissionStats
from tonnage.server.observe.metrics.usage import RequestMix, TenantUsage
from tonnage.server.requests.counts import OUTCOMES, Outcome, RequestCounts

# vLLM's FinishReason (v1/engine/__init__.py, 0.32) -> Tonnage's outcome. A stop because of repetition counts as
# a stop.
_OUTCOMES: dict[str, Outcome] = {
    "stop": "stop", "length": "length", "abort": "aborted", "error": "error", "repetition": "stop",
}  # fmt: skip
# Outcomes that vLLM itself reports to a stat logger, without Tonnage's scheduler.
_REPORTED: tuple[Outcome, ...] = ("stop", "length", "error")


class EngineTotals:
    """The running totals of one vLLM engine's statistics.

    Args:
        num_blocks: number of KV blocks of the engine's pool, including the null block.
        limits: limits of the plan. Without a plan it is None, and the KV blocks of a request are unknown.
        caching: whether prompts are looked up in the prefix cache.
    """

    def __init__(self, num_blocks: int, limits: Limits | None, *, caching: bool) -> None:
        self.num_blocks = num_blocks
        self.counts = RequestCounts()
        self.mix = RequestMix()
        self.tenant = TenantUsage()
        self._limits = limits
        self._core = CoreStats(num_blocks, caching=caching)
        self._prompt_tokens = self._generation_tokens = self._hit_tokens = 0

    @property
    def admission(self) -> AdmissionStats | None:
        """Return the admission statistics of Tonnage's scheduler, or None when vLLM uses another scheduler."""
        return self._core.admission

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Return the request outcomes (stop, length, aborted ...) that can be counted for this engine.

        Without Tonnage's scheduler, vLLM reports no aborted and no rejected requests.
        """
        return _REPORTED if self.admission is None else OUTCOMES

    def record(self, scheduler: Any, iteration: Any) -> None:
        """Add vLLM's statistics of one engine step to the totals.

        Args:
            scheduler: vLLM's SchedulerStats, or None when the step has none.
            iteration: vLLM's IterationStats, or None when the step has none.
        """
        self._core.record(scheduler, iteration)
        if iteration is not None:
            self._of_iteration(iteration)
        if self.admission is None:
            self.counts.in_flight = self._core.unfinished
        else:
            self._settle(self.admission)
        self.tenant.in_flight = self.counts.in_flight

    def _settle(self, admission: AdmissionStats) -> None:
        """Compute the aborted requests and the requests in flight from the counts of Tonnage's scheduler.

        The number of aborted requests is the number of received requests, minus the finished and the unfinished
        ones. When a stop string matches, vLLM's front end finishes a request one step before the scheduler
        does. For one step, such a request counts as finished and as unfinished, so the result is too low.
        Therefore the count of aborted requests is never lowered.
        """
        counts = self.counts
        ended = sum(counts.outcomes[outcome] for outcome in _REPORTED)
        aborted = max(counts.outcomes["aborted"], admission.received - admission.unfinished - ended)
        counts.outcomes["aborted"] = self.tenant.outcomes["aborted"] = aborted
        counts.received = admission.received + counts.outcomes["rejected"]
        counts.in_flight = max(0, admission.received - ended - aborted)
        self.tenant.asked_blocks = admission.asked or 0

    def rejected(self, reason: str) -> None:
        """Count a request that vLLM's front end rejected.

        In vLLM 0.32 the reason is `max_num_queued_reqs` or `max_num_queued_tokens`.
        """
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
        """Return the engine's statistics as of its last step, with the measured memory added."""
        return replace(
            self._core.stats(memory),
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_hit_tokens=self._hit_tokens,
            shared_hit_tokens=None,
        )
