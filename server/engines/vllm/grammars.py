"""Runs inside vLLM's engine core (``scheduler_cls``): grammars are matched as the hf engine matches them.

Written against vLLM 0.32. Its own backends compile in the loop of the API process and fill masks without any
limit. Here llguidance has limits, the masks of a step have a budget, and an answer that needs more ends with
what is wrong as its ``stop_reason``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.core.sched.scheduler import Scheduler

from tonnage.planner.errors import TonnageError
from tonnage.server.engines.grammars import masks
from tonnage.server.engines.grammars.kept import Kept
from tonnage.server.engines.grammars.library import first_line
from tonnage.server.engines.grammars.masks import GrammarMatcher
from tonnage.server.engines.grammars.tags import TagMatcher
from tonnage.server.engines.vllm.passed import COMPLETE, Passed
from tonnage.server.text.gguf_tokenizer import model_files
from tonnage.server.text.grammar import NO_TOKEN

# Each answer that ends so would be an error in the log.
logging.getLogger("vllm.v1.core.sched.scheduler").addFilter(
    lambda record: not record.getMessage().startswith("Unexpected: grammar rejected tokens")
)


class Answer:
    """One answer's grammar, as vLLM's manager wants it (StructuredOutputGrammar in
    v1/structured_output/backend_types.py); what is called there for drafted tokens alone is not here."""

    def __init__(self, tenant: str, matcher: GrammarMatcher | TagMatcher | None, error: str | None) -> None:
        self.tenant, self.matcher, self.error = tenant, matcher, error
        self.request: Any = None  # vLLM's, once it is drawn for
        self.done = False  # its text is complete
        self._row: npt.NDArray[np.int32] | None = None

    def fill_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        row = bitmask[index]
        row.fill_(-1)
        self._row = None
        if self.error is not None or self.matcher is None:
            return  # it ends with what is drawn now
        try:
            self._row = self.matcher.row()
        except Exception as error:  # nothing that a request asks for ends the engine
            self.error = first_line(str(error))
            return
        row[: len(self._row)] = torch.from_numpy(self._row)[: len(row)]

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """False: it ends here, with its ``stop_reason`` saying why."""
        for token in tokens:
            if self.error is None and not self.done:
                self._accept(token)
        if self.error is None and self.done:
            if not self.request.is_finished():  # no stop token can end it
                self.error = COMPLETE
            # vLLM lets a grammar's end come too soon rather than leave no token (MinTokensLogitsProcessor).
            elif self.request.num_output_tokens <= self.request.sampling_params.min_tokens:
                self.error = NO_TOKEN
        if self.error is not None:
            self.request.stop_reason = self.error
        return self.error is None

    def _accept(self, token: int) -> None:
        if self._row is not None and not self._row[token >> 5] >> (token & 31) & 1:
            self.error = NO_TOKEN
            return
        assert self.matcher is not None
        try:
            self.done = self.matcher.accept(token)
        except Exception as error:  # as above
            self.error = first_line(str(error))

    def is_terminated(self) -> bool:
        return self.done


class Backend:
    """As vLLM's manager wants it (StructuredOutputBackend, there). What is wrong is told by the answer."""

    def __init__(self, vllm_config: Any) -> None:
        model = vllm_config.model_config
        self._vocab_size: int = model.get_vocab_size()
        self._kept = Kept(model_files(model.model), self._vocab_size)

    def compile_grammar(
        self, request_type: object, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> Answer:
        passed = Passed.decode(grammar_spec)
        try:
            ends = tuple(stop_token_ids or ())
            matcher = self._kept.begin(passed.grammar, ends, passed.grammar.text, passed.bytes)
        except TonnageError as error:
            return Answer(passed.tenant, None, str(error))
        return Answer(passed.tenant, matcher, None)

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        return torch.full((max_num_seqs, -(-self._vocab_size // 32)), -1, dtype=torch.int32)

    def destroy(self) -> None: ...


class _Threads:
    """Where grammars are compiled: structural tags, which may take long, hold up each other only."""

    def __init__(self) -> None:
        self._grammars = ThreadPoolExecutor(1, "grammars")
        self._tags = ThreadPoolExecutor(1, "structural tags")

    def submit(self, create: Callable[[Any], Answer], request: Any) -> Future[Answer]:
        tag = request.structured_output_request.params.structural_tag is not None
        return (self._tags if tag else self._grammars).submit(create, request)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for threads in (self._grammars, self._tags):
            threads.shutdown(wait=False, cancel_futures=True)


class Bounded(Scheduler):
    """What is added to vLLM's scheduler, whichever it is."""

    def __init__(self, *args: Any, **flags: Any) -> None:
        super().__init__(*args, **flags)
        manager: Any = self.structured_output_manager
        manager.backend = Backend(self.vllm_config)
        manager.executor.shutdown()
        manager.executor = _Threads()

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        """Within the step's budget; those whose turn does not come end."""
        if scheduler_output.has_structured_output_requests:
            drawing = []
            for request_id in scheduler_output.num_scheduled_tokens:
                request: Any = self.requests.get(request_id)
                if request is None or not request.use_structured_output or request.is_prefill_chunk:
                    continue
                answer: Answer = request.structured_output_request.grammar
                answer.request = request
                if answer.matcher is not None and answer.error is None and not answer.done:
                    drawing.append((answer, answer.matcher))
            due = [(answer.tenant, matcher) for answer, matcher in drawing]
            for at, error in masks.fill(due).items() if due else ():
                drawing[at][0].error = error
        return super().get_grammar_bitmask(scheduler_output)
