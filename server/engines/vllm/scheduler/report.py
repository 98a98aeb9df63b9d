"""Collection of the counts of requests and KV blocks that our metrics need and vLLM's statistics lack."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

from tonnage.server.engines.stats import stats_of_auto
from tonnage.server.engines.vllm.scheduler.admission import VllmAdmission
from tonnage.server.engines.vllm.scheduler.pool import Evictions, cached_blocks
from tonnage.server.engines.vllm.stats_transport import AdmissionStats

# Seconds between two updates of statistics that take O(running) time. Prometheus scrapes less often.
_LOOK_SECONDS = 1.0


class Report:
    """A collector of statistics of one vLLM scheduler, which costs a few dictionary updates per step."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._received = 0
        self._asked: dict[str, int] = {}  # upper bound of the blocks of each unfinished request, by id
        self._asked_blocks = 0  # sum of the values of `_asked`
        self._decisions: Counter[tuple[str, str]] = Counter()
        self._missing: Counter[tuple[str, str]] = Counter()
        self._waited: set[str] = set()  # ids of unfinished requests that had to wait
        self._looked = float("-inf")  # time of the last update that visited all running requests
        # number of reserved blocks at the last update that visited all running requests
        self._reserved_then = 0
        self._committed = self._waste = self._broken = self._cached = 0
        self._evictions = Evictions(scheduler.kv_cache_manager)

    def added(self, id: str, blocks: int) -> None:
        """Count a new request, with `blocks` as the upper bound of its KV blocks."""
        if id not in self._asked:  # the id is known if a streaming session adds its request again
            self._received += 1
            self._asked[id] = blocks
            self._asked_blocks += blocks

    def left(self, id: str) -> None:
        """Stop counting a request as unfinished, because it has ended."""
        self._asked_blocks -= self._asked.pop(id, 0)
        self._waited.discard(id)

    def never(self, missing: int) -> None:
        """Count a rejected request for which an empty pool lacks `missing` KV blocks."""
        self._decisions["never", "blocks"] += 1
        self._missing["never", "blocks"] += missing

    def stepping(self) -> None:
        """Record that the scheduler begins a step, for the causes of evictions in it."""
        scheduler = self._scheduler
        holding = getattr(scheduler, scheduler._names.holders)
        self._evictions.stepping(not (scheduler._inflight_prefills or holding or scheduler.connector))

    def stepped(self, output: Any, admission: VllmAdmission | None) -> None:
        """Count the admission decisions of a scheduled step.

        A waiting request counts once, when it is first at the head of the queue. Requests behind the head were
        not decided on.
        """
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
        if seated >= getattr(scheduler, scheduler._names.seats):
            self._decisions["wait", "sequences"] += 1
        elif short or output.total_num_scheduled_tokens < scheduler.max_num_scheduled_tokens:
            self._decisions["wait", "blocks"] += 1
            self._missing["wait", "blocks"] += short
        else:  # a wait for the token budget of a step is not an admission decision
            return
        self._waited.add(head)

    def stats(self, admission: VllmAdmission | None, mode: str, failures: int) -> AdmissionStats:
        """Return the scheduler's current counts of requests and KV blocks.

        Args:
            admission: the admission, or None if vLLM schedules on its own and reserves nothing.
            mode: the admission mode.
            failures: exceptions in our code so far.
        """
        now = time.monotonic()
        look = now - self._looked >= _LOOK_SECONDS or not self._scheduler.running
        if look:
            self._looked = now
            self._cached = cached_blocks(self._scheduler.kv_cache_manager)
        stats = AdmissionStats(
            mode, self._received, len(self._asked), failures, cached=self._cached,
            decisions=dict(self._decisions), missing_blocks=dict(self._missing),
            evictions={("blocks", cause): count for cause, count in self._evictions.counts.items()},
        )  # fmt: skip
        if admission is None:
            return stats
        admission.account.sync()  # remove requests that finished in this step
        if look:
            self._reserved_then = admission.account.reserved
            self._committed, self._waste = admission.committed(), admission.account.waste()
            self._broken += admission.account.broken()
        # Add the change of the reservations since the last update: a request that has started or ended since
        # then counts with its whole reservation.
        reserved = admission.account.reserved
        committed = self._committed + reserved - self._reserved_then
        committed = max(0, min(committed, admission.limits.usable_blocks))
        return replace(
            stats, reserved=reserved, committed=committed, asked=self._asked_blocks,
            waste=self._waste, broken=self._broken, auto=stats_of_auto(admission.auto),
        )  # fmt: skip
