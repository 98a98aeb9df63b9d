"""Grammar checks in front of vLLM: a grammar reaches vLLM's engine core only after it compiled once.

This first compilation runs in a child process with limits of time and memory.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from tonnage.server.engines.grammars.messages import Tried
from tonnage.server.engines.grammars.trial_client import TrialClient, outcome_of
from tonnage.server.engines.request import GenerationRequest
from tonnage.server.engines.vllm.checked_grammar import CheckedGrammar
from tonnage.server.text.grammar import Grammar


class GrammarChecks:
    """Trial compilations of grammars in a child process, awaited in the running event loop.

    Args:
        folder: folder with the model's tokenizer.json.
    """

    def __init__(self, folder: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending: dict[str, asyncio.Future[Tried | None]] = {}
        self._closed = False
        self._trials = TrialClient(folder, self._set_outcome)

    @property
    def pid(self) -> int:
        """Return the process id of the child process that makes the trial compilations of grammars."""
        return self._trials.pid

    async def check(self, request: GenerationRequest) -> CheckedGrammar | None:
        """Compile a request's grammar in the child process; return the checked grammar, or None without one.

        Raises:
            TonnageError: the grammar failed to compile within the limits.
        """
        grammar = request.params.grammar
        if grammar is None:
            return None
        future = self._pending[request.request_id] = self._loop.create_future()
        try:
            if self._closed:
                future.set_result(None)
            else:
                self._trials.ask(request)
            tried = await future
        finally:
            del self._pending[request.request_id]
            if future.cancelled():
                self._trials.cancel(request.request_id)
        if (error := outcome_of(grammar, tried)) is not None:
            raise error
        assert tried is not None
        assert tried.source is not None
        return CheckedGrammar(Grammar(grammar.kind, tried.source), tried.bytes, request.tenant)

    def close(self) -> None:
        """End the compilation of all grammars; the requests that wait for one fail."""
        self._closed = True
        self._trials.close()
        for future in self._pending.values():
            if not future.done():
                future.set_result(None)

    def _set_outcome(self, request_id: str, grammar: Grammar, tried: Tried | None) -> None:
        """Pass the result of compiling a grammar to the waiting request; called in the thread of `TrialClient`.

        `tried` is the result, or None if the child process ended before the compilation was complete.
        """

        def set_result() -> None:
            if (future := self._pending.get(request_id)) is not None and not future.done():
                future.set_result(tried)

        self._loop.call_soon_threadsafe(set_result)
