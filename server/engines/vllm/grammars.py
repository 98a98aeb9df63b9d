"""Structured output inside vLLM's engine core, with the matchers and limits of the HF engine.

Written against vLLM 0.32. vLLM's own backends compile grammars in the event loop of the API process and fill
token masks without a time limit. Here llguidance has limits, and the masks of a step have a time budget. A
sequence that exceeds a limit ends with the error as its `stop_reason`.
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
from tonnage.server.engines.grammars.cache import GrammarCache
from tonnage.server.engines.grammars.library import first_line
from tonnage.server.engines.grammars.masks import GrammarMatcher
from tonnage.server.engines.grammars.structural_tags import TagMatcher
from tonnage.server.engines.vllm.checked_grammar import COMPLETE, CheckedGrammar
from tonnage.server.text.gguf_tokenizer import model_files
from tonnage.server.text.grammar import NO_TOKEN

# Drop vLLM's error log for each sequence that ends because of its grammar.
logging.getLogger("vllm.v1.core.sched.scheduler").addFilter(
    lambda record: not record.getMessage().startswith("Unexpected: grammar rejected tokens")
)


class GrammarState:
    """The grammar state of one request, with the interface of vLLM's StructuredOutputGrammar.

    The interface is in v1/structured_output/backend_types.py. Methods that only speculative decoding needs are
    missing.
    """

    def __init__(self, tenant: str, matcher: GrammarMatcher | TagMatcher | None, error: str | None) -> None:
        self.tenant, self.matcher, self.error = tenant, matcher, error
        self.request: Any = None  # vLLM's Request object, set before its first token mask is needed
        self.done = False  # whether the output so far matches the whole grammar
        self._row: npt.NDArray[np.int32] | None = None

    def fill_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        """Write the mask of permitted next tokens into row `index` of `bitmask` (int32 [sequences, words]).

        A word has one bit for each of 32 tokens.
        """
        row = bitmask[index]
        row.fill_(-1)
        self._row = None
        if self.error is not None or self.matcher is None:
            return  # after an error the next token ends the sequence, so every token is permitted
        try:
            self._row = self.matcher.row()
        except Exception as error:  # an error of one request's grammar must not stop the engine
            self.error = first_line(str(error))
            return
        row[: len(self._row)] = torch.from_numpy(self._row)[: len(row)]

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Advance the request's grammar matcher by sampled tokens.

        Returns:
            False if the sequence has to end; its `stop_reason` is then set.
        """
        for token in tokens:
            if self.error is None and not self.done:
                self._accept(token)
        if self.error is None and self.done:
            # The output matches the whole grammar, but no stop token has ended the sequence: end it here.
            if not self.request.is_finished():
                self.error = COMPLETE
            # vLLM permits a stop token before min_tokens if no other token is possible
            # (MinTokensLogitsProcessor).
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
        except Exception as error:  # an error of one request's grammar must not stop the engine
            self.error = first_line(str(error))

    def is_terminated(self) -> bool:
        """Return whether the output matches the whole grammar, so that it is complete."""
        return self.done


class GrammarBackend:
    """A factory of requests' grammar states, with the interface of vLLM's StructuredOutputBackend.

    If a grammar fails to compile, the factory returns a state that holds the error. The sequence reports the
    error when it ends.
    """

    def __init__(self, vllm_config: Any) -> None:
        model = vllm_config.model_config
        self._vocab_size: int = model.get_vocab_size()
        self._cache = GrammarCache(model_files(model.model), self._vocab_size)

    def compile_grammar(
        self, request_type: object, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> GrammarState:
        """Return the grammar state for a grammar that the API process has checked and encoded."""
        checked = CheckedGrammar.decode(grammar_spec)
        try:
            ends = tuple(stop_token_ids or ())
            matcher = self._cache.begin(checked.grammar, ends, checked.grammar.text, checked.bytes)
        except TonnageError as error:
            return GrammarState(checked.tenant, None, str(error))
        return GrammarState(checked.tenant, matcher, None)

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        """Return a mask that permits every token (int32 [max_num_seqs, vocab / 32], one bit per token)."""
        return torch.full((max_num_seqs, -(-self._vocab_size // 32)), -1, dtype=torch.int32)

    def destroy(self) -> None:
        """Do nothing at the end of the engine, because the factory holds no resource to release."""


class _Threads:
    """An executor with two threads that compile requests' grammars.

    Structural tags may take long to compile, so they have a thread of their own.
    """

    def __init__(self) -> None:
        self._grammars = ThreadPoolExecutor(1, "grammars")
        self._tags = ThreadPoolExecutor(1, "structural tags")

    def submit(self, create: Callable[[Any], GrammarState], request: Any) -> Future[GrammarState]:
        """Compile a vLLM request's grammar by calling ``create(request)`` in another thread.

        Structural tags have a thread of their own. Returns a future of the grammar state.
        """
        tag = request.structured_output_request.params.structural_tag is not None
        return (self._tags if tag else self._grammars).submit(create, request)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel the pending compilations of grammars, without waiting for the running ones."""
        for threads in (self._grammars, self._tags):
            threads.shutdown(wait=False, cancel_futures=True)


class BoundedGrammars(Scheduler):
    """A mixin for vLLM's scheduler that limits the memory and time that grammars take."""

    def __init__(self, *args: Any, **flags: Any) -> None:
        super().__init__(*args, **flags)
        manager: Any = self.structured_output_manager
        manager.backend = GrammarBackend(self.vllm_config)
        manager.executor.shutdown()
        manager.executor = _Threads()

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        """Return the grammars' token masks of a step.

        Sequences whose masks exceed the step's time budget are ended.
        """
        if scheduler_output.has_structured_output_requests:
            drawing = []
            for request_id in scheduler_output.num_scheduled_tokens:
                request: Any = self.requests.get(request_id)
                if request is None or not request.use_structured_output or request.is_prefill_chunk:
                    continue
                answer: GrammarState = request.structured_output_request.grammar
                answer.request = request
                if answer.matcher is not None and answer.error is None and not answer.done:
                    drawing.append((answer, answer.matcher))
            due = [(answer.tenant, matcher) for answer, matcher in drawing]
            for at, error in masks.fill(due).items() if due else ():
                drawing[at][0].error = error
        return super().get_grammar_bitmask(scheduler_output)
