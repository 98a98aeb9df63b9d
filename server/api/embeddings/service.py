"""/v1/embeddings without HTTP: turns a request into one vector per input.

An input passes quota, queue and admission like any request; the engine returns one chunk with a vector.
"""

from __future__ import annotations

import base64
import struct
from contextlib import aclosing

from tonnage.server.api.embeddings.protocol import (
    FIELDS,
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    EmbeddingUsage,
)
from tonnage.server.api.generation import Generator
from tonnage.server.engines.request import Pooling, SamplingParams
from tonnage.server.errors import ApiError, ErrorCode
from tonnage.server.requests.accounts import Ticket
from tonnage.server.requests.submission import Submission, TokenCounts
from tonnage.server.state import ServerState


class EmbeddingService:
    """Logic of the embeddings endpoint; every method raises ApiError or the engine's TonnageErrors."""

    fields = FIELDS

    def __init__(self, state: ServerState, generator: Generator) -> None:
        self._state = state
        self._generator = generator

    async def complete(self, request: EmbeddingRequest, ticket: Ticket) -> bytes:
        """Return the embeddings of all inputs as JSON; cancelling the call aborts the request."""
        submission = await self._prepare(request)
        counts = TokenCounts()
        vectors: list[tuple[float, ...]] = [()] * len(submission.prompts)
        async with aclosing(self._generator.run(submission, counts, ticket)) as deltas:
            async for delta in deltas:
                vectors[delta.index] = delta.embedding
        ticket.finish("stop")
        packed = request.encoding_format == "base64"
        answer = EmbeddingList(
            data=[
                Embedding(index=index, embedding=_base64(vector) if packed else list(vector))
                for index, vector in enumerate(vectors)
            ],
            model=request.model,
            usage=EmbeddingUsage(prompt_tokens=counts.prompt, total_tokens=counts.prompt),
        )
        return answer.model_dump_json().encode()

    async def _prepare(self, request: EmbeddingRequest) -> Submission:
        state, generator = self._state, self._generator
        lora = state.check_model(request.model)
        state.check_task(embeds=True)
        state.check_ready()
        special = request.add_special_tokens is not False
        items = request.inputs()
        generator.check_sequences(len(items), 1, param="input")
        prompts = await generator.token_ids(items, add_special_tokens=special, param="input")
        longest, limit = max(map(len, prompts)), state.max_model_len
        if longest > limit:
            state.accounts.refused["never", "max_model_len"] += 1
            raise ApiError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"an input may have at most {limit} tokens on this server; the longest has {longest}",
                param="input",
            )
        params = SamplingParams(1, pooling=Pooling(request.dimensions))
        return Submission(
            prompts, params, cache_salt=request.cache_salt or "", priority=request.priority, lora=lora
        )


def _base64(vector: tuple[float, ...]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
