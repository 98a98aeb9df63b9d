"""Measurement of the durations of vLLM's steps, from the scheduler's `schedule` to `update_from_output`."""

from __future__ import annotations

import time
from typing import Any

from tonnage.server.engines.vllm.scheduler.admission import VllmAdmission

# Upper bound of the recorded steps in flight. vLLM has two in flight with async scheduling, plus one for each
# pipeline stage.
_MOST = 64


class StepTimes:
    """A reporter of step durations to the admission mode `auto`; in other modes it does nothing.

    With async scheduling, a step is scheduled while the previous one is still running. So its duration starts
    when it is scheduled or when the previous step returns, whichever is later.
    """

    def __init__(self, scheduler: Any, admission: VllmAdmission) -> None:
        self._scheduler, self._admission = scheduler, admission
        # Steps in flight: id() of vLLM's SchedulerOutput -> (start time, tokens, sequences, context tokens)
        self._under_way: dict[int, tuple[float, int, int, int]] = {}
        self._last = float("-inf")  # time when the last step returned
        self._recomputed = 0  # recomputed tokens reported to `auto` so far

    def scheduled(self, output: Any, begun: float) -> None:
        """Record a step that was scheduled at time `begun`, in seconds of the scheduler's clock."""
        tokens = output.total_num_scheduled_tokens
        auto, account = self._admission.auto, self._admission.account
        if auto is None or not tokens:
            return
        # With a simulated clock, no work runs in the background, because its time would not pass.
        auto.background = self._scheduler.clock is time.perf_counter
        auto.recomputed(account.recomputed - self._recomputed)
        self._recomputed = account.recomputed
        if len(self._under_way) == _MOST:  # more steps than vLLM has in flight: vLLM has dropped them
            self._under_way.clear()
        limits, pool = self._admission.limits, account.pool
        used = limits.usable_blocks - pool.get_num_free_blocks()
        context = used // max(1, self._admission.groups.count) * limits.layout.block_size
        self._under_way[id(output)] = begun, tokens, len(output.num_scheduled_tokens), context

    def back(self, output: Any) -> None:
        """Report the duration of a step that has returned."""
        found = self._under_way.pop(id(output), None)
        auto, scheduler = self._admission.auto, self._scheduler
        if found is None or auto is None:
            return
        now = scheduler.clock()
        begun, tokens, sequences, context = found
        in_system = len(scheduler.running) + len(scheduler.waiting)
        auto.stepped(tokens, sequences, context, now - max(begun, self._last), in_system)
        self._last = now
