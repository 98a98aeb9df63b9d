"""vLLM's scheduler with Tonnage's admission in front of it.

vLLM decides what a step computes. Before each step, requests that may not start yet and running requests that
skip the step are taken from its lists, and put back after the step. Blocks, prefix cache, chunks, priorities,
LoRA and encoder limits stay vLLM's own. So do waiting requests that already hold blocks (remote KV, streaming
input).

An exception in Tonnage's code never reaches a request: after the first one, vLLM's own rule holds.
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
from tonnage.server.engines.vllm.scheduler.fallback import config_of
from tonnage.server.engines.vllm.scheduler.groups import read_groups
from tonnage.server.engines.vllm.scheduler.options import read_eviction, read_policy
from tonnage.server.engines.vllm.scheduler.report import Report
from tonnage.server.engines.vllm.scheduler.step_times import StepTimes
from tonnage.server.engines.vllm.scheduler.versions import names_of
from tonnage.server.engines.vllm.stats_transport import AdmissionStats, write_stats

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only

_STARTABLE = (RequestStatus.WAITING, RequestStatus.PREEMPTED)  # other statuses wait for more than free blocks


class AdmissionMixin(Scheduler):
    """A mixin with admission for vLLM's synchronous and asynchronous scheduler."""

    admission: VllmAdmission | None = None
    _left_out = (0, 0)  # running and waiting requests hidden from vLLM while it schedules a step
    _held: Any = ()  # waiting requests behind the last that may start
    _prefill_bound = False
    _plain: VllmAdmission | None = None  # finds requests that never fit after a fallback, by the greedy rule
    fallbacks = 0  # exceptions of ours so far: 0 or 1
    _report: Report | None = None
    # Seconds from any origin. A simulation sets its own clock on the object (benchmarks/admission_matrix.py).
    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        policy = read_policy(self.vllm_config.additional_config)
        self.eviction: LearnedQueue | None = None  # None is vLLM's own eviction
        if read_eviction(self.vllm_config.additional_config) == "learned":
            self.eviction = install(self.kv_cache_manager)
        self._refused: dict[str, tuple[RequestStatus, str]] = {}
        names = names_of(vllm.__version__)
        assert names is not None  # checked by `tonnage.server.engines.vllm.scheduler`
        self._names = names
        with self._guarded("at start"):
            self._account = Account(self, read_groups(self, names))
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
        if _is_reported(self.vllm_config):
            with self._reporting():
                self._report = Report(self)

    # -- methods that vLLM calls -----------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Add a request as vLLM does. A request that can never fit is ended after the next step."""
        super().add_request(request)
        if request.request_id not in self.requests:
            return
        blocks = 0
        if self._plain is not None:
            with self._guarded("for a new request"):
                blocks = sum(self._account.reservation(request))
                self._refuse_never(request)
        if self._report is not None:
            with self._reporting():
                self._report.added(request.request_id, blocks)

    def schedule(self, *args: Any, **named: Any) -> SchedulerOutput:
        """Schedule a step of vLLM with only the requests that may take part in it."""
        self._refuse_head()
        if self.admission is None:
            return super().schedule(*args, **named)
        greedy = self.admission.policy.mode is AdmissionMode.GREEDY
        allowed: list[Request] | None = None
        stalled: list[Request] = []
        free = 0
        if not greedy:
            with self._guarded("before a step"):
                self._account.sync()
                if self.waiting:
                    self.admission.choose(len(self.running) + len(self.waiting))
                if self.admission.mode is not AdmissionMode.GREEDY:
                    allowed, stalled = self._plan()
                free = self._account.pool.get_num_free_blocks()
        begun = self.clock()
        if self._report is not None:
            with self._reporting():
                self._report.stepping()
        with self._only(allowed, stalled):
            output = super().schedule(*args, **named)
        if not greedy and self.admission is not None:
            with self._guarded("after a step"):
                self._account.sync(output.num_scheduled_tokens)
                self.admission.took(free - self._account.pool.get_num_free_blocks())
                self._times.scheduled(output, begun)
        if self._report is not None:
            with self._reporting():
                self._report.stepped(output, self.admission)
        return output

    def update_from_output(self, *args: Any, **named: Any) -> dict[int, EngineCoreOutputs]:
        """Return vLLM's outputs of a step, and an error output for each request that can never fit."""
        ended: list[tuple[int, EngineCoreOutput]] = []
        if self._refused:
            with self._guarded("when it refused a request"):
                ended = self._end_refused()
        if self.admission is not None:
            with self._guarded("when a step came back"):
                self._times.back(args[0] if args else named["scheduler_output"])
        outputs = super().update_from_output(*args, **named)
        for client, each in ended:
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(each)
        return outputs

    def _free_request(self, request: Request, *args: Any, **named: Any) -> Any:
        if self._report is not None:
            with self._reporting():
                self._report.left(request.request_id)
        if self.admission is not None:
            with self._guarded("when a request ended"):
                self._account.leave(request.request_id)
                found = self._account.found.pop(request.request_id, 0)
                if _ended_by_itself(request):
                    self.admission.ended(
                        request.num_output_tokens,
                        prompt_tokens=request.num_prompt_tokens - found,
                        max_tokens=request.max_tokens,
                    )
        return super()._free_request(request, *args, **named)

    def _preempt_request(self, request: Request, *args: Any, **named: Any) -> None:
        if self.admission is not None:
            with self._guarded("when a request was preempted"):
                self._account.leave(request.request_id)
        super()._preempt_request(request, *args, **named)

    def get_request_counts(self) -> tuple[int, int]:
        """Return vLLM's counts of running and waiting requests, with the requests hidden from this step.

        vLLM 0.31 to 0.33 derives from them whether prefills fell behind (`prefill_capacity_bound`), and in
        `schedule` whether a request is alone.
        """
        running, waiting = super().get_request_counts()
        return running + self._left_out[0], waiting + self._left_out[1]

    @property
    def prefill_capacity_bound(self) -> bool:
        """Return whether requests still waited after the last step that could start prefills."""
        return self._prefill_bound

    @prefill_capacity_bound.setter
    def prefill_capacity_bound(self, bound: bool) -> None:
        if not bound and self._held and not self._names.counts:
            bound = any(request.status in _STARTABLE for request in self._held)
        self._prefill_bound = bound

    def make_stats(self, *args: Any, **named: Any) -> SchedulerStats | None:
        """Return vLLM's statistics with our values added.

        Our stat logger takes the values out again (`tonnage.server.engines.vllm.stats_transport`).
        """
        stats = super().make_stats(*args, **named)
        if stats is not None and self._report is not None:
            with self._reporting():
                write_stats(self._admission_stats(self._report), stats.waiting_lora_adapters)
        return stats

    def _admission_stats(self, report: Report) -> AdmissionStats:
        admission = self.admission
        failures = self.fallbacks + (0 if self.eviction is None else self.eviction.stats.fallbacks)
        if admission is not None and admission.policy.mode is not AdmissionMode.GREEDY:
            return report.stats(admission, str(admission.policy.mode), failures)
        return report.stats(None, str(AdmissionMode.GREEDY), failures)

    # -- one step --------------------------------------------------------------------------------------------

    def _plan(self) -> tuple[list[Request], list[Request]]:
        """Return the waiting requests that may start in this step, and the running ones that skip it."""
        assert self.admission is not None
        if self._names.mixed:
            self._sort_out()
        streaming = self.num_waiting_for_streaming_input
        room = getattr(self, self._names.seats) - len(self.running) - streaming
        return self.admission.plan(self._candidates(), room, self.current_step)

    def _candidates(self) -> Iterator[Request]:
        """Yield the requests that wait only for free blocks, in order; the others delay no request."""
        for request in self.waiting:
            if request.request_id in self._refused or not self._grammar_ready(request):
                continue
            if request.num_preemptions:
                if request.num_stale_output_tokens and not request.drop_stale_output:
                    continue  # output tokens from before its preemption are still to come; vLLM skips it too
                if self._refuse_never(request):
                    continue
            yield request

    def _grammar_ready(self, request: Request) -> bool:
        """Return whether the request has its grammar, if it needs one.

        vLLM is asked, and ends a request whose grammar failed after the step.
        """
        if request.status != RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            return True
        return bool(getattr(self, self._names.ready)(request))

    def _sort_out(self) -> None:
        """Move requests that a step passed over and that hold no blocks to the head of the queue.

        vLLM 0.30 does the same.
        """
        passed_over = getattr(self, self._names.holders)
        out = [request for request in passed_over if not _holds_blocks(request)]
        if out:
            passed_over.remove_requests(out)
        for request in reversed(out):
            self.waiting.prepend_request(request)

    # -- requests that can never fit -------------------------------------------------------------------------

    def _refuse_never(self, request: Request) -> bool:
        """Return whether the request can never fit; if so, mark it to be ended after the next step.

        A request with output ends with the reason "length", any other with an error.
        """
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
        """Refuse the first waiting request if an empty pool cannot hold it: it would block the whole queue.

        With a mode other than greedy only a preempted request is checked, since it has grown since it was
        added.
        """
        if self._plain is None or not self.waiting:
            return
        with self._guarded("before a step"):
            head = self.waiting.peek_request()
            if head.request_id in self._refused or (self.admission is not None and not head.num_preemptions):
                return
            if not head.num_stale_output_tokens or head.drop_stale_output:
                self._refuse_never(head)

    def _end_refused(self) -> list[tuple[int, EngineCoreOutput]]:
        """Finish the refused requests that were not aborted meanwhile; return (client, output) of each.

        A request leaves `_refused` together with its output, so that an exception loses none.
        """
        ended: list[tuple[int, EngineCoreOutput]] = []
        for id, (status, why) in list(self._refused.items()):
            request = self.requests.get(id)
            if request is None or request.is_finished():
                del self._refused[id]
                continue
            with self._guarded("when it refused a request"):
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

    # -- hiding requests from vLLM ---------------------------------------------------------------------------

    @contextmanager
    def _only(self, allowed: list[Request] | None, stalled: list[Request]) -> Iterator[None]:
        """Hide all waiting requests but `allowed` (None: hide none) and the running `stalled` ones from vLLM.

        All of them are back in their places afterwards.
        """
        if allowed is None:
            yield
            return
        queue, before = self.waiting, self.running
        seats = self._names.seats
        most = getattr(self, seats)
        passed: list[Request] = []
        out = set(stalled)
        with self._guarded("before a step"):
            if queue:
                self.waiting = create_request_queue(self.policy)
                passed = self._take(queue, set(allowed))
            if stalled:
                self.running = [request for request in before if request not in out]
                setattr(self, seats, most - len(stalled))
        if self.admission is None:
            self._gather()
            queue, stalled = self.waiting, []
        elif self.waiting is not queue:
            waiting = len(queue) + len(passed) - len(self.waiting)
            self._left_out, self._held = (len(stalled), waiting), queue
        else:
            self._left_out = len(stalled), 0
        try:
            yield
        finally:
            self._left_out, self._held = (0, 0), ()
            setattr(self, seats, most)
            with self._guarded("after a step"):
                if stalled:
                    still, known = set(self.running) | out, set(before)
                    self.running = [
                        *(request for request in before if request in still),
                        *(request for request in self.running if request not in known),
                    ]
                if self.waiting is not queue:
                    self._put_back(queue, passed, allowed)
            if self.admission is None:
                self._gather()

    def _take(self, queue: Any, allowed: set[Request]) -> list[Request]:
        """Move `allowed` into the empty `self.waiting`; return all requests that had to be popped for it."""
        passed: list[Request] = []
        left = len(allowed)
        while left:
            request = queue.pop_request()
            passed.append(request)
            if request in allowed:
                self.waiting.add_request(request)
                left -= 1
        return passed

    def _put_back(self, queue: Any, passed: list[Request], allowed: list[Request]) -> None:
        """Restore the queue that `_take` emptied, with all requests that still wait at its head.

        First come requests that vLLM preempted in the step, then the requests of `passed` that did not start,
        in order.
        """
        waits, was = dict.fromkeys(self.waiting), set(passed)
        held = was.difference(allowed)
        first = [request for request in waits if request not in was]
        first += [request for request in passed if request in held or request in waits]
        self.waiting = queue
        for request in reversed(first):
            queue.prepend_request(request)

    # -- exceptions in our code ------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Put requests that an exception of ours left in no list of vLLM back into one."""
        listed = {*self.running, *self.waiting, *getattr(self, self._names.holders)}
        for request in self.requests.values():
            if request in listed or request.is_finished():
                continue
            if request.status == RequestStatus.RUNNING:
                self.running.append(request)
            else:
                self.waiting.add_request(request)

    @contextmanager
    def _guarded(self, when: str) -> Iterator[None]:
        """Leave scheduling to vLLM after the first exception; after a second one, refuse no request either."""
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
    def _reporting(self) -> Iterator[None]:
        """Stop reporting statistics from the first exception on; admission continues."""
        try:
            yield
        except Exception:
            self._report = None
            logger.exception("Tonnage failed to report its scheduler's statistics and stops reporting them")


