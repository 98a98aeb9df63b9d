"""vLLM's scheduler with Tonnage's admission in front of it.

vLLM decides what a step computes. Before each step, this scheduler removes requests from vLLM's lists: waiting
requests that may not start yet, and running requests that skip the step. After the step it puts them back. vLLM
still handles blocks, prefix cache, chunks, priorities, and LoRA and encoder limits. It also handles waiting
requests that already hold blocks (remote KV, streaming input).

An exception in Tonnage's code never fails a request: after the first one, vLLM schedules on its own.
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
from tonnage.server.engines.vllm.scheduler.key_shares import KeyShares, shortest_first
from tonnage.server.engines.vllm.scheduler.options import read_eviction, read_policy
from tonnage.server.engines.vllm.scheduler.report import Report
from tonnage.server.engines.vllm.scheduler.step_times import StepTimes
from tonnage.server.engines.vllm.scheduler.versions import names_of
from tonnage.server.engines.vllm.stats_transport import AdmissionStats, write_stats

# This logger is a child of the "vllm" logger, because vLLM configures only its own loggers.
logger = init_logger(f"vllm.{__name__}")

_NO_REPORT = "Tonnage failed to report its scheduler's statistics and stops reporting them"
# Statuses of waiting requests that need only free blocks to start. Other statuses wait for something else too.
_STARTABLE = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class AdmissionMixin(Scheduler):
    """A mixin that adds Tonnage's admission to vLLM's synchronous or asynchronous scheduler."""

    admission: VllmAdmission | None = None
    _left_out = (0, 0)  # number of running and of waiting requests hidden from vLLM while it schedules a step
    _held: Any = ()  # waiting requests hidden from vLLM because they may not start in this step
    _prefill_bound = False
    # Admission in greedy mode, which finds the requests that can never fit. It is used even after a first
    # exception in our code.
    _plain: VllmAdmission | None = None
    fallbacks = 0  # number of exceptions in our code, at most 1, because later ones are not counted
    _report: Report | None = None
    # A function that returns seconds since a fixed origin. A simulation sets its own clock on the object
    # (benchmarks/admission_matrix.py).
    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        policy = read_policy(self.vllm_config.additional_config)
        self.eviction: LearnedQueue | None = None  # None means vLLM's own eviction
        if read_eviction(self.vllm_config.additional_config) == "learned":
            self.eviction = install(self.kv_cache_manager)
        self._refused: dict[str, tuple[RequestStatus, str]] = {}
        names = names_of(vllm.__version__)
        assert names is not None  # `tonnage.server.engines.vllm.scheduler` has checked vLLM's version
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
            try:
                self._report = Report(self)
            except Exception:
                logger.exception(_NO_REPORT)

    # -- methods that vLLM calls -----------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Add a request as vLLM does; a request that can never fit is marked to end after the next step."""
        super().add_request(request)
        if request.request_id not in self.requests:
            return
        blocks = 0
        if self._plain is not None:
            with self._guarded("for a new request"):
                blocks = sum(self._account.reservation(request))
                self._refuse_never(request)
        self._tell(lambda report: report.added(request.request_id, blocks))

    def schedule(self, *args: Any, **named: Any) -> SchedulerOutput:
        """Let vLLM schedule a step, with only the requests that may take part in the step."""
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
                free = self._account.pool.get_num_free_blocks()
        if self.admission is not None:
            with self._guarded("before a step"):
                if self.admission.mode is not AdmissionMode.GREEDY or self.admission.shares.several:
                    allowed, stalled = self._plan()
        begun = self.clock()
        self._tell(lambda report: report.stepping())
        with self._within_budget(allowed), self._only(allowed, stalled):
            output = super().schedule(*args, **named)
        if self.admission is not None:
            with self._guarded("after a step"):
                if not greedy:
                    self._account.sync(output.num_scheduled_tokens)
                    self.admission.took(free - self._account.pool.get_num_free_blocks())
                self._times.scheduled(output, begun)
        self._tell(lambda report: report.stepped(output, self.admission))
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
        self._tell(lambda report: report.left(request.request_id))
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
        """Return vLLM's counts of running and waiting requests, including requests hidden from this step.

        vLLM 0.31 to 0.33 uses the counts to determine whether prefills are delayed (`prefill_capacity_bound`).
        In `schedule`, vLLM uses them to determine whether a request is the only one.
        """
        running, waiting = super().get_request_counts()
        return running + self._left_out[0], waiting + self._left_out[1]

    @property
    def prefill_capacity_bound(self) -> bool:
        """Return whether requests were still waiting after the last step in which prefills could start."""
        return self._prefill_bound

    @prefill_capacity_bound.setter
    def prefill_capacity_bound(self, bound: bool) -> None:
        if not bound and self._held and not self._names.counts:
            bound = any(request.status in _STARTABLE for request in self._held)
        self._prefill_bound = bound

    def make_stats(self, *args: Any, **named: Any) -> SchedulerStats | None:
        """Return vLLM's statistics with the statistics of Tonnage's admission added.

        Our stat logger removes the values again (`tonnage.server.engines.vllm.stats_transport`).
        """
        stats = super().make_stats(*args, **named)
        if stats is not None:
            into = stats.waiting_lora_adapters
            self._tell(lambda report: write_stats(self._admission_stats(report), into))
        return stats

    def _admission_stats(self, report: Report) -> AdmissionStats:
        admission = self.admission
        failures = self.fallbacks + (0 if self.eviction is None else self.eviction.stats.fallbacks)
        if admission is not None and admission.policy.mode is not AdmissionMode.GREEDY:
            return report.stats(admission, str(admission.policy.mode), failures)
        return report.stats(None, str(AdmissionMode.GREEDY), failures)

    # -- one step --------------------------------------------------------------------------------------------

    def _plan(self) -> tuple[list[Request], list[Request]]:
        """Return the waiting requests that may start in this step, and the running requests that skip it."""
        assert self.admission is not None
        if self._names.mixed:
            self._sort_out()
        streaming = self.num_waiting_for_streaming_input
        room = getattr(self, self._names.seats) - len(self.running) - streaming
        several = self.admission.shares.several
        if several and self.waiting:
            allowed, stalled = self._plan_shares(room)
        else:
            allowed, stalled = self.admission.plan(self._candidates(), room, self.current_step)
        if several and self.current_step % 2:
            allowed, behind = shortest_first(allowed, self.running)
            stalled = list(dict.fromkeys([*stalled, *behind]))
        return allowed, stalled

    @contextmanager
    def _within_budget(self, allowed: list[Request] | None) -> Iterator[None]:
        """Reduce vLLM's token budget while the context is open, if several API keys share the step."""
        most = self.max_num_scheduled_tokens
        if allowed is not None and self.admission is not None:
            with self._guarded("before a step"):
                self.max_num_scheduled_tokens = self._times.budget(allowed)
        try:
            yield
        finally:
            self.max_num_scheduled_tokens = most

    def _plan_shares(self, room: int) -> tuple[list[Request], list[Request]]:
        """Return the requests that may start and the running requests that skip the step.

        The engine is shared by several API keys. ``room`` is the number of requests that may still be added to
        the running ones.
        """
        assert self.admission is not None
        keys = KeyShares(
            self.admission.shares, self.running, lambda request: sum(self._account.reservation(request))
        )
        if self.admission.mode is AdmissionMode.GREEDY:
            return keys.may_start(self._candidates(), room), []
        return self.admission.plan(keys.ordered(self._candidates()), room, self.current_step, keys)

    def _candidates(self) -> Iterator[Request]:
        """Yield the waiting requests that lack nothing but free KV blocks, in queue order.

        Requests that wait for something else are left out, so they delay no other request.
        """
        for request in self.waiting:
            if request.request_id in self._refused or not self._grammar_ready(request):
                continue
            if request.num_preemptions:
                if request.num_stale_output_tokens and not request.drop_stale_output:
                    # vLLM skips this request too, because a step from before its preemption has not returned
                    # its tokens yet.
                    continue
                if self._refuse_never(request):
                    continue
            yield request

    def _grammar_ready(self, request: Request) -> bool:
        """Return whether the request needs no grammar or its grammar is compiled.

        It calls vLLM's own check, which also marks a request whose grammar failed; vLLM ends it after the step.
        """
        if request.status != RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            return True
        return bool(getattr(self, self._names.ready)(request))

    def _sort_out(self) -> None:
        """Move requests that vLLM skipped in a step and that hold no blocks to the head of the queue.

        vLLM 0.30 keeps such requests in a second queue, and moves them in the same way.
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

        A request that already has output ends with finish reason "length", any other with an error.
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
        """Reject the first waiting request if an empty KV pool cannot hold it, as it would block the queue.

        Only a preempted request is checked, because it has grown since it was added. After an exception in our
        code, every request is checked.
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
        """Finish the rejected requests that were not aborted; return (client index, output) of each.

        A request is removed from `_refused` when its output is recorded, so that an exception loses no output.
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
        """Hide requests from vLLM while the context is open, and put them back at its end.

        Args:
            allowed: the waiting requests that vLLM may see; None to hide no request.
            stalled: the running requests to hide.
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
        """Move `allowed` from `queue` to the empty `self.waiting`; return all requests popped from `queue`.

        Requests in front of the last allowed one have to be popped, too.
        """
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
        """Restore the queue that `_take` changed, with all requests that are still waiting at its head.

        Requests that vLLM preempted in the step come first. Then come the requests of `passed` that did not
        start, in order.
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
        """Return requests that an exception has left in none of vLLM's lists to the list they belong to."""
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
        """Catch exceptions of our code while the context is open; after the first, vLLM schedules on its own.

        After a second exception, requests that can never fit are no longer rejected either. `when` says in the
        log message when the exception occurred.
        """
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

    def _tell(self, event: Callable[[Report], object]) -> None:
        """Call ``event`` with the collector of statistics, if there is one.

        After an exception, no more statistics are collected; admission continues.
        """
        if self._report is None:
            return
        try:
            event(self._report)
        except Exception:
            self._report = None
            logger.exception(_NO_REPORT)


