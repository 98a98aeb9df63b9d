"""Logic of /pooling and /classify without HTTP code."""

from __future__ import annotations

from itertools import count

import numpy as np

from tonnage.server.api.endpoint import Service
from tonnage.server.api.pooling.protocol import (
    CLASSIFICATION_FIELDS,
    POOLING_FIELDS,
    Classification,
    ClassificationList,
    ClassificationRequest,
    PooledData,
    PooledList,
    PoolingRequest,
)
from tonnage.server.api.pooling_run import PoolingRun, Values, encoded, with_items
from tonnage.server.engines.request import Pooling
from tonnage.server.errors import invalid_value
from tonnage.server.requests.accounts import Ticket


class ClassificationService(Service[ClassificationRequest]):
    """Logic of the classification endpoint; its methods may raise ApiError or the engine's TonnageErrors."""

    fields = CLASSIFICATION_FIELDS

    async def complete(self, request: ClassificationRequest, ticket: Ticket) -> bytes:
        """Return the label of each input as JSON; cancelling the call aborts the request."""
        run = PoolingRun(self._state, self._generator, request, ticket, "classify")
        results = await run.of_inputs(request.input, Pooling(use_activation=request.use_activation))
        answer = run.answer(ClassificationList, "classify")
        return await with_items(answer, map(self._classification, count(), results))

    def _classification(self, index: int, result: Values) -> Classification:
        best = int(np.argmax(result))  # argmax takes the first of equal values, as in vLLM
        label = self._state.classifier.labels.get(best)
        return Classification(index=index, label=label, probs=result.tolist(), num_classes=len(result))


class PoolingService(Service[PoolingRequest]):
    """Logic of the pooling endpoint; its methods may raise ApiError or the engine's TonnageErrors."""

    fields = POOLING_FIELDS

    async def complete(self, request: PoolingRequest, ticket: Ticket) -> bytes:
        """Return the result of each input as JSON; cancelling the call aborts the request."""
        state = self._state
        run = PoolingRun(state, self._generator, request, ticket, "embed", "classify", "token_classify")
        task = state.engine.capabilities.pools
        if request.task not in (None, task):
            raise invalid_value(
                f"{state.model_name!r} does the task {task!r} only; got {request.task!r}", "task"
            )
        results = await run.of_inputs(request.input, Pooling(use_activation=request.use_activation))
        items = (
            PooledData(index=index, data=encoded(result, request.encoding_format))
            for index, result in enumerate(results)
        )
        return await with_items(run.answer(PooledList, "pooling"), items)
