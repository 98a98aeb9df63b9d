"""Grammar compilation for the engine process, beside its step loop.

Another process first tries each grammar, so that a grammar that needs too much time or memory ends only that
process. The engine process then compiles accepted grammars.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tonnage.planner.errors import TonnageError
from tonnage.server.engines.grammars.cache import GrammarCache
from tonnage.server.engines.grammars.masks import GrammarMatcher
from tonnage.server.engines.grammars.messages import Tried
from tonnage.server.engines.grammars.structural_tags import TagMatcher
from tonnage.server.engines.grammars.trial_client import TrialClient, outcome_of
from tonnage.server.engines.request import GenerationRequest
from tonnage.server.text.grammar import Grammar


@dataclass(frozen=True, slots=True)
class GrammarOutcome:
    """The result of compiling a request's grammar: success if ``error`` is None, else the error."""

    request_id: str
    error: TonnageError | None = None


class GrammarCompiler:
    """A compiler of the requests' grammars that runs beside the step loop.

    The descriptor of ``fileno`` is readable while outcomes are pending. So an idle engine can wait for messages
    and outcomes together.

    Args:
        folder: folder with the model's tokenizer.json.
        vocab_size: number of logits per token.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._outcomes: deque[GrammarOutcome] = deque()
        self._told = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._cache = GrammarCache(folder, vocab_size)
        self._tag_thread = ThreadPoolExecutor(1, "structural tags")
        self._trials = None if self._cache.broken else TrialClient(folder, self._tried)

    def fileno(self) -> int:
        """Return the file descriptor that is readable while results of grammar compilation are pending."""
        return self._told

    @property
    def pid(self) -> int:
        """Process id of the child process that first compiles each grammar within time and memory limits."""
        assert self._trials is not None
        return self._trials.pid

    def ask(self, request: GenerationRequest) -> None:
        """Start compiling a request's grammar; `outcomes` reports the result unless it is cancelled."""
        if self._trials is None:
            self._tell(request.request_id, self._cache.broken)
        elif request.params.grammar in self._cache:
            self._tell(request.request_id)
        else:
            self._trials.ask(request)

    def cancel(self, request_id: str) -> None:
        """Stop compiling the grammar of a request whose client has disconnected."""
        if self._trials is not None:
            self._trials.cancel(request_id)

    def close(self) -> None:
        """Stop the child process that first compiles each grammar, and the thread that talks to it."""
        if self._trials is not None:
            self._trials.close()

    def outcomes(self) -> list[GrammarOutcome]:
        """Return the results of grammar compilation since the last call, one per request."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._told)
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def matcher(self, grammar: Grammar, stop_token_ids: tuple[int, ...]) -> GrammarMatcher | TagMatcher:
        """Return a new matcher, at its start state, for a grammar that was compiled before."""
        return self._cache.begin(grammar, stop_token_ids)

    def _tried(self, request_id: str, grammar: Grammar, tried: Tried | None) -> None:
        if (error := outcome_of(grammar, tried)) is not None:
            self._tell(request_id, error)
            return
        assert tried is not None
        if grammar.kind == "structural_tag":  # in a thread, because xgrammar may take long
            self._tag_thread.submit(self._compile, request_id, grammar, tried)
        else:
            self._compile(request_id, grammar, tried)

    def _compile(self, request_id: str, grammar: Grammar, tried: Tried) -> None:
        try:
            self._cache.compiled(grammar, tried.source, tried.bytes)
        except TonnageError as error:
            self._tell(request_id, error)
        else:
            self._tell(request_id)

    def _tell(self, request_id: str, error: TonnageError | None = None) -> None:
        self._outcomes.append(GrammarOutcome(request_id, error))
        os.eventfd_write(self._told, 1)
