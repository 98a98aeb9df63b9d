"""From token ids to text and back: what every generating endpoint shares. Knows no HTTP.

Admission to the queue, the engine's chunks merged over prompts, detokenizing, stop strings, token counts and
latencies. Closing the iterator of :meth:`Generator.run` aborts whatever still runs.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from tonnage.server.accounts import Ticket
from tonnage.server.engines.base import Chunk, Engine, GenerationRequest, SamplingParams
from tonnage.server.errors import ApiError, ErrorCode
from tonnage.server.state import ServerState
from tonnage.server.text import Detokenizer, StopStrings

# Encoding takes about a microsecond a character; longer texts go to a thread (tokenizers releases the GIL) so
# that the event loop is not held for more than about ten milliseconds.
_ENCODE_INLINE_CHARACTERS = 16_384

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Submission:
    """``n`` completions of each prompt. ``stop``: strings that end a completion and are not shown."""

    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    cache_salt: str = ""

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.n


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of choice ``index`` (prompt number times n, plus the number of the sequence)."""

    index: int
    text: str
    finish_reason: Finish | None = None


@dataclass(slots=True)
class TokenCounts:
    """Tokens of a submission so far."""

    prompt: int = 0
    completion: int = 0
    cached: dict[int, int] = field(default_factory=dict)  # prompt number -> tokens from the prefix cache

    @property
    def cached_total(self) -> int:
        return sum(self.cached.values())


@dataclass(slots=True)
class _Sequence:
    """A choice while it grows."""

    detokenizer: Detokenizer
    stop: StopStrings
    last: float | None = None
    finished: bool = False


