"""Logic of /v1/embeddings without HTTP code: it turns a request into one vector per input."""

from __future__ import annotations

from tonnage.server.api.embeddings.protocol import (
    FIELDS,
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
)
from tonnage.server.api.endpoint import Service
from tonnage.server.api.pooling_run import EmbeddingUsage, PoolingRun, encoded, with_items
from tonnage.server.engines.request import Pooling
from tonnage.server.requests.accounts import Ticket


class EmbeddingService(Service[EmbeddingRequest]):
    """Logic of the embeddings endpoint; its methods may raise ApiError or the engine's TonnageErrors."""

    fields = FIELDS

    async def complete(self, request: EmbeddingRequest, ticket: Ticket) -> bytes:
        """Return the embeddings of all inputs as JSON; cancelling the call aborts the request."""
        run = PoolingRun(self._state, self._generator, request, ticket, "embed")
        pooling = Pooling(request.dimensions, request.use_activation)
        vectors = await run.of_inputs(request.input, pooling)
        answer = EmbeddingList(data=[], model=request.model, usage=EmbeddingUsage.of(run.counts))
        items = (
            Embedding(index=index, embedding=encoded(vector, request.encoding_format))
            for index, vector in enumerate(vectors)
        )
        return await with_items(answer, items)
