"""Generation of text from prompts: the logic without HTTP that every generating endpoint shares.

It reserves places in the queue, merges the chunks of several prompts, detokenizes, applies stop strings, and
counts tokens and latencies. Closing the iterator of ``Generator.run`` aborts the request.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Literal, TypeVar

from tonnage.server.engines.base import Engine
from tonnage.server.engines.chunk import Chunk, Pooled, TokenLogprobs
from tonnage.server.engines.errors import NeverFits, Refused
from tonnage.server.engines.inbox import Inbox
from tonnage.server.engines.packed import TokenIds
from tonnage.server.engines.request import GenerationRequest, Pooling, SamplingParams
from tonnage.server.errors import ApiError, ErrorCode, invalid_value
from tonnage.server.http.turns import Turns
from tonnage.server.requests.accounts import Ticket
from tonnage.server.requests.submission import Submission, TokenCounts
from tonnage.server.state import ServerState
from tonnage.server.text.stop_strings import StopStrings
from tonnage.server.text.tokenizer import ByteDetokenizer, Detokenizer, detokenizer
from tonnage.server.text.tool_calls import Parsed, ToolUse

# Texts of at most this many characters are encoded on the event loop; encoding takes about one microsecond per
# character. A longer text is encoded in a thread, in slices of about this size. Each slice blocks the event
# loop for at most about ten milliseconds, and a disconnect stops the work after the current slice.
_ENCODE_INLINE_CHARACTERS = 16_384

# Converting an item of a conversation (a content block, a tool call) takes about ten microseconds. More items
# than this are converted in a thread.
_ITEMS_INLINE = 100

# Encoding a text in one piece takes 100 (English) to 210 (emoji, combining marks) bytes of memory per byte of
# UTF-8: peak of tokenizers 0.23 for texts of 300,000 characters with the demo model's tokenizer. A text longer
# than this limit and than _BYTES_A_TOKEN per token of the context is therefore first encoded in slices, to
# count its tokens. Ordinary prompts have three to five bytes per token, fewer than _BYTES_A_TOKEN.
_ENCODE_WHOLE_BYTES = 2**17
# At most this many requests encode long texts at once, because each needs memory and holds the GIL while its
# list of token ids is built.
_ENCODED_AT_ONCE = 2
_BYTES_A_TOKEN = 8

Finish = Literal["stop", "length"]
Result = TypeVar("Result")


@dataclass(slots=True)
class Delta:
    """New text of one choice of a request.

    ``index`` is the index of the prompt times ``n`` plus the index of the sequence. ``token_ids`` and
    ``logprobs`` describe all tokens that arrived. ``text`` may lack their last characters while these could be
    the start of a stop string.
    """

    index: int
    text: str
    finish_reason: Finish | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    token_ids: tuple[int, ...] = ()
    pooled: Pooled = ()
    stop_string: str | None = None  # the stop string that ended the choice


@dataclass(slots=True)
class _Sequence:
    """The state of one choice while it is generated: its decoder, stop strings and token limits."""

    detokenizer: Detokenizer | ByteDetokenizer
    stop: StopStrings
    min_tokens: int  # stop strings have no effect before the choice has this many tokens
    shows_stop: bool = False  # whether the text includes the stop string that ended it
    last: float | None = None
    finished: bool = False


class Generator:
    """Executor of generation requests: it queues submissions, runs them on the engine and yields their text."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._encoding = Turns(_ENCODED_AT_ONCE)
        self._sequences = 0  # sequences of unfinished requests, whether waiting or running

    @property
    def sequences(self) -> int:
        """Return the number of sequences of unfinished requests, whether waiting or running."""
        return self._sequences

    @property
    def ordinary_bytes(self) -> int:
        """Return the maximum size, in UTF-8 bytes, of a text that is encoded without counting its tokens first.

        An ordinary text that fits into the context is smaller. The tokens of a larger text are first counted
        in slices, which takes little memory, because the text may exceed the context.
        """
        return max(_ENCODE_WHOLE_BYTES, _BYTES_A_TOKEN * self._state.max_model_len)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of a prompt; a long text is encoded in a thread."""
        (ids,) = await self.encode_all([text], add_special_tokens=add_special_tokens)
        return ids

    async def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each prompt of a request, encoded in a thread when they are long."""
        tokenizer = self._state.tokenizer
        if sum(map(len, texts)) <= _ENCODE_INLINE_CHARACTERS:
            return tuple(tuple(tokenizer.encode(text, add_special_tokens)) for text in texts)
        found: list[tuple[int, ...]] = []
        one: dict[int, int] = {}  # equal ids share one int object, so a token takes 8 bytes instead of 40
        for part in _slices(texts, size=len):
            for ids in await self.in_thread(tokenizer.encode_all, part, add_special_tokens):
                found.append(tuple(map(one.setdefault, ids, ids)))
        return tuple(found)

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, add_special_tokens: bool = True
    ) -> list[tuple[tuple[int, ...], int | None]]:
        """Return the token ids of each pair of texts, and the index of the first token of the second text.

        The index is None if the tokenizer has no token types.
        """
        encode = self._state.tokenizer.encode_pairs
        found: list[tuple[tuple[int, ...], int | None]] = []
        one: dict[int, int] = {}  # equal ids share one int object: 8 bytes per token instead of 40
        for part in _slices(pairs, size=lambda pair: len(pair[0]) + len(pair[1])):
            encoded = await self.in_thread(encode, part, add_special_tokens)
            found += [(tuple(map(one.setdefault, ids, ids)), second) for ids, second in encoded]
        return found

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token id, decoded on its own."""
        found: list[str] = []
        for at in range(0, len(ids), _ENCODE_INLINE_CHARACTERS):
            found += await self.in_thread(
                self._state.tokenizer.token_texts, ids[at : at + _ENCODE_INLINE_CHARACTERS]
            )
        return found

    async def in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Return the result of ``work``, called in a thread; at most two calls run at once.

        API keys take turns, so a key with many requests delays the others by one call at most.
        """
        async with self._encoding:
            return await asyncio.to_thread(work, *arguments)

    async def converted(self, items: int, work: Callable[..., Result], *arguments: Any) -> Result:
        """Call ``work``, which converts ``items`` parts of a request body, and return its result.

        With many parts it is called in a thread, so that the event loop is not blocked.
        """
        if items <= _ITEMS_INLINE:
            return work(*arguments)
        return await self.in_thread(work, *arguments)

    async def check_characters(self, texts: Sequence[str], param: str) -> None:
        """Raise ApiError (context_length_exceeded) if a text has more than twice as many tokens as the context.

        Tokens of a long text are counted in slices, which needs less memory than encoding it as a whole. The
        cuts between slices change the count by far less than a factor of two.
        """
        tokenizer, limit, whole = self._state.tokenizer, self._state.max_model_len, self.ordinary_bytes
        for text in texts:
            if _utf8_bytes(text) <= whole:
                continue
            tokens = 0
            for at in range(0, len(text), _ENCODE_INLINE_CHARACTERS):
                part = text[at : at + _ENCODE_INLINE_CHARACTERS]
                tokens += len((await self.in_thread(tokenizer.encode_all, [part], False))[0])
                if tokens > 2 * limit:
                    self._state.accounts.refused["never", "max_model_len"] += 1
                    raise ApiError(
                        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                        f"this model's maximum context length is {limit} tokens; the first "
                        f"{at + len(part)} of {len(text)} characters alone make {tokens}: shorten the prompt",
                        param=param,
                    )

    async def token_ids(
        self, items: list[str] | list[list[int]], *, add_special_tokens: bool, param: str
    ) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each prompt, given as text or as ids.

        Raises:
            ApiError: A prompt is too long or empty, or has an id outside the vocabulary.
        """
        texts = [item for item in items if isinstance(item, str)]
        await self.check_characters(texts, param)
        prompts = (
            await self.encode_all(texts, add_special_tokens=add_special_tokens)
            if texts
            else tuple(tuple(item) for item in items if not isinstance(item, str))
        )
        for prompt in prompts:
            self.check_token_ids([prompt], param)
            await asyncio.sleep(0)  # let other tasks run, because the prompts may have millions of tokens
        return prompts

    def check_token_ids(self, prompts: Sequence[Sequence[int]], param: str) -> None:
        """Raise ApiError for an empty prompt or for ids outside the vocabulary."""
        vocabulary = self._state.plan.model.vocab_size
        for ids in prompts:
            if not ids:
                raise invalid_value("the prompt has no tokens; it needs at least one", param)
            if (largest := max(ids)) >= vocabulary:
                raise invalid_value(
                    f"{param}: token id {largest} is outside the vocabulary of {vocabulary} tokens", param
                )

    def truncated(self, prompt: tuple[int, ...], tokens: int | None, max_tokens: int | None) -> tuple[int, ...]:
        """Return the last ``tokens`` token ids of a prompt (``truncate_prompt_tokens``).

        Args:
            prompt: The token ids.
            tokens: Number of tokens to keep; -1 keeps what ``max_tokens`` leaves of the context, None all.
            max_tokens: The request's limit of completion tokens; None counts as one token.

        Raises:
            ApiError: No token would be left.
        """
        if tokens is None:
            return prompt
        kept = self._state.max_model_len - (max_tokens or 1) if tokens == -1 else tokens
        if kept < 1:
            raise invalid_value(
                f"truncate_prompt_tokens is {tokens}: no token of the prompt would be left",
                "truncate_prompt_tokens",
            )
        return prompt[-kept:]

    def max_tokens(
        self,
        limit: int | None,
        longest_prompt: int,
        *,
        default: int,
        param: str = "max_tokens",
        prompt: str = "prompt",
    ) -> int:
        """Return the maximum number of completion tokens of a request.

        Args:
            limit: The request's own limit in tokens, which must fit into the context; None if the request sets
                none.
            longest_prompt: Tokens of the longest prompt.
            default: Limit for a request that sets none, in tokens, reduced to what the context leaves.
            param: The request field of the limit, which an error names.
            prompt: The request field of the prompt, which an error names.

        Raises:
            ApiError: Prompt and completion exceed the context (context_length_exceeded); a retry cannot
                succeed.
        """
        context = self._state.max_model_len
        left = context - longest_prompt
        tokens = min(default, max(1, left)) if limit is None else limit
        if tokens > left:
            self._state.accounts.refused["never", "max_model_len"] += 1
            raise ApiError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"this model's maximum context length is {context} tokens; the request needs "
                f"{longest_prompt + tokens} ({longest_prompt} in the prompt, {tokens} for the completion); "
                + (f"at most {left} completion tokens fit" if left > 0 else "shorten the prompt"),
                param=prompt if left < 1 or limit is None else param,
            )
        return tokens

    def check_sequences(self, prompts: int, n: int, *, param: str = "prompt") -> None:
        """Raise ApiError for a request with more sequences than the queue or the batch can ever hold.

        A retry cannot succeed. The check precedes the encoding, because a request may have millions of prompts.
        """
        accounts, limit = self._state.accounts, self._state.settings.max_num_queued_reqs
        wanted = prompts * n
        batch = self._state.plan.deployment.max_num_seqs
        if batch is not None and n > batch:
            accounts.refused["never", "sequences"] += 1
            raise invalid_value(
                f"n = {n}, but the server runs at most {batch} sequences at once (max_num_seqs)", "n"
            )
        if wanted > limit:
            accounts.refused["never", "max_num_queued_reqs"] += 1
            raise invalid_value(
                f"{prompts} prompts with n = {n} make {wanted} sequences; "
                f"the server's queue holds at most {limit} (max_num_queued_reqs): send fewer prompts at once",
                param if prompts > 1 else "n",
            )

    def _enqueue(self, submission: Submission, ticket: Ticket) -> None:
        """Reserve a place in the server's queue for a request.

        Raises:
            ApiError: The request is too large for the queue or the batch, the queue is full, or the tenant's
                quota is used up.
        """
        accounts, limit = self._state.accounts, self._state.settings.max_num_queued_reqs
        wanted = submission.sequences
        if submission.params.grammar is not None:
            submission.params.grammar.check_size()
        self.check_sequences(len(submission.prompts), submission.n)
        tenant, drain = ticket.tenant, accounts.retry_after()
        # This call raises an error for a priority that the tenant may not use, so it precedes the reservation
        # of places in the queue.
        tenant.priority_of(submission.priority)
        if self._sequences + wanted > limit:
            accounts.refused["wait", "max_num_queued_reqs"] += 1
            raise ApiError(
                ErrorCode.SERVER_OVERLOADED,
                f"the queue is full: {self._sequences} of {limit} sequences waiting or running",
                retry_after_seconds=drain,
            )
        self._state.quotas.check_share(tenant, wanted, self._sequences, limit, drain)
        self._state.quotas.enter(tenant, wanted, submission.most_tokens, drain)
        self._sequences += wanted

    async def run(
        self, submission: Submission, counts: TokenCounts, ticket: Ticket
    ) -> AsyncGenerator[Delta, None]:
        """Generate text on the engine, and yield the text of all choices as it arrives.

        The last Delta of each choice has its finish reason.

        Raises:
            ApiError: The request cannot be queued, or the engine ended it.
            TonnageError: An error of the engine.
        """
        state = self._state
        counts.prompt = sum(map(len, submission.prompts))
        counts.choices = [0] * submission.sequences
        ticket.submission = submission
        ticket.counts = counts
        self._enqueue(submission, ticket)
        ticket.submitted()
        n, monotonic = submission.n, time.monotonic
        try:
            sequences = [
                _Sequence(
                    detokenizer(state.tokenizer, prompt, special_tokens=submission.special_tokens),
                    StopStrings(submission.stop),
                    submission.params.min_tokens,
                    submission.shows_stop,
                )
                for prompt in submission.prompts
                for _ in range(n)
            ]
            unfinished = len(sequences)
            params = await self._with_bad_words(submission.params)
            requests = self._requests(submission, params, ticket)
            async with aclosing(_chunks(state.engine, requests)) as chunks:
                async for chunk in chunks:
                    index = chunk.index
                    sequence = sequences[index]
                    if sequence.finished:
                        continue  # a stop string ended this choice, and the prompt's other choices still run
                    if chunk.refused:
                        raise Refused(chunk.error or "the engine rejected the request without a reason")
                    if chunk.finish_reason in ("error", "abort"):
                        raise ApiError(
                            ErrorCode.ENGINE_DEAD,
                            chunk.error or "the engine ended the request without a reason; send it again",
                        )
                    counts.cached[index // n] = chunk.cached_tokens
                    if chunk.queued_seconds is not None and chunk.index == 0 and sequence.last is None:
                        ticket.queued(chunk.queued_seconds)
                    if chunk.token_ids:
                        now = monotonic()
                        ticket.tokens(len(chunk.token_ids), now, sequence.last)
                        sequence.last = now
                    delta = _advance(sequence, index, chunk, counts)
                    unfinished -= sequence.finished
                    if sequence.finished and chunk.finish_reason is None and unfinished:
                        # A stop string ended this sequence, so abort it alone: its blocks are freed while other
                        # choices run.
                        await state.engine.abort(requests[index // n].request_id, index % n)
                    if (
                        delta.text
                        or delta.finish_reason
                        or delta.logprobs
                        or delta.prompt_logprobs
                        or submission.all_tokens
                    ):
                        yield delta
                    if not unfinished:
                        break
            if unfinished:
                raise ApiError(
                    ErrorCode.ENGINE_DEAD, "the engine ended the request without a finish reason; send it again"
                )
        except NeverFits as error:
            error.field = submission.field
            raise
        finally:
            self._sequences -= submission.sequences
            used = counts.prompt + counts.completion
            state.quotas.leave(ticket.tenant, submission.sequences, max(0, submission.most_tokens - used))

    async def whole_answer(
        self, submission: Submission, use: ToolUse, counts: TokenCounts, ticket: Ticket
    ) -> tuple[Parsed, Delta]:
        """Generate the only choice of a request, and return its parsed text and its last Delta."""
        text = ""
        token_ids: list[int] = []
        last: Delta | None = None
        async with aclosing(self.run(submission, counts, ticket)) as deltas:
            async for delta in deltas:
                text += delta.text
                token_ids += delta.token_ids
                last = delta
        assert last is not None  # run() yields at least the Delta with the choice's finish reason
        if use.reader is None:
            return Parsed(text), last
        reader = use.reader(submission.prompts[0])
        parsed = reader.whole(text, token_ids)
        counts.reasoning = reader.reasoning_tokens if use.reasons else None
        return parsed, last

    async def _with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Encode the ``bad_words`` in a thread, and return ``params`` with their token ids added."""
        if not params.bad_words:
            return params
        vocabulary = self._state.plan.model.vocab_size
        found = await self.in_thread(self._state.tokenizer.bad_word_ids, params.bad_words)
        return replace(params, bad_token_ids=tuple(TokenIds(ids) for ids in found if max(ids) < vocabulary))

    def _requests(
        self, submission: Submission, params: SamplingParams, ticket: Ticket
    ) -> list[GenerationRequest]:
        """Return one engine request for each prompt of the API request ``submission``."""
        tenant = ticket.tenant
        salt, priority = tenant.salt(submission.cache_salt), tenant.priority_of(submission.priority)
        pooling = params.pooling
        return [
            GenerationRequest(
                request_id=uuid.uuid4().hex,
                prompt_token_ids=prompt,
                params=params if pooling is None or second is None else _of_pair(params, pooling, second),
                n=submission.n,
                tenant=tenant.name,
                cache_salt=salt,
                priority=priority,
                weight=tenant.weight,
                lora=submission.lora,
            )
            for prompt, second in zip(submission.prompts, submission.second_texts or repeat(None), strict=False)
        ]


