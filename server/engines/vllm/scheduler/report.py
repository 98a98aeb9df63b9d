"""What the scheduler knows and vLLM's statistics do not say, counted as it happens (`Told`)."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

from tonnage.server.engines.stats import stats_of_auto
from tonnage.server.engines.vllm.scheduler.admission import VllmAdmission
from tonnage.server.engines.vllm.scheduler.pool import Evictions, cached_blocks
from tonnage.server.engines.vllm.told import Told, auto_numbers

# Seconds between two looks at every running request. Nobody scrapes more often.
_LOOK_SECONDS = 1.0


class Report:
    """Of one scheduler; its hooks cost a few dictionary entries a step."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._received = 0
        self._asked: dict[str, int] = {}  # unfinished requests -> most blocks each ever holds
        self._asked_blocks = 0  # their sum
        self._decisions: Counter[tuple[str, str]] = Counter()
        self._missing: Counter[tuple[str, str]] = Counter()
        self._waited: set[str] = set()  # unfinished requests that had to wait
        self._looked = float("-inf")
        self._reserved_then = 0  # at the last look
        self._committed = self._waste = self._broken = self._cached = 0
        self._evictions = Evictions(scheduler.kv_cache_manager)

    def added(self, id: str, blocks: int) -> None:
        """A request has come that may hold so many blocks."""
        if id not in self._asked:  # a streaming session adds to itself
            self._received += 1
            self._asked[id] = blocks
            self._asked_blocks += blocks

    def left(self, id: str) -> None:
        """A request is finished, however that came."""
        self._asked_blocks -= self._asked.pop(id, 0)
        self._waited.discard(id)

    def never(self, missing: int) -> None:
        """A request can never fit: so many blocks are missing."""
        self._decisions["never", "blocks"] += 1
        self._missing["never", "blocks"] += missing

    def stepping(self) -> None:
        """A step begins."""
        scheduler = self._scheduler
        holding = getattr(scheduler, scheduler._rules.holders)
        self._evictions.stepping(not (scheduler._inflight_prefills or holding or scheduler.connector))

    def stepped(self, output: Any, admission: VllmAdmission | None) -> None:
        """A step is scheduled. Who is the first to wait is counted once; those behind him are not asked."""
        self._evictions.stepping(False)
        started, resumed = len(output.scheduled_new_reqs), len(output.scheduled_cached_reqs.resumed_req_ids)
        if started:
            self._decisions["admit", "fits"] += started
        if resumed:
            self._decisions["admit", "resumed"] += resumed
        waiting = self._scheduler.waiting
        if not waiting:
            return
        head = waiting.peek_request().request_id
        if head in self._waited:
            return
        short = 0 if admission is None else admission.short_of(head)
        scheduler = self._scheduler
        seated = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
        if seated >= getattr(scheduler, scheduler._rules.seats):
            self._decisions["wait", "sequences"] += 1
        elif short or output.total_num_scheduled_tokens < scheduler.max_num_scheduled_tokens:
            self._decisions["wait", "blocks"] += 1
            self._missing["wait", "blocks"] += short
        else:  # it waits for the token budget of one step: that is no decision
            return
        self._waited.add(head)

    def told(self, admission: VllmAdmission | None, mode: str, failures: int) -> Told:
        """``admission`` None: vLLM schedules on its own, nothing is reserved."""
        now = time.monotonic()
        look = now - self._looked >= _LOOK_SECONDS or not self._scheduler.running
        if look:
            self._looked = now
            self._cached = cached_blocks(self._scheduler.kv_cache_manager)
        told = Told(
            mode, self._received, len(self._asked), failures, cached=self._cached,
            decisions=dict(self._decisions), missing_blocks=dict(self._missing),
            evictions={("blocks", cause): count for cause, count in self._evictions.counts.items()},
        )  # fmt: skip
        if admission is None:
            return told
        admission.account.sync()  # who has finished in this step holds nothing
        if look:
            self._reserved_then = admission.account.reserved
            self._committed, self._waste = admission.committed(), admission.account.waste()
            self._broken += admission.account.broken()
        # Who came and left since the last look counts with all that is reserved for him.
        reserved = admission.account.reserved
        committed = self._committed + reserved - self._reserved_then
        committed = max(0, min(committed, admission.limits.usable_blocks))
        return replace(
            told, reserved=reserved, committed=committed, asked=self._asked_blocks,
            waste=self._waste, broken=self._broken, **auto_numbers(stats_of_auto(admission.auto)),
        )  # fmt: skip
