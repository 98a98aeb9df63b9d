"""The engine's side of compiling: whose turn it is, who has hung up, what is kept. A thread beside the steps.

What a trial (:mod:`.trial`) has passed is compiled once more in this process, with the model's own vocabulary:
llguidance lets other threads run meanwhile, and the trial has shown how long that may take.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tonnage.planner.engines.runtime.hf import GRAMMAR_TRIALS
from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.server.engines.errors import EngineDead
from tonnage.server.engines.hf.grammars import library
from tonnage.server.engines.hf.grammars.library import GrammarError
from tonnage.server.engines.hf.grammars.masks import HELD_BYTES, Compiled, GrammarMatcher
from tonnage.server.engines.hf.grammars.memory import held_bytes
from tonnage.server.engines.hf.grammars.messages import Forget, Tried, Try
from tonnage.server.engines.hf.grammars.tags import CompiledTag, TagMatcher, Tags
from tonnage.server.engines.request import GenerationRequest
from tonnage.server.text.grammar import Grammar

log = logging.getLogger("tonnage.server")

# Trials at a time, one for each tenant: another tenant's slow grammars leave a place for one's own.
PLACES = GRAMMAR_TRIALS
KEPT_BYTES = HELD_BYTES // 2  # of compiled grammars; the least recently used go
REFUSED = 256  # grammars that are known to be at fault


@dataclass(frozen=True, slots=True)
class Outcome:
    """The grammar of a request can be matched, or ``error`` says why not."""

    request_id: str
    error: TonnageError | None = None


@dataclass(slots=True)
class _Job:
    grammar: Grammar
    tenant: str
    askers: list[str] = field(default_factory=list)  # request ids


class Compiler:
    """``folder`` has the model's tokenizer.json; ``vocab_size``: how many logits there are.

    ``fileno`` is readable when outcomes wait, so that an idle engine can wait for them too.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._outcomes: deque[Outcome] = deque()
        self._told = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._asked: deque[GenerationRequest | str | None] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # of what is kept
        self._compiled: OrderedDict[Grammar, Compiled | CompiledTag] = OrderedDict()
        self._tags = Tags(folder, vocab_size)
        self._tag_thread = ThreadPoolExecutor(1, "structural tags")
        self._broken: TonnageError | None = None
        try:
            self._tokenizer = library.tokenizer_of(folder, vocab_size)
        except ImportError:
            self._broken = DeploymentError(
                "a grammar needs llguidance", field="grammar", hint="pip install 'tonnage[grammar]'"
            )
            return
        except Exception as error:  # whatever the files of a model lead to
            said = library.first_line(str(error))
            self._broken = GrammarError(
                f"this model's tokenizer does not load ({type(error).__name__}: {said}), which a grammar needs",
                field="grammar",
            )
            return
        self._special = library.special_tokens(self._tokenizer)
        self._trial = _Trial(list(self._special.values()))
        threading.Thread(target=self._run, name="grammars", daemon=True).start()

    def fileno(self) -> int:
        return self._told

    @property
    def pid(self) -> int:
        """Of the process that tries grammars."""
        return self._trial.process.pid

    def ask(self, request: GenerationRequest) -> None:
        """An Outcome will come, unless it is cancelled."""
        if self._broken is not None:
            self._tell(request.request_id, self._broken)
            return
        if request.params.grammar is not None and request.params.grammar.kind == "structural_tag":
            self._tag_thread.submit(self._compile_tag, request.request_id, request.params.grammar)
            return
        self._asked.append(request)
        os.eventfd_write(self._wake, 1)

    def cancel(self, request_id: str) -> None:
        """Whoever asked has hung up."""
        if self._broken is None:
            self._asked.append(request_id)
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End its thread and its process."""
        if self._broken is None:
            self._asked.append(None)
            os.eventfd_write(self._wake, 1)

    def outcomes(self) -> list[Outcome]:
        """Those that have come since the last time."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._told)
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def matcher(self, grammar: Grammar, stop_token_ids: tuple[int, ...]) -> GrammarMatcher | TagMatcher:
        """At the start of an answer, for a grammar whose outcome was good."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
        if compiled is None:  # so much else came since; it has passed its trial
            if grammar.kind == "structural_tag":
                compiled = self._tags.compile(grammar.text)
            else:
                compiled = self._compile(grammar, library.source_of(grammar), 0)
        # Another stop token of the request is one of the grammar's own; it ends the answer where it is drawn.
        ends = tuple(token for token in stop_token_ids if token in self._special)
        return compiled.begin(ends)

    def _compile_tag(self, request_id: str, grammar: Grammar) -> None:
        try:
            compiled = self._tags.compile(grammar.text)
        except TonnageError as error:
            self._tell(request_id, error)
            return
        self._keep(grammar, compiled)
        self._tell(request_id)

    def _compile(self, grammar: Grammar, source: str, held: int) -> Compiled:
        compiled = Compiled(self._tokenizer, source, self._vocab_size, held)
        self._keep(grammar, compiled)
        return compiled

    def _keep(self, grammar: Grammar, compiled: Compiled | CompiledTag) -> None:
        with self._lock:
            self._compiled[grammar] = compiled
            while sum(each.held for each in self._compiled.values()) > KEPT_BYTES and len(self._compiled) > 1:
                self._compiled.popitem(last=False)

    def _tell(self, request_id: str, error: TonnageError | None = None) -> None:
        self._outcomes.append(Outcome(request_id, error))
        os.eventfd_write(self._told, 1)

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        waiting: OrderedDict[str, deque[_Job]] = OrderedDict()  # by tenant, who waits longest first
        running: dict[int, _Job] = {}
        refused: OrderedDict[Grammar, GrammarError] = OrderedDict()
        number = 0
        while True:
            ready = wait([self._trial.connection, self._wake])
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                while self._asked:
                    asked = self._asked.popleft()
                    if asked is None:
                        self._trial.connection.close()
                        return
                    if isinstance(asked, str):
                        self._forget(asked, waiting, running)
                    else:
                        self._enqueue(asked, waiting, running, refused)
            if self._trial.connection in ready:
                self._hear(running, refused)
            busy = {job.tenant for job in running.values()}
            for tenant in [tenant for tenant in waiting if tenant not in busy][: PLACES - len(running)]:
                job = waiting[tenant].popleft()
                if waiting[tenant]:
                    waiting.move_to_end(tenant)
                else:
                    del waiting[tenant]
                number += 1
                running[number] = job
                with contextlib.suppress(OSError):  # its end is met where it is read
                    self._trial.connection.send(Try(number, job.grammar))

    def _hear(self, running: dict[int, _Job], refused: OrderedDict[Grammar, GrammarError]) -> None:
        """What has come of a trial."""
        try:
            tried: Tried = self._trial.connection.recv()
        except (EOFError, OSError):
            self._lost(running)
            return
        job = running.pop(tried.number, None)
        if job is None:  # forgotten a moment ago
            return
        error = self._finish(job.grammar, tried)
        if isinstance(error, GrammarError):
            refused[job.grammar] = error
            while len(refused) > REFUSED:
                refused.popitem(last=False)
        for request_id in job.askers:
            self._tell(request_id, error)

    def _enqueue(
        self,
        request: GenerationRequest,
        waiting: OrderedDict[str, deque[_Job]],
        running: dict[int, _Job],
        refused: OrderedDict[Grammar, GrammarError],
    ) -> None:
        grammar = request.params.grammar
        assert grammar is not None
        if grammar in self._compiled:
            self._tell(request.request_id)
            return
        if grammar in refused:
            refused.move_to_end(grammar)
            self._tell(request.request_id, refused[grammar])
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

    def _finish(self, grammar: Grammar, tried: Tried) -> TonnageError | None:
        """Compile what has passed; what is wrong with it, if anything."""
        message = tried.error
        if tried.source is not None:
            if not self._make_room(tried.bytes):
                return TonnageError(
                    f"the grammars of others take {held_bytes() >> 20} of the {HELD_BYTES >> 20} MiB of this "
                    f"server's grammars, and yours {tried.bytes >> 20} MiB",
                    hint="try again",
                )
            try:
                self._compile(grammar, tried.source, tried.bytes)
            except Exception as error:  # this thread serves everybody's grammars
                message = library.first_line(str(error))
        return None if message is None else GrammarError(message, field=grammar.kind)

    def _make_room(self, wanted: int) -> bool:
        """Let go of what is only kept, until ``wanted`` bytes fit beside what is matched."""
        with self._lock:
            while held_bytes() + wanted > HELD_BYTES and self._compiled:
                self._compiled.popitem(last=False)
        return held_bytes() + wanted <= HELD_BYTES

    def _lost(self, running: dict[int, _Job]) -> None:
        """The process was killed, by whomever: another one, and whoever waited is told."""
        log.error("the process that tries grammars ended; starting another")
        time.sleep(1.0)  # in a thread of its own; not again and again at once
        self._trial = _Trial(list(self._special.values()))
        for job in running.values():
            for request_id in job.askers:
                self._tell(request_id, EngineDead("the process that tries grammars ended", hint="try again"))
        running.clear()


class _Trial:
    """The process that tries, and the way to it."""

    def __init__(self, special: list[bytes]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tonnage.server.engines.hf.grammars.trial", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.connection = Connection(ours.detach())
        self.connection.send(special)
