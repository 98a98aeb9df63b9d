"""Durations of vLLM's steps, measured in its scheduler from `schedule` to `update_from_output`."""

from __future__ import annotations

import time
from typing import Any

from tonnage.server.engines.vllm.scheduler.admission import VllmAdmission

# Upper bound of the steps in flight. vLLM keeps two with async scheduling and one more for each pipeline stage.
_MOST = 64


class StepTimes:
    """A reporter of step durations to the mode `auto`; it does nothing in other modes.

    With async scheduling a step is scheduled while the one before still runs. So a step lasts from its
    schedule, or from the return of the step before, whichever is later.
    """

    def __init__(self, scheduler: Any, admission: VllmAdmission) -> None:
        self._scheduler, self._admission = scheduler, admission
        # id() of vLLM's SchedulerOutput -> (begun, tokens, sequences, context)
        self._under_way: dict[int, tuple[float, int, int, int]] = {}
        self._last = float("-inf")  # time when the last step came back
        self._recomputed = 0  # recomputed tokens that `auto` knows of

    def scheduled(self, output: Any, begun: float) -> None:
        """Note a step that was scheduled at `begun`, seconds of the scheduler's clock."""
        tokens = output.total_num_scheduled_tokens
        auto, account = self._admission.auto, self._admission.account
        if auto is None or not tokens:
            return
        auto.background = self._scheduler.clock is time.perf_counter  # a simulated clock stands still meanwhile
        auto.recomputed(account.recomputed - self._recomputed)
        self._recomputed = account.recomputed
        if len(self._under_way) == _MOST:  # vLLM has dropped these steps
            self._under_way.clear()
        limits, pool = self._admission.limits, account.pool
        used = limits.usable_blocks - pool.get_num_free_blocks()
        context = used // max(1, self._admission.groups.count) * limits.layout.block_size
        self._under_way[id(output)] = begun, tokens, len(output.num_scheduled_tokens), context

    def back(self, output: Any) -> None:
        """Report the duration of a step that has come back."""
        found = self._under_way.pop(id(output), None)
        auto, scheduler = self._admission.auto, self._scheduler
        if found is None or auto is None:
            return
        now = scheduler.clock()
        begun, tokens, sequences, context = found
        in_system = len(scheduler.running) + len(scheduler.waiting)
        auto.stepped(tokens, sequences, context, now - max(begun, self._last), in_system)
        self._last = now
