"""Statistics of vLLM's engine cores, taken from the messages that the cores send after each step.

A message has vLLM's own statistics, and the values that our scheduler adds to them
(`tonnage.server.engines.vllm.stats_transport`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tonnage.cache.results import EVICTION_CAUSES
from tonnage.server.engines.stats import EngineStats, MeasuredMemory, PoolStats, total
from tonnage.server.engines.vllm.stats_transport import AdmissionStats, take_stats


class CoreStats:
    """The statistics of one of vLLM's engine cores.

    Args:
        num_blocks: number of blocks of its KV pool, including the null block.
        caching: whether prompts are looked up in the prefix cache.
        admission: our scheduler's statistics before the first step; None if vLLM's own scheduler runs.
    """

    def __init__(self, num_blocks: int, *, caching: bool, admission: AdmissionStats | None = None) -> None:
        self.num_blocks, self.admission = num_blocks, admission
        self._caching, self._steps = caching, 0
        self._running = self._waiting = 0
        self._usage = 0.0
        self._preemptions = self._preempted_tokens = 0

    @property
    def unfinished(self) -> int:
        """Return the number of requests that ran or waited in the engine core after its last step."""
        return self._running + self._waiting

    def record(self, scheduler: Any, iteration: Any) -> None:
        """Update the statistics from one message that the engine core sent after a step.

        Args:
            scheduler: vLLM's SchedulerStats or None.
            iteration: vLLM's IterationStats or None.
        """
        if scheduler is not None:
            found = take_stats(scheduler.waiting_lora_adapters)
            # The first step shows whether our scheduler runs. If it stops reporting later, after an error, keep
            # the last values.
            self.admission = found if self._steps == 0 else found or self.admission
            self._steps += 1
            self._running = scheduler.num_running_reqs
            self._waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            self._usage = scheduler.kv_cache_usage
            # Count the tokens that preempted requests recompute. A preempted request looks all its tokens up in
            # the prefix cache and recomputes the misses. Its last token was sampled but not computed before, so
            # it does not count.
            looked = scheduler.prefix_cache_stats
            self._preempted_tokens += looked.preempted_queries - looked.preempted_hits
            self._preempted_tokens -= looked.preempted_requests
        if iteration is not None:
            self._preemptions += iteration.num_preempted_reqs

    def stats(self, memory: MeasuredMemory, *, idle: bool = False) -> EngineStats:
        """Return the statistics of one engine core after its last step.

        vLLM's own scheduler reserves nothing, so its used blocks are reported as reserved.

        Args:
            memory: measured bytes, returned unchanged in the statistics.
            idle: True if no request is left. Requests that the last message still counts are then ignored.
        """
        admission = self.admission or AdmissionStats("greedy")
        if idle and admission.reserved is not None:
            admission = replace(admission, reserved=0, committed=0, waste=0)
        usable = max(0, self.num_blocks - 1)
        used = 0 if idle else min(usable, round(self._usage * usable))
        # The number of cached blocks is up to one second old, and more blocks may be in use now.
        cached = None if admission.cached is None else min(admission.cached, usable - used)
        evicted: tuple[int, ...] = ()
        if admission.cached is not None:
            evicted = tuple(admission.evictions.get(("blocks", cause), 0) for cause in EVICTION_CAUSES)
        return EngineStats(
            ready=True,
            running=0 if idle else self._running,
            waiting=0 if idle else self._waiting,
            pool=PoolStats(
                self.num_blocks,
                usable,
                used,
                cached,
                usable - used - (cached or 0),
                reserved=used if admission.reserved is None else max(used, admission.reserved),
                evictions=sum(evicted),
                evictions_by_cause=evicted,
                committed=admission.committed,
                tail_waste_slots=admission.waste,
            ),
            memory=memory,
            admissions=tuple((*key, count) for key, count in admission.decisions.items()),
            refused_blocks=tuple((*key, count) for key, count in admission.missing_blocks.items()),
            preemptions=self._preemptions,
            preempted_tokens=self._preempted_tokens if self._caching else None,
            invariant_violations=admission.broken,
            admission_mode=admission.mode,
            auto=admission.auto,
        )


class EngineCores:
    """The statistics of all of vLLM's engine cores behind one AsyncLLM.

    Until the first core has started, core 0 is reported with the planned number of blocks.

    Args:
        num_blocks: planned number of blocks.
        mode: configured admission mode.
        caching: whether prompts are looked up in the prefix cache.
    """

    def __init__(self, num_blocks: int, mode: str, *, caching: bool) -> None:
        self.messages = 0  # number of statistics messages received from vLLM's engine cores.
        # Seconds in vLLM's queue by request id. `record` sets only the values of ids that are already keys.
        self.queued: dict[str, float | None] = {}
        self._mode, self._caching = mode, caching
        self._cores = {0: self._new(num_blocks)}

    def _new(self, num_blocks: int) -> CoreStats:
        nothing = AdmissionStats(self._mode, reserved=0, committed=0, waste=0, broken=0, cached=0)
        return CoreStats(num_blocks, caching=self._caching, admission=nothing)

    def join(self, index: int, num_blocks: int) -> None:
        """Add engine core `index`, which has started with a pool of `num_blocks` KV blocks."""
        self._cores[index] = self._new(num_blocks)

    def record(self, index: int, scheduler: Any, iteration: Any) -> None:
        """Update the statistics of engine core `index` from one message that it sent after a step.

        `scheduler` is vLLM's SchedulerStats and `iteration` its IterationStats, or None.
        """
        self.messages += 1
        self._cores[index].record(scheduler, iteration)
        for finished in () if iteration is None else iteration.finished_requests:
            if finished.request_id in self.queued:
                self.queued[finished.request_id] = finished.queued_time

    def stats(self, memory: MeasuredMemory, *, idle: bool) -> EngineStats:
        """Return the statistics summed over all of vLLM's engine cores.

        Args:
            memory: measured bytes, returned unchanged in the statistics.
            idle: True if no request is left. Requests that the last messages still count are then ignored.
        """
        parts = [core.stats(memory, idle=idle) for core in self._cores.values()]
        return replace(total(parts), memory=memory)