def _holds_blocks(request: Request) -> bool:
    """Return whether a waiting request holds KV blocks, by the rule of vLLM 0.31's _holds_kv_blocks."""
    return request.num_computed_tokens > 0 or request.status in (
        RequestStatus.WAITING_FOR_REMOTE_KVS,
        RequestStatus.WAITING_FOR_STREAMING_REQ,
    )


def _is_reported(config: Any) -> bool:
    """Return whether another component removes our values from vLLM's statistics.

    The component is `tonnage serve --backend vllm`, or our stat logger unless VLLM_PLUGINS excludes it.
    """
    if config.parallel_config.worker_extension_cls.startswith("tonnage."):
        return True
    return "tonnage" in os.environ.get("VLLM_PLUGINS", "tonnage").split(",")


def _ended_by_itself(request: Request) -> bool:
    """Return whether the output ended by itself, so that its length is a valid sample of output lengths.

    A stop string also counts: only vLLM's front end sees text, and it aborts a request at a stop string.
    """
    sampling = request.sampling_params
    if sampling is None or not request.num_output_tokens:
        return False
    if request.status == RequestStatus.FINISHED_ABORTED:
        return bool(sampling.stop)
    return request.status != RequestStatus.FINISHED_ERROR


class TonnageSyncScheduler(AdmissionMixin):
    """The admission scheduler for setups without async scheduling, such as `--no-async-scheduling`."""


class TonnageScheduler(AdmissionMixin, AsyncScheduler):
    """The admission scheduler for `--scheduler-cls tonnage.server.engines.vllm.scheduler.TonnageScheduler`.

    vLLM keeps async scheduling enabled only for subclasses of its AsyncScheduler. If it is disabled, the object
    created is a `TonnageSyncScheduler`.
    """

    def __new__(cls, *args: Any, **named: Any) -> Any:
        """Create the synchronous or asynchronous scheduler, by vLLM's async scheduling setting."""
        if cls is TonnageScheduler and not config_of(args, named).scheduler_config.async_scheduling:
            return TonnageSyncScheduler(*args, **named)
        return super().__new__(cls)
