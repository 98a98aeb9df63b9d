"""Measurement of the durations of vLLM's steps, from the scheduler's `schedule` to `update_from_output`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from tonnage.server.engines.step_pace import StepPace
from tonnage.server.engines.vllm.scheduler.admission import VllmAdmission
from tonnage.server.engines.vllm.scheduler.key_shares import wish_of

# Upper bound of the recorded steps in flight. vLLM has two in flight with async scheduling, plus one for each
# pipeline stage.
_MOST = 64


class _Step(NamedTuple):
    """A vLLM step in flight: its start in seconds, and how many tokens and sequences it computes."""

    begun: float
    tokens: int
    prompt_tokens: int
    sequences: int
    context: int  # tokens of KV cache that the running requests hold


class StepTimes:
    """A meter of step durations, for the admission mode `auto` and for dividing steps among API keys.

    With async scheduling, a step is scheduled while the previous one is still running. So its duration starts
    when it is scheduled or when the previous step returns, whichever is later.
    """

    def __init__(self, scheduler: Any, admission: VllmAdmission) -> None:
        self._scheduler, self._admission = scheduler, admission
        self._pace = _pace_of(scheduler) if admission.shares.several else None
        self._under_way: dict[int, _Step] = {}  # steps in flight, keyed by the id() of vLLM's SchedulerOutput
        self._last = float("-inf")  # time when the last step returned
        self._recomputed = 0  # recomputed tokens reported to `auto` so far

    def budget(self, starting: Iterable[Any]) -> int:
        """Return the token budget of vLLM's next step.

        It is smaller while long prompts of one API key would delay the output of another (`StepPace`).

        Args:
            starting: the waiting requests that may start in the step.
        """
        most: int = self._scheduler.max_num_scheduled_tokens
        if self._pace is None:
            return most
        running = self._scheduler.running
        prompts = [each for each in running if each.num_computed_tokens < each.num_prompt_tokens]
        starting = [*prompts, *starting]
        if not starting or len(prompts) == len(running):
            return most
        decoding = [each for each in running if each.num_computed_tokens >= each.num_prompt_tokens]
        if len({wish_of(each).tenant for each in (*decoding, *starting)}) < 2:
            return most
        tokens = len(decoding) * (1 + self._scheduler.num_spec_tokens)
        return min(most, self._pace.budget(tokens))

    def scheduled(self, output: Any, begun: float) -> None:
        """Record a vLLM step that was scheduled at time `begun`, in seconds of the scheduler's clock."""
        tokens = output.total_num_scheduled_tokens
        auto, account = self._admission.auto, self._admission.account
        if (auto is None and self._pace is None) or not tokens:
            return
        if auto is not None:
            # With a simulated clock, run no work in the background: the clock would not count its time.
            auto.background = self._scheduler.clock is time.perf_counter
            auto.recomputed(account.recomputed - self._recomputed)
            self._recomputed = account.recomputed
        if len(self._under_way) == _MOST:
            # vLLM never has this many steps in flight, so some of the steps in the table were dropped by vLLM
            # and will never have an output.
            self._under_way.clear()
        limits, pool = self._admission.limits, account.pool
        used = limits.usable_blocks - pool.get_num_free_blocks()
        context = used // max(1, self._admission.groups.count) * limits.layout.block_size
        chunks = output.num_scheduled_tokens.values()
        prompts = sum([chunk for chunk in chunks if chunk > 1 + self._scheduler.num_spec_tokens])
        self._under_way[id(output)] = _Step(begun, tokens, prompts, len(chunks), context)

    def back(self, output: Any) -> None:
        """Report the duration of a vLLM step whose output has arrived."""
        step = self._under_way.pop(id(output), None)
        auto, scheduler = self._admission.auto, self._scheduler
        if step is None:
            return
        now = scheduler.clock()
        seconds = now - max(step.begun, self._last)
        self._last = now
        if self._pace is not None:
            self._pace.took(step.prompt_tokens, seconds)
        if auto is not None:
            in_system = len(scheduler.running) + len(scheduler.waiting)
            auto.stepped(step.tokens, step.sequences, step.context, seconds, in_system)


def _pace_of(scheduler: Any) -> StepPace | None:
    """Return the `StepPace` of a vLLM scheduler, or None if vLLM cannot divide prompts into smaller chunks."""
    config, cache = scheduler.scheduler_config, scheduler.cache_config
    if not config.enable_chunked_prefill or config.disable_chunked_mm_input:
        return None
    # vLLM divides prompts of models with recurrent states at block boundaries, so the smallest budget of a step
    # is a whole block.
    blocks = (cache.block_size, getattr(cache, "mamba_block_size", None))
    return StepPace(scheduler.max_num_scheduled_tokens, max(size or 0 for size in blocks))
