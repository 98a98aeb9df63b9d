"""Requests to a pooling model: from texts or token ids to one result per prompt.

A prompt passes quota, queue and admission like any request; the engine returns one chunk with the result.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Iterable, Sequence
from contextlib import aclosing, closing
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from tonnage.server.api.generation import Generator
from tonnage.server.api.pooling_answer import EmbeddingUsage, PoolingAnswer
from tonnage.server.api.sampling import EngineBody, prompt_list
from tonnage.server.engines.request import Pooling, PoolingTask, SamplingParams
from tonnage.server.errors import ApiError, ErrorCode
from tonnage.server.http.outbox import HeldAnswer
from tonnage.server.requests.accounts import Ticket
from tonnage.server.requests.submission import Submission, TokenCounts
from tonnage.server.state import ServerState

Answer = TypeVar("Answer", bound=PoolingAnswer)
# A pooling model's result for one prompt: a vector, or a vector for each token.
Values = npt.NDArray[np.float64]
# Writing an answer yields to the event loop after this many seconds of work.
_STEP_SECONDS = 0.005


class PoolingRun:
    """One request to a pooling model.

    Args:
        state: The server's state.
        generator: The server's generator.
        request: The request's body.
        ticket: The request's ticket, which is finished after the last result.
        tasks: The endpoint's pooling tasks, of which the model must support at least one.
        param: Field of the request that has the inputs, for errors.

    Raises:
        ApiError: The model supports none of the tasks, or the server cannot serve now.
    """

    def __init__(
        self,
        state: ServerState,
        generator: Generator,
        request: EngineBody,
        ticket: Ticket,
        *tasks: PoolingTask,
        param: str = "input",
    ) -> None:
        self._lora = state.check_model(request.model)
        state.check_task(*tasks)
        state.check_ready()
        self._state, self._generator, self._request, self._ticket = state, generator, request, ticket
        self._param = param
        self.counts = TokenCounts()

    async def of_inputs(
        self, inputs: str | list[str] | list[int] | list[list[int]], pooling: Pooling
    ) -> list[Values]:
        """Return the model's result for each input, which is a text or a list of token ids."""
        items = prompt_list(inputs)
        special = self._request.add_special_tokens is not False
        self._generator.check_sequences(len(items), 1, param=self._param)
        prompts = await self._generator.token_ids(items, add_special_tokens=special, param=self._param)
        return await self.of_prompts(prompts, pooling)

    async def of_prompts(
        self,
        prompts: tuple[tuple[int, ...], ...],
        pooling: Pooling,
        second_texts: Sequence[int | None] = (),
    ) -> list[Values]:
        """Return the result of each prompt.

        Args:
            prompts: Token ids of each prompt.
            pooling: Parameters of all prompts.
            second_texts: For each prompt, the index of the first token of the second of its two texts, or
                None for a model without token types; empty if each prompt is a single text.

        Raises:
            ApiError: A prompt is too long, or the results of all tokens are too large.
        """
        state = self._state
        check_input_length(self._state, max(map(len, prompts)), self._param)
        submission = Submission(
            prompts,
            SamplingParams(1, pooling=pooling),
            cache_salt=self._request.cache_salt or "",
            priority=self._request.priority,
            lora=self._lora,
            field=self._param,
            second_texts=tuple(second_texts),
        )
        results: list[Values] = [np.empty(0)] * len(prompts)
        with closing(HeldAnswer(state.outboxes)) as held:
            async with aclosing(self._generator.run(submission, self.counts, self._ticket)) as deltas:
                async for delta in deltas:
                    values = results[delta.index] = np.asarray(delta.pooled, np.float64)
                    # Only results with a vector per token are counted. Single vectors need no memory limit,
                    # because max_num_queued_reqs bounds their number.
                    if values.ndim > 1:
                        held.hold(values.nbytes)
        self._ticket.finish("stop")
        return results

    def answer(self, kind: type[Answer], prefix: str) -> Answer:
        """Return the request's answer of the class ``kind`` without items; its id begins with ``prefix``."""
        return kind(
            id=f"{prefix}-{self._ticket.request_id}",
            created=int(time.time()),
            model=self._request.model,
            data=[],
            usage=EmbeddingUsage.of(self.counts),
        )


def check_input_length(state: ServerState, longest: int, param: str) -> None:
    """Raise ApiError if ``longest``, the tokens of a request's longest input, exceed the context."""
    limit = state.max_model_len
    if longest > limit:
        state.accounts.refused["never", "max_model_len"] += 1
        raise ApiError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"an input may have at most {limit} tokens on this server; the longest has {longest}",
            param=param,
        )


def encoded(result: Values, encoding_format: str | None) -> Any:
    """Return a pooling model's result in the requested format.

    ``base64`` encodes little-endian 32-bit floats, vector after vector. Any other format gives a list of
    numbers for one vector, or a list of such lists for several.
    """
    if encoding_format == "base64":
        return base64.b64encode(result.astype("<f4").tobytes()).decode()
    return result.tolist()


async def with_items(answer: BaseModel, items: Iterable[BaseModel]) -> bytes:
    """Return the JSON of ``answer`` with ``items`` inserted into its empty list ``data``.

    The event loop runs other tasks between the items, which together may have a million numbers.
    """
    parts: list[str] = []
    begun = time.perf_counter()
    for item in items:
        parts.append(item.model_dump_json())
        if time.perf_counter() - begun > _STEP_SECONDS:
            await asyncio.sleep(0)
            begun = time.perf_counter()
    head, _, tail = answer.model_dump_json().partition('"data":[]')
    return f'{head}"data":[{",".join(parts)}]{tail}'.encode()
