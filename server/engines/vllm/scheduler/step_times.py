"""What each step of vLLM took, measured where its scheduler sees it: from `schedule` to
`update_from_output`."""

from __future__ import annotations

import time
from typing import Any

from tonnage.server.engines.vllm.scheduler.admission import VllmAdmission

# Steps that may be on their way at once; vLLM keeps two with async scheduling, one more for each pipeline
# stage.
_MOST = 64


class StepTimes:
    """Tells the mode ``auto`` what steps took; nothing in other modes.

    With async scheduling a step is scheduled while the one before still runs, so a step lasts from its
    schedule, or from when the one before came back, whichever is later.
    """

    def __init__(self, scheduler: Any, admission: VllmAdmission) -> None:
        self._scheduler, self._admission = scheduler, admission
        self._under_way: dict[
            int, tuple[float, int, int, int]
        ] = {}  # by the identity of vLLM's SchedulerOutput
        self._last = float("-inf")  # when a step came back last
        self._recomputed = 0  # tokens, of those that the account has counted

    def scheduled(self, output: Any, begun: float) -> None:
        """Note a step that was scheduled at ``begun``, seconds of the scheduler's clock."""
        tokens = output.total_num_scheduled_tokens
        auto, account = self._admission.auto, self._admission.account
        if auto is None or not tokens:
            return
        auto.background = self._scheduler.clock is time.perf_counter  # else the clock stands still meanwhile
        auto.recomputed(account.recomputed - self._recomputed)
        self._recomputed = account.recomputed
        if len(self._under_way) == _MOST:  # vLLM has dropped them
            self._under_way.clear()
        limits, pool = self._admission.limits, account.pool
        used = limits.usable_blocks - pool.get_num_free_blocks()
        context = used // max(1, self._admission.groups.count) * limits.layout.block_size
        self._under_way[id(output)] = begun, tokens, len(output.num_scheduled_tokens), context

    def back(self, output: Any) -> None:
        """Note that a step has come back."""
        found = self._under_way.pop(id(output), None)
        auto, scheduler = self._admission.auto, self._scheduler
        if found is None or auto is None:
            return
        now = scheduler.clock()
        begun, tokens, sequences, context = found
        in_system = len(scheduler.running) + len(scheduler.waiting)
        auto.stepped(tokens, sequences, context, now - max(begun, self._last), in_system)
        self._last = now
