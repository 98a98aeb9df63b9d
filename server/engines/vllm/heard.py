"""What vLLM's engine cores tell after each step, as a snapshot: its own statistics, and beside them what our
scheduler says of its promises (`tonnage.server.engines.vllm.told`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tonnage.cache.results import EVICTION_CAUSES
from tonnage.server.engines.stats import EngineStats, MeasuredMemory, PoolStats, total
from tonnage.server.engines.vllm.told import Told, take


class Heard:
    """One engine core. ``num_blocks``: of its pool, the null block included. ``caching``: it looks prompts up
    in its prefix cache. ``told``: what our scheduler says before the first step; None: it does not run."""

    def __init__(self, num_blocks: int, *, caching: bool, told: Told | None = None) -> None:
        self.num_blocks, self.told = num_blocks, told
        self._caching, self._steps = caching, 0
        self._running = self._waiting = 0
        self._usage = 0.0
        self._preemptions = self._preempted_tokens = 0

    @property
    def unfinished(self) -> int:
        """Running and waiting after the last step."""
        return self._running + self._waiting

    def record(self, scheduler: Any, iteration: Any) -> None:
        """``scheduler``: a SchedulerStats or None, ``iteration``: an IterationStats or None."""
        if scheduler is not None:
            found = take(scheduler.waiting_lora_adapters)
            # Whether our scheduler runs is known with the first step; later it may fall silent.
            self.told = found if self._steps == 0 else found or self.told
            self._steps += 1
            self._running = scheduler.num_running_reqs
            self._waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            self._usage = scheduler.kv_cache_usage
            # A preempted request looks its tokens up again; what is not there is computed again, but for the
            # last one, which was sampled and not computed yet.
            looked = scheduler.prefix_cache_stats
            self._preempted_tokens += looked.preempted_queries - looked.preempted_hits
            self._preempted_tokens -= looked.preempted_requests
        if iteration is not None:
            self._preemptions += iteration.num_preempted_reqs

    def stats(self, memory: MeasuredMemory, *, idle: bool = False) -> EngineStats:
        """The snapshot now. vLLM on its own promises nothing: what is reserved is what is held. ``idle``:
        nobody is there any more, whatever the last step said."""
        told = self.told or Told("greedy")
        if idle and told.reserved is not None:
            told = replace(told, reserved=0, committed=0, waste=0)
        usable = max(0, self.num_blocks - 1)
        used = 0 if idle else min(usable, round(self._usage * usable))
        # Looked at once a second, so it may be of a moment when less was used.
        cached = None if told.cached is None else min(told.cached, usable - used)
        evicted: tuple[int, ...] = ()
        if told.cached is not None:
            evicted = tuple(told.evictions.get(("blocks", cause), 0) for cause in EVICTION_CAUSES)
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
                reserved=used if told.reserved is None else max(used, told.reserved),
                evictions=sum(evicted),
                evictions_by_cause=evicted,
                committed=told.committed,
                tail_waste_slots=told.waste,
            ),
            memory=memory,
            admissions=tuple((*key, count) for key, count in told.decisions.items()),
            refused_blocks=tuple((*key, count) for key, count in told.missing_blocks.items()),
            preemptions=self._preemptions,
            preempted_tokens=self._preempted_tokens if self._caching else None,
            invariant_violations=told.broken,
            admission_mode=told.mode,
            auto=told.auto,
        )


class Cores:
    """All engine cores behind one AsyncLLM; until one is there, the one of the plan. ``mode``: what was asked
    for."""

    def __init__(self, num_blocks: int, mode: str, *, caching: bool) -> None:
        self.messages = 0  # so far
        self.queued: dict[str, float | None] = {}  # seconds in the queue, of those that are asked for
        self._mode, self._caching = mode, caching
        self._heard = {0: self._new(num_blocks)}

    def _new(self, num_blocks: int) -> Heard:
        nothing = Told(self._mode, reserved=0, committed=0, waste=0, broken=0, cached=0)
        return Heard(num_blocks, caching=self._caching, told=nothing)

    def join(self, index: int, num_blocks: int) -> None:
        """One has started."""
        self._heard[index] = self._new(num_blocks)

    def record(self, index: int, scheduler: Any, iteration: Any) -> None:
        """As `Heard.record`."""
        self.messages += 1
        self._heard[index].record(scheduler, iteration)
        for finished in () if iteration is None else iteration.finished_requests:
            if finished.request_id in self.queued:
                self.queued[finished.request_id] = finished.queued_time

    def stats(self, memory: MeasuredMemory, *, idle: bool) -> EngineStats:
        """Of all of them together."""
        parts = [heard.stats(memory, idle=idle) for heard in self._heard.values()]
        return replace(total(parts), memory=memory)
