"""/v1/completions without HTTP: a request in, a completion or a stream of chunks out."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from tonnage.server.accounts import Outcome, Ticket
from tonnage.server.api.completions.protocol import (
    Choice,
    Completion,
    CompletionRequest,
    PromptTokensDetails,
    Usage,
)
from tonnage.server.api.generation import Finish, Generator, Submission, TokenCounts
from tonnage.server.engines.base import SamplingParams
from tonnage.server.errors import ApiError, ErrorCode
from tonnage.server.state import ServerState


class CompletionService:
    """Answers of one app. Every method raises ApiError or the engine's TonnageErrors."""

    def __init__(self, state: ServerState, generator: Generator) -> None:
        self._state = state
        self._generator = generator

    async def complete(self, request: CompletionRequest, ticket: Ticket) -> Completion:
        """The whole answer. Cancelling the call aborts the request."""
        submission, echo = await self._prepare(request)
        counts = TokenCounts()
        texts = list(echo)
        reasons: dict[int, Finish] = {}
        async with aclosing(self._generator.run(submission, counts, ticket)) as deltas:
            async for delta in deltas:
                texts[delta.index] += delta.text
                if delta.finish_reason is not None:
                    reasons[delta.index] = delta.finish_reason
        ticket.finish(_outcome(reasons))
        answer = self._empty()
        answer.choices = [
            Choice(index=index, text=text, finish_reason=reasons[index]) for index, text in enumerate(texts)
        ]
        answer.usage = _usage(counts)
        return answer

    async def stream(self, request: CompletionRequest, ticket: Ticket) -> AsyncGenerator[Completion, None]:
        """Chunks as the text comes; closing the iterator aborts the request."""
        submission, echo = await self._prepare(request)
        counts = TokenCounts()
        reasons: dict[int, Finish] = {}
        chunk = self._empty()
        async with aclosing(self._generator.run(submission, counts, ticket)) as deltas:
            async for delta in deltas:
                text = echo[delta.index] + delta.text
                echo[delta.index] = ""
                if delta.finish_reason is not None:
                    reasons[delta.index] = delta.finish_reason
                chunk.choices = [Choice(index=delta.index, text=text, finish_reason=delta.finish_reason)]
                yield chunk
        ticket.finish(_outcome(reasons))
        if request.stream_options is not None and request.stream_options.include_usage:
            chunk.choices = []
            chunk.usage = _usage(counts)
            yield chunk

    def _empty(self) -> Completion:
        return Completion(
            id=f"cmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self._state.model_name,
            choices=[],
            system_fingerprint=f"tonnage-{self._state.plan.plan_id}",
        )

    async def _prepare(self, request: CompletionRequest) -> tuple[Submission, list[str]]:
        """Tokens, limits and sampling parameters; and what each choice echoes of its prompt."""
        state = self._state
        if request.model != state.model_name:
            raise ApiError(
                ErrorCode.MODEL_NOT_FOUND,
                f"the model {request.model[:100]!r} does not exist; this server has {state.model_name!r}",
                param="model",
            )
        if request.stream_options is not None and not request.stream:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                "stream_options is only allowed with stream: true",
                param="stream_options",
            )
        state.check_ready()
        prompts = await self._tokens(request)
        n = request.n or 1
        stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
        eos = () if request.ignore_eos else state.tokenizer.eos_token_ids
        given = SamplingParams(
            max_tokens=self._generator.max_tokens(request.max_tokens, max(map(len, prompts)))
        )
        params = SamplingParams(
            max_tokens=given.max_tokens,
            temperature=given.temperature if request.temperature is None else request.temperature,
            top_p=given.top_p if request.top_p is None else request.top_p,
            top_k=max(0, request.top_k or 0),
            min_p=request.min_p or 0.0,
            seed=request.seed,
            stop_token_ids=(*eos, *(request.stop_token_ids or ())),
        )
        echo = [text for text in self._echo(request, prompts) for _ in range(n)]
        return Submission(prompts, params, n, stop, request.cache_salt or ""), echo

    async def _tokens(self, request: CompletionRequest) -> tuple[tuple[int, ...], ...]:
        prompt = request.prompt
        prompts: list[tuple[int, ...]] = []
        for item in _as_list(prompt):
            prompts.append(await self._generator.encode(item) if isinstance(item, str) else tuple(item))
        vocabulary = self._state.plan.model.vocab_size
        for ids in prompts:
            if not ids:
                raise ApiError(ErrorCode.INVALID_VALUE, "the prompt has no tokens", param="prompt")
            if max(ids) >= vocabulary:
                raise ApiError(
                    ErrorCode.INVALID_VALUE,
                    f"prompt: token id {max(ids)} is outside the vocabulary of {vocabulary} tokens",
                    param="prompt",
                )
        return tuple(prompts)

    def _echo(self, request: CompletionRequest, prompts: tuple[tuple[int, ...], ...]) -> list[str]:
        if not request.echo:
            return [""] * len(prompts)
        texts = _as_list(request.prompt)
        return [
            text if isinstance(text, str) else self._state.tokenizer.decode(ids)
            for text, ids in zip(texts, prompts, strict=True)
        ]


def _as_list(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str] | list[list[int]]:
    """The four forms of ``prompt`` as a list of texts or of token id lists."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]  # the first item decides: the protocol has no mixed lists
    return prompt


def _outcome(reasons: dict[int, Finish]) -> Outcome:
    """One outcome for a request of several choices: length as soon as one was cut off."""
    return "length" if "length" in reasons.values() else "stop"


def _usage(counts: TokenCounts) -> Usage:
    return Usage(
        prompt_tokens=counts.prompt,
        completion_tokens=counts.completion,
        total_tokens=counts.prompt + counts.completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=counts.cached_total),
    )
