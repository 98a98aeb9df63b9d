"""Logic of /v1/completions without HTTP code: it turns a request into a completion or stream events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii  # quotes a string as json.dumps does, with less overhead

from tonnage.server.api.completions.protocol import (
    FIELDS,
    Choice,
    Completion,
    CompletionRequest,
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from tonnage.server.api.endpoint import StreamingService
from tonnage.server.api.generation import Delta, Finish
from tonnage.server.api.logprobs import COMPLETION_LISTS, CompletionLogprobs, JsonLists, with_logprobs
from tonnage.server.api.sampling import check_stream_options, prompt_list
from tonnage.server.api.token_output import TokenOutput, check_prompt_logprobs, ids_member
from tonnage.server.errors import invalid_value, unsupported_parameter
from tonnage.server.http.outbox import HeldAnswer
from tonnage.server.requests.accounts import Ticket
from tonnage.server.requests.counts import Outcome
from tonnage.server.requests.submission import Submission, TokenCounts
from tonnage.server.state import ServerState


@dataclass(slots=True)
class _Answer:
    """The text, log probabilities and finish reason of one choice, collected while it is generated."""

    echo: str = ""  # the prompt's text, when the request has echo; it is shown before the completion
    text: list[str] = field(default_factory=list)
    lists: JsonLists = field(default_factory=lambda: JsonLists(COMPLETION_LISTS))
    tokens: int = 0
    logprob: float = 0.0  # sum of the log probabilities of the choice's tokens
    finish: Finish | None = None
    index: int = 0  # index among all generated choices, of which best_of may drop some

    @property
    def mean_logprob(self) -> float:
        return self.logprob / max(1, self.tokens)


class CompletionService(StreamingService[CompletionRequest]):
    """Logic of the completions endpoint; its methods may raise ApiError or the engine's TonnageErrors."""

    fields = FIELDS

    async def complete(self, request: CompletionRequest, ticket: Ticket) -> bytes:
        """Return the complete answer as JSON; cancelling the call aborts the request."""
        submission, echo = await self._prepare(request)
        counts = TokenCounts()
        answers = [_Answer(text, index=index) for index, text in enumerate(echo)]
        only_prompt = request.max_tokens == 0
        builders = self._builders(request, echo)
        deltas = self._generator.run(submission, counts, ticket)
        with closing(HeldAnswer(self._state.outboxes)) as held:
            output = TokenOutput(self._state, request, submission, held, hides_tokens=only_prompt)
            async with aclosing(deltas):
                async for delta in deltas:
                    await output.take(delta)
                    answer = answers[delta.index]
                    answer.text.append(delta.text)
                    answer.finish = delta.finish_reason or answer.finish
                    answer.tokens += len(delta.logprobs)
                    answer.logprob += sum(token.logprob for token in delta.logprobs)
                    if builders:
                        tokens = (*delta.prompt_logprobs, *(() if only_prompt else delta.logprobs))
                        prompt = submission.prompts[delta.index // submission.n]
                        held.hold(answer.lists.add(builders[delta.index].take(tokens, prompt)))
        ticket.finish(outcome_of_finishes([answer.finish for answer in answers]))
        n = request.n or 1
        kept = self._best(answers, submission.n, n)
        completion = Completion(
            id=f"cmpl-{ticket.request_id}",
            created=int(time.time()),
            model=request.model,
            choices=[
                Choice(
                    index=index,
                    text=answer.echo + ("" if only_prompt else "".join(answer.text)),
                    logprobs=None,
                    finish_reason="length" if only_prompt else answer.finish,
                    token_ids=output.token_ids(answer.index),
                    prompt_token_ids=output.prompt_token_ids(index // n),
                    prompt_logprobs=output.scores(),
                )
                for index, answer in enumerate(kept)
            ],
            system_fingerprint=self._state.fingerprint,
            usage=usage(counts, scoring=request.max_tokens == 0),
        )
        shown = completion.model_dump_json()
        if builders:
            shown = with_logprobs(shown, [answer.lists.text() for answer in kept])
        shown = output.fill(shown, [index // n for index in range(len(kept))])
        return shown.encode()

    def _builders(self, request: CompletionRequest, echo: Sequence[str]) -> list[CompletionLogprobs]:
        """Return one builder of ``logprobs`` per choice, or an empty list for a request without logprobs.

        ``echo`` has one string per choice: the prompt text with which the choice begins, or an empty string.
        """
        if request.logprobs is None:
            return []
        special = request.skip_special_tokens is False
        return [
            CompletionLogprobs(self._state.tokenizer, request.logprobs, text, special_tokens=special)
            for text in echo
        ]

    @staticmethod
    def _best(answers: list[_Answer], generated: int, n: int) -> list[_Answer]:
        """Return each prompt's ``n`` answers with the highest mean log probability.

        ``answers`` has ``generated`` consecutive answers for each prompt.
        """
        if generated == n:
            return answers
        kept: list[_Answer] = []
        for at in range(0, len(answers), generated):
            ranked = sorted(answers[at : at + generated], key=lambda answer: -answer.mean_logprob)
            kept += ranked[:n]
        return kept

    async def stream(self, request: CompletionRequest, ticket: Ticket) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of a completion as its text arrives.

        Closing the iterator aborts the request.
        """
        submission, echo = await self._prepare(request)
        counts = TokenCounts()
        finishes: dict[int, Finish] = {}
        events = _CompletionEvents(self._state, ticket.request_id, request.model, request.include_usage())
        logprobs = self._builders(request, echo)
        continuous = request.continuous_usage()
        begun: set[int] = set()
        async with aclosing(self._generator.run(submission, counts, ticket)) as deltas:
            async for delta in deltas:
                index = delta.index
                if echo[index]:
                    delta.text = echo[index] + delta.text
                    echo[index] = ""
                if delta.finish_reason is not None:
                    finishes[index] = delta.finish_reason
                lists = b"null"
                if logprobs:
                    prompt = submission.prompts[index // submission.n]
                    tokens = (*delta.prompt_logprobs, *delta.logprobs)
                    lists = json.dumps(logprobs[index].take(tokens, prompt)).encode()
                if continuous:
                    events.usage_member = usage_so_far(counts)
                ids = b""
                if request.return_token_ids:
                    if index not in begun:
                        begun.add(index)
                        ids = ids_member("prompt_token_ids", submission.prompts[index // submission.n])
                    ids += ids_member("token_ids", delta.token_ids)
                yield events.delta(delta, lists, ids)
        ticket.finish(outcome_of_finishes(list(finishes.values())))
        if request.include_usage():
            yield events.usage(counts)

    async def _prepare(self, request: CompletionRequest) -> tuple[Submission, list[str]]:
        """Return what the request submits to the engine, and for each choice the prompt text to echo."""
        state, generator = self._state, self._generator
        lora = state.check_model(request.model)
        state.check_task()
        check_stream_options(request)
        check_prompt_logprobs(request)
        if (request.best_of or 1) > (request.n or 1) and "logprobs" not in state.honours:
            raise unsupported_parameter(
                f"best_of is not supported by this server's engine; leave it out or send n = {request.n or 1}",
                "best_of",
            )
        generated = self._sequences(request)
        scoring = request.max_tokens == 0
        if scoring and (not request.echo or request.stream):
            raise invalid_value(
                "max_tokens must be at least 1; 0 is only allowed with echo and without stream", "max_tokens"
            )
        scored = bool(request.echo) and request.logprobs is not None
        if scored and "prompt_logprobs" not in state.honours:
            raise unsupported_parameter(
                "logprobs together with echo are not supported by this server's engine; leave one of them out",
                "logprobs",
            )
        state.check_ready()
        if request.suffix and scored:
            raise invalid_value("suffix cannot be used with both echo and logprobs", "suffix")
        prompts = await self._tokens(request, generated)
        max_tokens = generator.max_tokens(
            1 if scoring else request.max_tokens,
            max(map(len, prompts)),
            default=state.settings.default_max_tokens,
        )
        top = request.logprobs
        params = request.sampling(
            max_tokens,
            state.tokenizer.eos_token_ids,
            state.plan.model.vocab_size,
            logprobs=0 if top is None and generated > (request.n or 1) else top,
            prompt_logprobs=_larger(top if scored else None, request.prompt_logprobs),
        )
        submission = Submission(
            prompts,
            params,
            generated,
            request.stop_strings(),
            request.cache_salt or "",
            request.priority,
            request.skip_special_tokens is False,
            bool(request.return_token_ids),
            lora,
            shows_stop=bool(request.include_stop_str_in_output),
        )
        echo = [text for text in self._echo(request, prompts) for _ in range(generated)]
        request.prompt = ""
        request.forget()
        return submission, echo

    @staticmethod
    def _sequences(request: CompletionRequest) -> int:
        """Return the number of sequences to generate per prompt: ``best_of`` if given, else ``n``.

        Of ``best_of`` sequences, the ``n`` best are returned to the client.
        """
        n, best_of = request.n or 1, request.best_of
        if best_of is None or best_of == n:
            return n
        if best_of < n:
            raise invalid_value(f"best_of is {best_of}, less than n = {n}", "best_of")
        if request.stream:
            raise invalid_value(
                f"best_of is {best_of}, more than n = {n}: this cannot be streamed; send stream: false",
                "best_of",
            )
        return best_of

    async def _tokens(self, request: CompletionRequest, generated: int) -> tuple[tuple[int, ...], ...]:
        special = request.add_special_tokens is not False
        self._generator.check_sequences(len(prompt_list(request.prompt)), generated)
        prompts = await self._generator.token_ids(
            self._filled_in(request), add_special_tokens=special, param="prompt"
        )
        cut = request.truncate_prompt_tokens
        return tuple(self._generator.truncated(prompt, cut, request.max_tokens) for prompt in prompts)

    def _filled_in(self, request: CompletionRequest) -> list[str] | list[list[int]]:
        """Return the request's prompts, as text or token ids.

        If the request has a ``suffix``, each prompt is text in the model's fill-in-the-middle format.
        """
        items = prompt_list(request.prompt)
        if not request.suffix:
            return items
        texts: list[str] = []
        for item in items:
            if not isinstance(item, str):
                raise invalid_value("suffix needs a prompt of text, not of token ids", "suffix")
            text = self._state.tokenizer.fill_in_the_middle(item, request.suffix)
            if text is None:
                raise unsupported_parameter(
                    "suffix is not supported: the model has no known fill-in-the-middle tokens; leave it out",
                    "suffix",
                )
            texts.append(text)
        return texts

    def _echo(self, request: CompletionRequest, prompts: tuple[tuple[int, ...], ...]) -> list[str]:
        if not request.echo:
            return [""] * len(prompts)
        texts, tokenizer = prompt_list(request.prompt), self._state.tokenizer
        return [
            text if isinstance(text, str) and not request.truncate_prompt_tokens else tokenizer.decode(ids)
            for text, ids in zip(texts, prompts, strict=True)
        ]


class ChunkWriter:
    """Base class of the writers of a stream's JSON chunks.

    The parts that all chunks of a stream share are serialized only once.
    """

    prefix: str  # prefix of the id that all chunks of the stream have
    kind: str  # value of the chunks' member ``object``

    def __init__(self, state: ServerState, request_id: str, model: str, include_usage: bool) -> None:
        head = {"id": f"{self.prefix}-{request_id}", "object": self.kind, "created": int(time.time())}
        start = json.dumps(head, separators=(",", ":"))[:-1]
        self._head = f'data: {start},"model":{json.dumps(model)},"choices":['.encode()
        self._tail = f'],"system_fingerprint":{json.dumps(state.fingerprint)}'.encode()
        # the usage so far as JSON, for streams in which every chunk has it
        self.usage_member = NO_USAGE_YET if include_usage else b""

    def usage(self, counts: TokenCounts) -> bytes:
        """Return a stream's final chunk, which contains the token usage and no choice."""
        return b"%b%b%b}\n\n" % (self._head, self._tail, usage_so_far(counts))


class _CompletionEvents(ChunkWriter):
    """Writer of the chunks of a streamed completion."""

    prefix, kind = "cmpl", "text_completion"

    def delta(self, delta: Delta, logprobs: bytes, more: bytes) -> bytes:
        finish = b'"%s"' % delta.finish_reason.encode() if delta.finish_reason else b"null"
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}%b%b}\n\n' % (
            self._head,
            delta.index,
            encode_basestring_ascii(delta.text).encode(),
            logprobs,
            finish,
            more,
            self._tail,
            self.usage_member,
        )


def _larger(one: int | None, other: int | None) -> int | None:
    """Return the larger of two numbers; a None is ignored, and two Nones give None."""
    return max((number for number in (one, other) if number is not None), default=None)


def outcome_of_finishes(finishes: list[Finish | None]) -> Outcome:
    """Return the outcome of a request with several choices: ``length`` if any was cut off, else ``stop``."""
    return "length" if "length" in finishes else "stop"


def usage(counts: TokenCounts, *, scoring: bool = False) -> Usage:
    """Return the token counts of a request as OpenAI's usage object.

    Args:
        counts: The request's prompt, cached and completion tokens.
        scoring: Whether the request only asks for log probabilities of its prompt. The engine then still
            generates one token, which is not counted.
    """
    completion = 0 if scoring else counts.completion
    return Usage(
        prompt_tokens=counts.prompt,
        completion_tokens=completion,
        total_tokens=counts.prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=counts.cached_total),
        completion_tokens_details=(
            None if counts.reasoning is None else CompletionTokensDetails(reasoning_tokens=counts.reasoning)
        ),
    )


# With include_usage every chunk has the member ``usage``, which is null until the last chunk (openai's
# ChatCompletionChunk.usage).
NO_USAGE_YET = b',"usage":null'


def usage_so_far(counts: TokenCounts) -> bytes:
    """Return the token usage so far as the JSON member ``usage``, which ends the object of a streamed chunk."""
    return b',"usage":' + usage(counts).model_dump_json().encode()