def _holds_blocks(request: Request) -> bool:
    """Return whether a waiting request holds blocks, as Scheduler._holds_kv_blocks of vLLM 0.31 does."""
    return request.num_computed_tokens > 0 or request.status in (
        RequestStatus.WAITING_FOR_REMOTE_KVS,
        RequestStatus.WAITING_FOR_STREAMING_REQ,
    )


def _is_reported(config: Any) -> bool:
    """Return whether a reader removes our values from vLLM's statistics.

    The reader is `tonnage serve --backend vllm`, or our stat logger unless VLLM_PLUGINS leaves it out.
    """
    if config.parallel_config.worker_extension_cls.startswith("tonnage."):
        return True
    return "tonnage" in os.environ.get("VLLM_PLUGINS", "tonnage").split(",")


def _ended_by_itself(request: Request) -> bool:
    """Return whether the request's length is a valid sample of output lengths: it ended by itself.

    vLLM's front end, which alone sees text, aborts a request that reached a stop string.
    """
    sampling = request.sampling_params
    if sampling is None or not request.num_output_tokens:
        return False
    if request.status == RequestStatus.FINISHED_ABORTED:
        return bool(sampling.stop)
    return request.status != RequestStatus.FINISHED_ERROR


class TonnageSyncScheduler(AdmissionMixin):
    """The scheduler for `--no-async-scheduling`, and for setups where vLLM switches async scheduling off."""


class TonnageScheduler(AdmissionMixin, AsyncScheduler):
    """The scheduler for `--scheduler-cls tonnage.server.engines.vllm.scheduler.TonnageScheduler`.

    vLLM keeps async scheduling on only for subclasses of its AsyncScheduler. Where it is off, the object
    created is a `TonnageSyncScheduler`.
    """

    def __new__(cls, *args: Any, **named: Any) -> Any:
        """Create the scheduler that fits vLLM's async scheduling setting."""
        if cls is TonnageScheduler and not config_of(args, named).scheduler_config.async_scheduling:
            return TonnageSyncScheduler(*args, **named)
        return super().__new__(cls)