def _of_pair(params: SamplingParams, pooling: Pooling, second: int) -> SamplingParams:
    """Return the parameters for a cross-encoder's prompt, whose second text begins at the token ``second``."""
    return replace(params, pooling=replace(pooling, second_text=second))


def _utf8_bytes(text: str) -> int:
    """Return the number of bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _slices(items: Sequence[Result], size: Callable[[Result], int]) -> Iterator[list[Result]]:
    """Yield texts, or pairs of texts, in order, in groups that take about ten milliseconds to encode.

    A single item that takes longer is a group of its own. ``size`` returns the characters of an item.
    """
    part: list[Result] = []
    characters = 0
    for item in items:
        if part and characters + size(item) > _ENCODE_INLINE_CHARACTERS:
            yield part
            part, characters = [], 0
        part.append(item)
        characters += size(item)
    if part:
        yield part


def _chunks(engine: Engine, requests: Sequence[GenerationRequest]) -> AsyncGenerator[Chunk, None]:
    """Yield the engine's chunks for all prompts of a request, in order of arrival.

    Each chunk's ``index`` is the number of its choice among the choices of all prompts. Closing the iterator
    aborts the requests that still run in the engine.
    """
    return engine.generate(requests[0]) if len(requests) == 1 else _merged(engine, requests)


async def _merged(engine: Engine, requests: Sequence[GenerationRequest]) -> AsyncGenerator[Chunk, None]:
    inbox: Inbox[Chunk | Exception | None] = Inbox()

    async def pump(number: int, request: GenerationRequest) -> None:
        try:
            async with aclosing(engine.generate(request)) as chunks:
                async for chunk in chunks:
                    inbox.put_nowait(replace(chunk, index=number * request.n + chunk.index))
        except Exception as error:
            inbox.put_nowait(error)
        else:
            inbox.put_nowait(None)

    tasks = [asyncio.create_task(pump(number, request)) for number, request in enumerate(requests)]
    try:
        running = len(tasks)
        while running:
            item = await inbox.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _advance(sequence: _Sequence, index: int, chunk: Chunk, counts: TokenCounts) -> Delta:
    """Decode the engine's new tokens of a sequence and return its new text.

    With stop strings the tokens are decoded one by one, so that tokens after a stop string are neither shown
    nor counted.
    """
    stop, text = sequence.stop, ""
    logprobs, token_ids = chunk.logprobs, chunk.token_ids
    if stop.active:
        taken = 0
        for token in token_ids:
            taken += 1
            piece = sequence.detokenizer.push((token,))
            text += piece if counts.choices[index] + taken <= sequence.min_tokens else stop.push(piece)
            if stop.stopped:
                break
        logprobs, token_ids = logprobs[:taken], token_ids[:taken]
    else:
        text = sequence.detokenizer.push(token_ids)
    counts.choices[index] += len(token_ids)
    finish: Finish | None = None
    if chunk.finish_reason is not None and not stop.stopped:
        finish = "stop" if chunk.finish_reason == "stop" else "length"
        if finish == "stop":
            # count the stop token, which ended the sequence and is not in the chunk's list
            counts.choices[index] += 1
        text += stop.push(sequence.detokenizer.flush())
        text += "" if stop.stopped else stop.flush()
    matched: str | None = None
    if stop.stopped:
        finish, matched = "stop", stop.matched
        text += matched if sequence.shows_stop else ""
    sequence.finished = finish is not None
    return Delta(index, text, finish, logprobs, chunk.prompt_logprobs, token_ids, chunk.pooled, matched)