class Generator:
    """Runs submissions on the engine of one app."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._sequences = 0  # unfinished ones, waiting and running

    async def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt."""
        tokenizer = self._state.tokenizer
        if len(text) > _ENCODE_INLINE_CHARACTERS:
            return tuple(await asyncio.to_thread(tokenizer.encode, text))
        return tuple(tokenizer.encode(text))

    def max_tokens(self, asked: int | None, longest_prompt: int) -> int:
        """``asked``, or the default as far as the context allows.

        Raises ApiError context_length_exceeded with the numbers: no retry helps.
        """
        limit = self._state.max_model_len
        left = limit - longest_prompt
        tokens = asked if asked is not None else min(self._state.settings.default_max_tokens, max(1, left))
        if tokens > left:
            self._state.accounts.refused["never", "max_model_len"] += 1
            raise ApiError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"this model's maximum context length is {limit} tokens; the request needs "
                f"{longest_prompt + tokens} ({longest_prompt} in the prompt, {tokens} for the completion); "
                + (f"at most {left} completion tokens fit" if left > 0 else "shorten the prompt"),
                param="prompt" if left < 1 or asked is None else "max_tokens",
            )
        return tokens

    def _enqueue(self, submission: Submission) -> None:
        """Take places in the queue. Raises ApiError: never (400) or not now (503 with Retry-After)."""
        limit = self._state.settings.max_num_queued_reqs
        accounts = self._state.accounts
        wanted = submission.sequences
        batch = self._state.plan.deployment.max_num_seqs
        if batch is not None and submission.n > batch:
            accounts.refused["never", "sequences"] += 1
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"n = {submission.n}, but the server runs at most {batch} sequences at once (max_num_seqs)",
                param="n",
            )
        if wanted > limit:
            accounts.refused["never", "max_num_queued_reqs"] += 1
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"{len(submission.prompts)} prompts with n = {submission.n} make {wanted} sequences; "
                f"the server's queue holds at most {limit} (max_num_queued_reqs): send fewer prompts at once",
                param="prompt" if len(submission.prompts) > 1 else "n",
            )
        if self._sequences + wanted > limit:
            accounts.refused["wait", "max_num_queued_reqs"] += 1
            raise ApiError(
                ErrorCode.SERVER_OVERLOADED,
                f"the queue is full: {self._sequences} of {limit} sequences waiting or running",
                retry_after_seconds=accounts.drain_seconds(accounts.in_flight),
            )
        self._sequences += wanted

    async def run(
        self, submission: Submission, counts: TokenCounts, ticket: Ticket
    ) -> AsyncGenerator[Delta, None]:
        """The choices' text as it comes; every choice ends with one finish_reason.

        Raises ApiError and the engine's TonnageErrors.
        """
        self._state.check_ready()
        self._enqueue(submission)
        try:
            counts.prompt = sum(map(len, submission.prompts))
            sequences = [
                _Sequence(Detokenizer(self._state.tokenizer, prompt), StopStrings(submission.stop))
                for prompt in submission.prompts
                for _ in range(submission.n)
            ]
            unfinished = len(sequences)
            async with aclosing(self._chunks(submission)) as chunks:
                async for prompt, chunk in chunks:
                    index = prompt * submission.n + chunk.index
                    sequence = sequences[index]
                    if sequence.finished:
                        continue  # ended by a stop string while its siblings still run
                    if chunk.finish_reason in ("error", "abort"):
                        raise ApiError(ErrorCode.ENGINE_DEAD, chunk.error or "the engine ended the request")
                    counts.cached[prompt] = max(counts.cached.get(prompt, 0), chunk.cached_tokens)
                    if chunk.token_ids:
                        now = time.monotonic()
                        ticket.tokens(len(chunk.token_ids), now, sequence.last)
                        sequence.last = now
                    delta = _advance(sequence, index, chunk, counts)
                    unfinished -= sequence.finished
                    if delta.text or delta.finish_reason:
                        yield delta
                    if not unfinished:
                        break
            if unfinished:
                raise ApiError(ErrorCode.ENGINE_DEAD, "the engine ended the request without a finish reason")
        finally:
            self._sequences -= submission.sequences

    async def _chunks(self, submission: Submission) -> AsyncGenerator[tuple[int, Chunk], None]:
        """(prompt number, chunk) of all prompts, in the order of arrival."""
        requests = [
            GenerationRequest(
                request_id=uuid.uuid4().hex,
                prompt_token_ids=prompt,
                params=submission.params,
                n=submission.n,
                cache_salt=submission.cache_salt,
            )
            for prompt in submission.prompts
        ]
        engine = self._state.engine
        if len(requests) == 1:
            async with _open(engine, requests[0]) as chunks:
                async for chunk in chunks:
                    yield 0, chunk
            return
        queue: asyncio.Queue[tuple[int, Chunk] | Exception | None] = asyncio.Queue()

        async def pump(number: int, request: GenerationRequest) -> None:
            try:
                async with _open(engine, request) as chunks:
                    async for chunk in chunks:
                        queue.put_nowait((number, chunk))
            except Exception as error:
                queue.put_nowait(error)
            else:
                queue.put_nowait(None)

        tasks = [asyncio.create_task(pump(number, request)) for number, request in enumerate(requests)]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
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


@asynccontextmanager
async def _open(engine: Engine, request: GenerationRequest) -> AsyncIterator[AsyncIterator[Chunk]]:
    """The chunks of ``request``, closed whatever ends them: closing aborts the request in the engine."""
    chunks = engine.generate(request)
    try:
        yield chunks
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()


def _advance(sequence: _Sequence, index: int, chunk: Chunk, counts: TokenCounts) -> Delta:
    """Feed a chunk; with stop strings token by token, so that those after one are neither shown nor counted."""
    text = ""
    parts: Sequence[Sequence[int]] = (chunk.token_ids,)
    if sequence.stop.active:
        parts = [(token,) for token in chunk.token_ids]
    for part in parts:
        counts.completion += len(part)
        text += sequence.stop.push(sequence.detokenizer.push(part))
        if sequence.stop.stopped:
            sequence.finished = True
            return Delta(index, text, "stop")
    if chunk.finish_reason is None:
        return Delta(index, text)
    text += sequence.stop.push(sequence.detokenizer.flush())
    sequence.finished = True
    if sequence.stop.stopped:
        return Delta(index, text, "stop")
    return Delta(index, text + sequence.stop.flush(), "stop" if chunk.finish_reason == "stop" else "length")
