"""The client of the trial process, which compiles each new grammar once to check it against limits.

The client has a queue per tenant, cancels grammars whose requests are cancelled, and caches results. It runs in
a thread of its own, so that an engine's step loop or an event loop can use it without waiting.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tonnage.planner.engines.runtime.grammars import GRAMMAR_TRIALS
from tonnage.planner.errors import TonnageError
from tonnage.server.engines.errors import EngineDead
from tonnage.server.engines.grammars.library import GrammarError
from tonnage.server.engines.grammars.messages import Forget, Tried, Try
from tonnage.server.engines.request import GenerationRequest
from tonnage.server.text.grammar import Grammar

log = logging.getLogger("tonnage.server")

# Upper bound of the grammars that the trial process compiles at the same time. A tenant has at most one of
# them, so that slow grammars of one tenant do not block the other tenants.
PLACES = GRAMMAR_TRIALS
# Upper bound of the bytes of all grammars whose results are cached; above it, the least recently used are
# evicted.
KNOWN_BYTES = 4 << 20
# Seconds within which the child process that compiles grammars must end after its connection was closed.
_PATIENCE = 5.0


@dataclass(slots=True)
class _Job:
    """A tenant's grammar that has to be compiled within limits, with the requests that wait for the result."""

    grammar: Grammar
    tenant: str
    askers: list[str] = field(default_factory=list)  # ids of the requests that wait for the result


class TrialClient:
    """A client that sends requests' grammars to a trial process and reports whether each one compiles.

    Args:
        folder: folder with the model's tokenizer.json.
        told: called as ``told(request id, grammar, result)`` in the thread of this client, once per request
            that was not cancelled. The result is None if the trial process was killed; a new process has then
            started.
    """

    def __init__(self, folder: Path, told: Callable[[str, Grammar, Tried | None], None]) -> None:
        self._folder, self._told = folder, told
        self._asked: deque[GenerationRequest | str | None] = deque()
        wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waker = io.FileIO(wake, "r+")  # closes the event descriptor when this client is freed
        self._wake = self._waker.fileno()
        self._known: OrderedDict[Grammar, Tried] = OrderedDict()
        self._trial = _Trial(folder)
        threading.Thread(target=self._run, name="grammars", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id of the trial process, the child process that compiles each grammar within limits."""
        return self._trial.process.pid

    def ask(self, request: GenerationRequest) -> None:
        """Queue the request's grammar for the trial process; its result is passed to the callback ``told``."""
        self._say(request)

    def cancel(self, request_id: str) -> None:
        """Stop compiling the grammar of a request whose client has disconnected."""
        self._say(request_id)

    def close(self) -> None:
        """End this client's thread and the process that compiles grammars within limits."""
        self._say(None)

    def _say(self, said: GenerationRequest | str | None) -> None:
        self._asked.append(said)
        os.eventfd_write(self._wake, 1)

    # -- methods that run in the client's thread ---------------------------------------------------------------

    def _run(self) -> None:
        # Grammars that wait to be compiled, by tenant; the tenant that has waited longest comes first.
        waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        running: dict[int, _Job] = {}
        number = 0
        while True:
            ready = wait([self._trial.connection, self._wake])
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                while self._asked:
                    asked = self._asked.popleft()
                    if asked is None:
                        self._trial.end()
                        return
                    if isinstance(asked, str):
                        self._forget(asked, waiting, running)
                    else:
                        self._enqueue(asked, waiting, running)
            if self._trial.connection in ready:
                self._hear(running)
            busy = {job.tenant for job in running.values()}
            for tenant in [tenant for tenant in waiting if tenant not in busy][: PLACES - len(running)]:
                job = waiting[tenant].popleft()
                if waiting[tenant]:
                    waiting.move_to_end(tenant)
                else:
                    del waiting[tenant]
                number += 1
                running[number] = job
                with contextlib.suppress(OSError):  # if the process has ended, the read below reports it
                    self._trial.connection.send(Try(number, job.grammar))

    def _hear(self, running: dict[int, _Job]) -> None:
        """Receive the result of one grammar's compilation, and report it to the requests that wait for it.

        ``running`` has the grammars that the child process is compiling, by message number.
        """
        try:
            tried: Tried = self._trial.connection.recv()
        except (EOFError, OSError):
            self._lost(running)
            return
        job = running.pop(tried.number, None)
        if job is None:  # the grammar's last request was cancelled after this result was sent
            return
        self._known[job.grammar] = tried
        while sum(map(_size, self._known.items())) > KNOWN_BYTES:
            self._known.popitem(last=False)
        for request_id in job.askers:
            self._told(request_id, job.grammar, tried)

    def _enqueue(
        self, request: GenerationRequest, waiting: OrderedDict[str, deque[_Job]], running: dict[int, _Job]
    ) -> None:
        grammar = request.params.grammar
        assert grammar is not None
        if (tried := self._known.get(grammar)) is not None:
            self._known.move_to_end(grammar)
            self._told(request.request_id, grammar, tried)
            return
        jobs = [*running.values(), *waiting.get(request.tenant, ())]
        job = next((job for job in jobs if (job.tenant, job.grammar) == (request.tenant, grammar)), None)
        if job is None:
            job = _Job(grammar, request.tenant)
            waiting.setdefault(request.tenant, deque()).append(job)
        job.askers.append(request.request_id)

    def _forget(
        self, request_id: str, waiting: OrderedDict[str, deque[_Job]], running: dict[int, _Job]
    ) -> None:
        for number, job in list(running.items()):
            if request_id in job.askers:
                job.askers.remove(request_id)
                if not job.askers:
                    del running[number]
                    with contextlib.suppress(OSError):
                        self._trial.connection.send(Forget(number))
                return
        for tenant, jobs in list(waiting.items()):
            for job in jobs:
                if request_id in job.askers:
                    job.askers.remove(request_id)
                    if not job.askers:
                        jobs.remove(job)
                    if not jobs:
                        del waiting[tenant]
                    return

    def _lost(self, running: dict[int, _Job]) -> None:
        """Replace a trial process that has ended, and report None to the requests that waited for its results.

        ``running`` has the grammars that the old process was compiling, by message number.
        """
        log.error("the process that tries grammars ended; starting another")
        time.sleep(1.0)  # limit the rate of restarts; the sleep delays only this thread
        self._trial = _Trial(self._folder)
        for job in running.values():
            for request_id in job.askers:
                self._told(request_id, job.grammar, None)
        running.clear()


def outcome_of(grammar: Grammar, tried: Tried | None) -> TonnageError | None:
    """Return the error to report to the client if ``grammar`` did not compile within limits, else None.

    ``tried`` is the result of the process that compiles grammars within limits; None means that the process
    ended without a result.
    """
    if tried is None:
        return EngineDead("the process that tries grammars ended", hint="try again")
    return None if tried.error is None else GrammarError(tried.error, field=grammar.kind)


def _size(known: tuple[Grammar, Tried]) -> int:
    grammar, tried = known
    return len(grammar.text) + len(tried.source or "")


class _Trial:
    """The trial process, a child process that compiles grammars within limits, and the connection to it."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tonnage.server.engines.grammars.trial_process"),
                    *(str(theirs.fileno()), str(folder)),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.connection = Connection(ours.detach())

    def end(self) -> None:
        """Close the connection, which makes the trial process end.

        Kill a process that does not end within some seconds, such as one stopped by SIGSTOP.
        """
        self.connection.close()
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
