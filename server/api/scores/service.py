"""Logic of /v1/score and /v1/rerank without HTTP code, with vLLM's two ways to score a pair of texts.

- An embedding model embeds each text of a request once; the score is the cosine of two embeddings.
- A cross-encoder, a classifier with one label, reads both texts as one prompt; the score is the label's value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tonnage.server.api.endpoint import Service
from tonnage.server.api.pooling_answer import EmbeddingUsage
from tonnage.server.api.pooling_run import PoolingRun, with_items
from tonnage.server.api.scores.pairs import pair_prompts
from tonnage.server.api.scores.protocol import (
    RERANK_FIELDS,
    SCORE_FIELDS,
    RerankDocument,
    RerankList,
    RerankRequest,
    RerankResult,
    Score,
    ScoreList,
    ScoreRequest,
    ScoringBody,
    as_list,
)
from tonnage.server.engines.request import Pooling
from tonnage.server.errors import ApiError, ErrorCode, unsupported_parameter
from tonnage.server.requests.accounts import Ticket

# Lower bound of the product of two norms in a cosine (torch.nn.functional.cosine_similarity, eps).
_SMALLEST_NORMS = 1e-8


class _Scores(Service[Any]):
    """Base class of the services of /v1/score and /v1/rerank, which scores pairs of texts."""

    async def _scores(
        self, request: ScoringBody, first: Sequence[str], second: Sequence[str], param: str, ticket: Ticket
    ) -> tuple[list[float], PoolingRun]:
        """Return the score of each pair of texts, and the `PoolingRun` that made the requests to the model.

        A single first text is paired with every second text.
        """
        run = PoolingRun(self._state, self._generator, request, ticket, "embed", "classify", param=param)
        crosses = self._state.engine.capabilities.pools == "classify"
        if crosses:
            self._check_labels()
        if request.template_arguments() and not (crosses and self._state.settings.chat_template):
            raise unsupported_parameter(
                "instruction and chat_template_kwargs need a cross-encoder, served with --chat-template",
                "chat_template_kwargs" if request.instruction is None else "instruction",
            )
        if crosses:
            scores = await self._crossed(run, request, first, second, param)
        else:
            scores = await _cosines(run, first, second, Pooling(use_activation=request.use_activation))
        return scores, run

    def _check_labels(self) -> None:
        """Raise ApiError for a classifier with several labels, because a score is the value of one label."""
        labels = len(self._state.classifier.labels)
        if labels != 1:
            raise ApiError(
                ErrorCode.UNSUPPORTED_ENDPOINT,
                f"{self._state.model_name!r} has {labels} labels, and a score needs a classifier with one "
                "label; use /classify",
                param="model",
            )

    async def _crossed(
        self, run: PoolingRun, request: ScoringBody, first: Sequence[str], second: Sequence[str], param: str
    ) -> list[float]:
        """Return a cross-encoder's score of each pair of texts: the value of the model's only label."""
        self._generator.check_sequences(len(second), 1, param=param)
        prompts, starts = await pair_prompts(
            self._state,
            self._generator,
            [(first[at % len(first)], text) for at, text in enumerate(second)],
            add_special_tokens=request.add_special_tokens is not False,
            template_arguments=request.template_arguments(),
            param=param,
        )
        results = await run.of_prompts(prompts, Pooling(use_activation=request.use_activation), starts)
        return [float(value) for (value,) in results]


async def _cosines(
    run: PoolingRun, first: Sequence[str], second: Sequence[str], pooling: Pooling
) -> list[float]:
    """Return, for each pair of texts, the cosine of their embeddings."""
    vectors = np.asarray(await run.of_inputs([*first, *second], pooling), np.float32)
    ones, others = vectors[: len(first)], vectors[len(first) :]
    norms = np.linalg.norm(ones, axis=1) * np.linalg.norm(others, axis=1)
    scores: list[float] = ((ones * others).sum(axis=1) / np.maximum(norms, _SMALLEST_NORMS)).tolist()
    return scores


class ScoreService(_Scores):
    """Logic of the score endpoint; its methods may raise ApiError or the engine's TonnageErrors."""

    fields = SCORE_FIELDS

    async def complete(self, request: ScoreRequest, ticket: Ticket) -> bytes:
        """Return the score of each pair as JSON; cancelling the call aborts the request."""
        first, second, param = request.sides()
        scores, run = await self._scores(request, first, second, param, ticket)
        items = (Score(index=index, score=score) for index, score in enumerate(scores))
        return await with_items(run.answer(ScoreList, "score"), items)


class RerankService(_Scores):
    """Logic of the rerank endpoint; its methods may raise ApiError or the engine's TonnageErrors."""

    fields = RERANK_FIELDS

    async def complete(self, request: RerankRequest, ticket: Ticket) -> bytes:
        """Return the most relevant documents as JSON; cancelling the call aborts the request."""
        documents = as_list(request.documents)
        scores, run = await self._scores(request, [request.query], documents, "documents", ticket)
        order = sorted(range(len(documents)), key=lambda index: -scores[index])
        answer = RerankList(
            id=f"rerank-{ticket.request_id}",
            model=request.model,
            results=[
                RerankResult(
                    index=index,
                    document=RerankDocument(text=documents[index]),
                    relevance_score=scores[index],
                )
                for index in order[: request.top_n or None]
            ],
            usage=EmbeddingUsage.of(run.counts),
        )
        return answer.model_dump_json().encode()
