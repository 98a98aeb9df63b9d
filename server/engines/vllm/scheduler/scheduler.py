"""vLLM's scheduler with Tonnage's admission in front of it.

vLLM decides what a step computes; before each step those who may not start yet, and those who have to sit it
out, are taken from its lists, and put back after it. Its blocks, prefix cache, chunks, priorities, LoRA and
encoder limits stay its own, and so does who already holds blocks while he waits (remote KV, streaming input).

What goes wrong in here never reaches a request: from the first exception on vLLM's own rule holds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request, RequestStatus

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.server.engines.vllm.eviction import LearnedQueue, install
from tonnage.server.engines.vllm.scheduler.account import Account
from tonnage.server.engines.vllm.scheduler.admission import VllmAdmission
from tonnage.server.engines.vllm.scheduler.groups import read_groups
from tonnage.server.engines.vllm.scheduler.options import read_eviction, read_policy
from tonnage.server.engines.vllm.scheduler.own import config_of
from tonnage.server.engines.vllm.scheduler.report import Report
from tonnage.server.engines.vllm.scheduler.step_times import StepTimes
from tonnage.server.engines.vllm.scheduler.versions import rules_of
from tonnage.server.engines.vllm.told import Told, put

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only

_STARTABLE = (RequestStatus.WAITING, RequestStatus.PREEMPTED)  # the others wait for something but room


class Admitting(Scheduler):
    """What `TonnageScheduler` adds to vLLM's scheduler, whichever it is."""

    admission: VllmAdmission | None = None
    _left_out = (0, 0)  # running and waiting requests that vLLM does not see while it schedules a step
    _held: Any = ()  # the waiting ones behind the last that may start
    _prefill_bound = False
    _plain: VllmAdmission | None = None  # says what never fits after a fallback, where no mode promises more
    fallbacks = 0  # exceptions of ours so far: 0 or 1
    _report: Report | None = None
    # Seconds from any origin. A simulation sets its own on the object (benchmarks/admission_matrix.py).
    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        policy = read_policy(self.vllm_config.additional_config)  # refuses what it does not know
        self.eviction: LearnedQueue | None = None  # vLLM's own
        if read_eviction(self.vllm_config.additional_config) == "learned":
            self.eviction = install(self.kv_cache_manager)
        self._refused: dict[str, tuple[RequestStatus, str]] = {}
        rules = rules_of(vllm.__version__)
        assert rules is not None  # `tonnage.server.engines.vllm.scheduler` has looked
        self._rules = rules
        with self._ours("at start"):
            self._account = Account(self, read_groups(self, rules))
            self._plain = VllmAdmission(Policy(AdmissionMode.GREEDY), self._account)
            self.admission = VllmAdmission(policy, self._account)
            if self.admission.auto is not None:
                self.admission.auto.log = logger
            self._times = StepTimes(self, self.admission)
            logger.info(
                "Tonnage admission: %s, %d usable blocks",
                policy.mode,
                self._account.groups.limits.usable_blocks,
            )
        if _is_heard(self.vllm_config):
            with self._telling():
                self._report = Report(self)

    # -- vLLM calls these ------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """As vLLM's; what can never fit is answered after the next step (`update_from_output`)."""
        super().add_request(request)
        if request.request_id not in self.requests:
            return
        blocks = 0
        if self._plain is not None:
            with self._ours("for a new request"):
                blocks = sum(self._account.reservation(request))
                self._refuse_never(request)
        if self._report is not None:
            with self._telling():
                self._report.added(request.request_id, blocks)

    def schedule(self, *args: Any, **named: Any) -> SchedulerOutput:
        """One step of vLLM's over those who may take part in it."""
        self._refuse_head()
        if self.admission is None:
            return super().schedule(*args, **named)
        greedy = self.admission.policy.mode is AdmissionMode.GREEDY
        allowed: list[Request] | None = None
        stalled: list[Request] = []
        free = 0
        if not greedy:
            with self._ours("before a step"):
                self._account.sync()
                self.admission.choose()
                if self.admission.mode is not AdmissionMode.GREEDY:
                    allowed, stalled = self._plan()
                free = self._account.pool.get_num_free_blocks()
        begun = self.clock()
        if self._report is not None:
            with self._telling():
                self._report.stepping()
        with self._only(allowed, stalled):
            output = super().schedule(*args, **named)
        if not greedy and self.admission is not None:
            with self._ours("after a step"):
                self._account.sync(output.num_scheduled_tokens)
                self.admission.took(free - self._account.pool.get_num_free_blocks())
                self._times.scheduled(output, begun)
        if self._report is not None:
            with self._telling():
                self._report.stepped(output, self.admission)
        return output

    def update_from_output(self, *args: Any, **named: Any) -> dict[int, EngineCoreOutputs]:
        """As vLLM's, with an answer to those that never fit."""
        ended: list[tuple[int, EngineCoreOutput]] = []
        if self._refused:
            with self._ours("when it refused a request"):
                ended = self._end_refused()
        if self.admission is not None:
            with self._ours("when a step came back"):
                self._times.back(args[0] if args else named["scheduler_output"])
        outputs = super().update_from_output(*args, **named)
        for client, each in ended:
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(each)
        return outputs

    def _free_request(self, request: Request, *args: Any, **named: Any) -> Any:
        if self._report is not None:
            with self._telling():
                self._report.left(request.request_id)
        if self.admission is not None:
            with self._ours("when a request ended"):
                self._account.leave(request.request_id)
                if _by_itself(request):
                    self.admission.ended(request)
                self._account.found.pop(request.request_id, None)
        return super()._free_request(request, *args, **named)

    def _preempt_request(self, request: Request, *args: Any, **named: Any) -> None:
        if self.admission is not None:
            with self._ours("when a request was preempted"):
                self._account.leave(request.request_id)
        super()._preempt_request(request, *args, **named)

    def get_request_counts(self) -> tuple[int, int]:
        """Return vLLM's counts of running and waiting requests, with the requests left out of this step.

        vLLM 0.31 to 0.33 reads from them whether prefills fell behind (`prefill_capacity_bound`), and in
        `schedule` whether a request is alone.
        """
        running, waiting = super().get_request_counts()
        return running + self._left_out[0], waiting + self._left_out[1]

    @property
    def prefill_capacity_bound(self) -> bool:
        """Whether requests were still waiting after the last step that could start prefills."""
        return self._prefill_bound

    @prefill_capacity_bound.setter
    def prefill_capacity_bound(self, bound: bool) -> None:
        if not bound and self._held and not self._rules.counts:
            bound = any(request.status in _STARTABLE for request in self._held)
        self._prefill_bound = bound

    def make_stats(self, *args: Any, **named: Any) -> SchedulerStats | None:
        """As vLLM's, with what our stat logger takes out again (`tonnage.server.engines.vllm.told`)."""
        stats = super().make_stats(*args, **named)
        if stats is not None and self._report is not None:
            with self._telling():
                put(self._told(self._report), stats.waiting_lora_adapters)
        return stats

    def _told(self, report: Report) -> Told:
        admission = self.admission
        failures = self.fallbacks + (0 if self.eviction is None else self.eviction.stats.fallbacks)
        if admission is not None and admission.policy.mode is not AdmissionMode.GREEDY:
            return report.told(admission, str(admission.policy.mode), failures)
        return report.told(None, str(AdmissionMode.GREEDY), failures)

    # -- one step --------------------------------------------------------------------------------------------

    def _plan(self) -> tuple[list[Request], list[Request]]:
        """(those who may start, running ones that sit the step out)."""
        assert self.admission is not None
        if self._rules.mixed:
            self._sort_out()
        streaming = self.num_waiting_for_streaming_input
        room = getattr(self, self._rules.seats) - len(self.running) - streaming
        return self.admission.plan(self._candidates(), room, self.current_step)

    def _candidates(self) -> Iterator[Request]:
        """Who waits for room, in order; the others wait for something else and hold up nobody."""
        for request in self.waiting:
            if request.request_id in self._refused or not self._grammar_ready(request):
                continue
            if request.num_preemptions:
                if request.num_stale_output_tokens and not request.drop_stale_output:
                    continue  # tokens of before are still to come, as vLLM's scan asks
                if self._refuse_never(request):
                    continue
            yield request

    def _grammar_ready(self, request: Request) -> bool:
        """vLLM, which is asked here, answers those whose grammar has failed after the step."""
        if request.status != RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            return True
        return bool(getattr(self, self._rules.ready)(request))

    def _sort_out(self) -> None:
        """Who was passed over and holds no blocks waits for room again, before all others as in vLLM 0.30."""
        passed_over = getattr(self, self._rules.holders)
        out = [request for request in passed_over if not _holds_blocks(request)]
        if out:
            passed_over.remove_requests(out)
        for request in reversed(out):
            self.waiting.prepend_request(request)

    # -- what never fits -------------------------------------------------------------------------------------

    def _refuse_never(self, request: Request) -> bool:
        """Whether it can never fit; it is answered after the next step, with what it has if it has anything."""
        rule = self.admission or self._plain
        why = None if rule is None else rule.never(request)
        if rule is None or why is None:
            return False
        status = (
            RequestStatus.FINISHED_LENGTH_CAPPED if request.num_output_tokens else RequestStatus.FINISHED_ERROR
        )
        self._refused[request.request_id] = status, why
        if self._report is not None:
            self._report.never(rule.missing(request))
        logger.warning("Tonnage refuses request %s: %s", request.request_id, why)
        return True

    def _refuse_head(self) -> None:
        """Refuse the first waiting request if it does not fit an empty pool, lest it block those behind it.

        In modes with a plan only a preempted request is checked, as it has grown since it was added.
        """
        if self._plain is None or not self.waiting:
            return
        with self._ours("before a step"):
            head = self.waiting.peek_request()
            if head.request_id in self._refused or (self.admission is not None and not head.num_preemptions):
                return
            if not head.num_stale_output_tokens or head.drop_stale_output:
                self._refuse_never(head)

    def _end_refused(self) -> list[tuple[int, EngineCoreOutput]]:
        """Finish the refused requests that have not been aborted meanwhile; return (client, answer) of each.

        A request leaves ``_refused`` with its answer, so that an exception loses none.
        """
        ended: list[tuple[int, EngineCoreOutput]] = []
        for id, (status, why) in list(self._refused.items()):
            request = self.requests.get(id)
            if request is None or request.is_finished():
                del self._refused[id]
                continue
            with self._ours("when it refused a request"):
                reason = RequestStatus.get_finished_reason(status)
                answer = EngineCoreOutput(
                    request_id=id, new_token_ids=[], finish_reason=reason, stop_reason=why
                )
                try:
                    self.finish_requests(id, status)
                finally:
                    if request.is_finished():
                        ended.append((request.client_index, answer))
                        del self._refused[id]
                answer.events, answer.trace_headers = request.take_events(), request.trace_headers
        return ended

    # -- taking out and putting back -------------------------------------------------------------------------

    @contextmanager
    def _only(self, allowed: list[Request] | None, stalled: list[Request]) -> Iterator[None]:
        """Only ``allowed`` wait (None: all), ``stalled`` do not run; afterwards all are back in place."""
        if allowed is None:
            yield
            return
        everybody, before = self.waiting, self.running
        seats = self._rules.seats
        most = getattr(self, seats)
        passed: list[Request] = []
        out = set(stalled)
        with self._ours("before a step"):
            if everybody:
                self.waiting = create_request_queue(self.policy)
                passed = self._take(everybody, set(allowed))
            if stalled:
                self.running = [request for request in before if request not in out]
                setattr(self, seats, most - len(stalled))
        if self.admission is None:
            self._gather()
            everybody, stalled = self.waiting, []
        elif self.waiting is not everybody:
            waiting = len(everybody) + len(passed) - len(self.waiting)
            self._left_out, self._held = (len(stalled), waiting), everybody
        else:
            self._left_out = len(stalled), 0
        try:
            yield
        finally:
            self._left_out, self._held = (0, 0), ()
            setattr(self, seats, most)
            with self._ours("after a step"):
                if stalled:
                    still, known = set(self.running) | out, set(before)
                    self.running = [
                        *(request for request in before if request in still),
                        *(request for request in self.running if request not in known),
                    ]
                if self.waiting is not everybody:
                    self._put_back(everybody, passed, allowed)
            if self.admission is None:
                self._gather()

    def _take(self, everybody: Any, allowed: set[Request]) -> list[Request]:
        """Move ``allowed`` into the empty ``self.waiting``; all that were taken out of ``everybody`` for it."""
        passed: list[Request] = []
        left = len(allowed)
        while left:
            request = everybody.pop_request()
            passed.append(request)
            if request in allowed:
                self.waiting.add_request(request)
                left -= 1
        return passed

    def _put_back(self, everybody: Any, passed: list[Request], allowed: list[Request]) -> None:
        """``everybody`` waits again: first whom vLLM has preempted, then who of ``passed`` did not start, in
        order."""
        waits, was = dict.fromkeys(self.waiting), set(passed)
        held = was.difference(allowed)
        first = [request for request in waits if request not in was]
        first += [request for request in passed if request in held or request in waits]
        self.waiting = everybody
        for request in reversed(first):
            everybody.prepend_request(request)

    # -- when it goes wrong ----------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Whom our failure has left in none of vLLM's lists is put back into his."""
        listed = {*self.running, *self.waiting, *getattr(self, self._rules.holders)}
        for request in self.requests.values():
            if request in listed or request.is_finished():
                continue
            if request.status == RequestStatus.RUNNING:
                self.running.append(request)
            else:
                self.waiting.add_request(request)

    @contextmanager
    def _ours(self, when: str) -> Iterator[None]:
        """Leave scheduling to vLLM from the first exception on; from a second one on, refuse nothing either."""
        try:
            yield
        except Exception:
            self.admission = None
            if self.fallbacks:
                self._plain = None
                logger.debug("Tonnage failed again %s", when, exc_info=True)
                return
            self.fallbacks = 1
            logger.exception("Tonnage failed %s: from now on vLLM schedules on its own", when)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """From the first exception in here on, nothing is told of the scheduler; admission goes on."""
        try:
            yield
        except Exception:
            self._report = None
            logger.exception("Tonnage failed to tell of its scheduler: it tells no more")


