"""The engine's side of compiling: what a trial has passed is compiled in a thread beside the steps."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tonnage.planner.errors import TonnageError
from tonnage.server.engines.grammars.kept import Kept
from tonnage.server.engines.grammars.masks import GrammarMatcher
from tonnage.server.engines.grammars.messages import Tried
from tonnage.server.engines.grammars.tags import TagMatcher
from tonnage.server.engines.grammars.trials import Trials, outcome_of
from tonnage.server.engines.request import GenerationRequest
from tonnage.server.text.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Outcome:
    """The grammar of a request can be matched, or ``error`` says why not."""

    request_id: str
    error: TonnageError | None = None


class Compiler:
    """``folder`` has the model's tokenizer.json; ``vocab_size``: how many logits there are.

    ``fileno`` is readable when outcomes wait, so that an idle engine can wait for them too.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._outcomes: deque[Outcome] = deque()
        self._told = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._kept = Kept(folder, vocab_size)
        self._tag_thread = ThreadPoolExecutor(1, "structural tags")
        self._trials = None if self._kept.broken else Trials(folder, self._tried)

    def fileno(self) -> int:
        return self._told

    @property
    def pid(self) -> int:
        """Of the process that tries grammars."""
        assert self._trials is not None
        return self._trials.pid

    def ask(self, request: GenerationRequest) -> None:
        """An Outcome will come, unless it is cancelled."""
        if self._trials is None:
            self._tell(request.request_id, self._kept.broken)
        elif request.params.grammar in self._kept:
            self._tell(request.request_id)
        else:
            self._trials.ask(request)

    def cancel(self, request_id: str) -> None:
        """Whoever asked has hung up."""
        if self._trials is not None:
            self._trials.cancel(request_id)

    def close(self) -> None:
        """End its thread and its process."""
        if self._trials is not None:
            self._trials.close()

    def outcomes(self) -> list[Outcome]:
        """Those that have come since the last time."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._told)
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def matcher(self, grammar: Grammar, stop_token_ids: tuple[int, ...]) -> GrammarMatcher | TagMatcher:
        """At the start of an answer, for a grammar whose outcome was good."""
        return self._kept.begin(grammar, stop_token_ids)

    def _tried(self, request_id: str, grammar: Grammar, tried: Tried | None) -> None:
        if (error := outcome_of(grammar, tried)) is not None:
            self._tell(request_id, error)
            return
        assert tried is not None
        if grammar.kind == "structural_tag":  # xgrammar may take long
            self._tag_thread.submit(self._compile, request_id, grammar, tried)
        else:
            self._compile(request_id, grammar, tried)

    def _compile(self, request_id: str, grammar: Grammar, tried: Tried) -> None:
        try:
            self._kept.compiled(grammar, tried.source, tried.bytes)
        except TonnageError as error:
            self._tell(request_id, error)
        else:
            self._tell(request_id)

    def _tell(self, request_id: str, error: TonnageError | None = None) -> None:
        self._outcomes.append(Outcome(request_id, error))
        os.eventfd_write(self._told, 1)
