"""Conversion of vLLM's outputs for one request into the server's `Chunk` objects. Written against vLLM 0.32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tonnage.server.engines.chunk import Chunk, FinishReason, Pooled, TokenLogprobs
from tonnage.server.engines.errors import EngineDead, NeverFits
from tonnage.server.engines.request import GenerationRequest
from tonnage.server.engines.vllm.checked_grammar import COMPLETE, CheckedGrammar
from tonnage.server.engines.vllm.params import prompt_logprobs, token_logprobs
from tonnage.server.engines.vllm.stats_transport import NEVER_FITS


class OutputConverter:
    """A converter of one request's vLLM outputs into chunks.

    It keeps two values between outputs. `cached` is the number of prompt tokens found in the prefix cache, None
    before the first output. `waited` is the seconds that the request spent in the API process before vLLM
    received it.
    """

    def __init__(self, request: GenerationRequest, checked: CheckedGrammar | None, waited: float) -> None:
        self.cached: int | None = None
        self._request, self._grammar, self._waited = request, checked is not None, waited
        self._stops = set(request.params.stop_token_ids)
        # Greedy sequences of one prompt are identical, so vLLM computes one sequence, and its output is
        # returned n times.
        self._copies = request.n if request.params.temperature == 0 else 1

    def chunks(self, output: Any) -> Iterator[Chunk]:
        """Convert one vLLM RequestOutput to chunks and yield them.

        Raises:
            NeverFits: our scheduler ended the request, because the pool can never hold it.
        """
        request, params = self._request, self._request.params
        prompt: tuple[TokenLogprobs | None, ...] = ()
        if self.cached is None:
            self.cached = output.num_cached_tokens or 0
            prompt = prompt_logprobs(request.prompt_token_ids, output.prompt_logprobs, params.prompt_logprobs)
        for sequence in output.outputs:
            tokens = tuple(sequence.token_ids)
            finish, wrong = _finish(sequence)
            if wrong is not None:
                if wrong.startswith(NEVER_FITS):
                    raise NeverFits(wrong, field="prompt")
                tokens = ()
            if sequence.finish_reason == "stop" and tokens and tokens[-1] in self._stops:
                tokens = tokens[:-1]
            if not tokens and not finish and not prompt:
                continue
            for copy in range(self._copies):
                yield Chunk(
                    request.request_id,
                    sequence.index + copy,
                    tokens,
                    finish,
                    self.cached,
                    logprobs=token_logprobs(tokens, sequence.logprobs, params.logprobs),
                    prompt_logprobs=prompt,
                    queued_seconds=self._queued(output.metrics),
                    error=wrong,
                    refused=wrong is not None and self._grammar,
                )

    def pooled(self, output: Any, queued: float | None) -> Chunk:
        """Return the chunk with the result of one vLLM PoolingRequestOutput.

        Args:
            output: the PoolingRequestOutput.
            queued: seconds that the request waited inside vLLM; None if unknown.

        Raises:
            EngineDead: vLLM failed on this request.
        """
        if output.error is not None:
            raise EngineDead(f"vLLM failed on this request: {output.error.message[:300]}")
        self.cached = output.num_cached_tokens or 0
        return Chunk(
            self._request.request_id,
            0,
            (),
            "length",
            self.cached,
            pooled=_nested(output.outputs.data),
            queued_seconds=None if queued is None else self._waited + queued,
        )

    def _queued(self, metrics: Any) -> float | None:
        """Return the seconds from a request's arrival until vLLM first scheduled it; None if not scheduled."""
        if metrics is None or not metrics.scheduled_ts:
            return None
        return self._waited + max(0.0, float(metrics.scheduled_ts - metrics.queued_ts))


def _nested(values: Any) -> Pooled:
    """Return the values of a pooling result, a tensor [size] or [tokens, size], as (nested) tuples."""
    if values.dim() == 2:
        return tuple(map(tuple, values.tolist()))
    return tuple(values.reshape(-1).tolist())


def _finish(sequence: Any) -> tuple[FinishReason | None, str | None]:
    """Return the finish reason of a vLLM CompletionOutput and its error message; each may be None."""
    finish, said = sequence.finish_reason, sequence.stop_reason
    if finish != "error":
        return finish, None
    if said == COMPLETE:
        return "stop", None
    # A grammar (.grammars) or our scheduler has put its error message into the stop_reason.
    return finish, said if isinstance(said, str) else "vLLM ended it with an error"