def _holds_blocks(request: Request) -> bool:
    """As Scheduler._holds_kv_blocks of vLLM 0.31."""
    return request.num_computed_tokens > 0 or request.status in (
        RequestStatus.WAITING_FOR_REMOTE_KVS,
        RequestStatus.WAITING_FOR_STREAMING_REQ,
    )


def _is_heard(config: Any) -> bool:
    """Whether somebody takes the report out of vLLM's statistics again: `tonnage serve --backend vllm`, or our
    stat logger where vLLM is not told to leave it out."""
    if config.parallel_config.worker_extension_cls.startswith("tonnage."):
        return True
    return "tonnage" in os.environ.get("VLLM_PLUGINS", "tonnage").split(",")


def _by_itself(request: Request) -> bool:
    """Whether its length says something of outputs: it was not cancelled. What ends at a stop string is
    aborted by vLLM's front end, which alone sees text."""
    sampling = request.sampling_params
    if sampling is None or not request.num_output_tokens:
        return False
    if request.status == RequestStatus.FINISHED_ABORTED:
        return bool(sampling.stop)
    return request.status != RequestStatus.FINISHED_ERROR


class TonnageSyncScheduler(Admitting):
    """With ``--no-async-scheduling``, or where vLLM switches it off."""


class TonnageScheduler(Admitting, AsyncScheduler):
    """``vllm serve MODEL --scheduler-cls tonnage.server.engines.vllm.scheduler.TonnageScheduler``.

    vLLM keeps async scheduling on only for subclasses of its AsyncScheduler; where it is off all the same, the
    object made is a `TonnageSyncScheduler`.
    """

    def __new__(cls, *args: Any, **named: Any) -> Any:
        if cls is TonnageScheduler and not config_of(args, named).scheduler_config.async_scheduling:
            return TonnageSyncScheduler(*args, **named)
        return super().__new__(cls)
