"""Requests to a pooling model: from texts or token ids to one result per prompt.

A prompt passes quota, queue and admission like any request; the engine returns one chunk with the result.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from contextlib import aclosing

from tonnage.server.api.generation import Generator
from tonnage.server.api.sampling import EngineBody
from tonnage.server.engines.chunk import Pooled
from tonnage.server.engines.request import Pooling, PoolingTask, SamplingParams
from tonnage.server.errors import ApiError, ErrorCode
from tonnage.server.requests.accounts import Ticket
from tonnage.server.requests.submission import Submission, TokenCounts
from tonnage.server.state import ServerState


class PoolingRun:
    """One request to a pooling model.

    Args:
        state: The server's state.
        generator: The server's generator.
        request: The request's body.
        ticket: The request's ticket, which is finished after the last result.
        tasks: The pooling tasks that the endpoint needs the model to do one of.
        param: Field of the request that has the inputs, for errors.

    Raises:
        ApiError: The model does none of the tasks, or the server cannot serve now.
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

    async def of_inputs(self, items: list[str] | list[list[int]], pooling: Pooling) -> list[Pooled]:
        """Return the result of each text or list of token ids."""
        special = self._request.add_special_tokens is not False
        self._generator.check_sequences(len(items), 1, param=self._param)
        prompts = await self._generator.token_ids(items, add_special_tokens=special, param=self._param)
        return await self.of_prompts(prompts, pooling)

    async def of_prompts(
        self,
        prompts: tuple[tuple[int, ...], ...],
        pooling: Pooling,
        second_texts: Sequence[int | None] = (),
    ) -> list[Pooled]:
        """Return the result of each prompt.

        Args:
            prompts: Token ids of each prompt.
            pooling: Parameters of all prompts.
            second_texts: For each prompt of two texts, the index of the first token of the second.

        Raises:
            ApiError: A prompt is too long.
        """
        state = self._state
        longest, limit = max(map(len, prompts)), state.max_model_len
        if longest > limit:
            state.accounts.refused["never", "max_model_len"] += 1
            raise ApiError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"an input may have at most {limit} tokens on this server; the longest has {longest}",
                param=self._param,
            )
        submission = Submission(
            prompts,
            SamplingParams(1, pooling=pooling),
            cache_salt=self._request.cache_salt or "",
            priority=self._request.priority,
            lora=self._lora,
            field=self._param,
            second_texts=tuple(second_texts),
        )
        results: list[Pooled] = [()] * len(prompts)
        async with aclosing(self._generator.run(submission, self.counts, self._ticket)) as deltas:
            async for delta in deltas:
                results[delta.index] = delta.pooled
        self._ticket.finish("stop")
        return results


def vector_of(result: Pooled) -> list[float]:
    """Return a result with one vector as a list."""
    return [value for value in result if not isinstance(value, tuple)]


def rows_of(result: Pooled) -> list[float] | list[list[float]]:
    """Return a result as nested lists."""
    return [list(item) if isinstance(item, tuple) else item for item in result]  # type: ignore[return-value]


def as_base64(result: Pooled) -> str:
    """Return a result as base64 of its values in little-endian 32-bit floats, row after row."""
    values: list[float] = []
    for item in result:
        values += item if isinstance(item, tuple) else (item,)
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
