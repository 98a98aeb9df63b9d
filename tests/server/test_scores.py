"""Tests of the score and rerank endpoints with known embeddings; of a model: vllm/test_embeddings."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

from tonnage.server.engines.base import Capabilities
from tonnage.server.engines.chunk import Chunk
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.engines.request import GenerationRequest

SCORE, RERANK = ("/v1/score", "/score"), ("/v1/rerank", "/rerank", "/v2/rerank")
NAMES = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
QUERY = "The quick brown fox"
DOCUMENTS = ["A fox runs over the hill.", "The quick brown fox", "def f(x): return x"]


def embedding(ids: tuple[int, ...]) -> tuple[float, ...]:
    """Return a vector of eight numbers that depends on the tokens."""
    vector = [0.0] * 8
    for at, token in enumerate(ids):
        vector[token % 8] += at - 1.5
    return tuple(vector)


class Embedding(FakeEngine):
    """An engine that returns ``embedding`` of each prompt."""

    capabilities = Capabilities(pools="embed")

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk(request.request_id, 0, (), "stop", pooled=embedding(request.prompt_token_ids))


def cosine(tokenizer: Any, one: str, other: str) -> float:
    a, b = (np.array(embedding(tuple(tokenizer.encode(text)))) for text in (one, other))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("path", SCORE)
async def test_score_of_an_embedding_model_is_the_cosine_of_each_pair(
    run_server, small_plan, tokenizer, path: str
) -> None:
    expected = [cosine(tokenizer, QUERY, document) for document in DOCUMENTS]
    tokens = sum(len(tokenizer.encode(text)) for text in (QUERY, *DOCUMENTS))
    async with run_server(Embedding(small_plan())) as server:
        for names in (
            ("queries", "documents"),
            ("queries", "items"),
            ("text_1", "text_2"),
            ("data_1", "data_2"),
        ):
            sides = dict(zip(names, (QUERY, DOCUMENTS), strict=True))
            answer = (await server.http.post(path, json={"model": "demo"} | sides)).json()
            assert [item["score"] for item in answer["data"]] == pytest.approx(expected, abs=1e-5)
            assert [item["index"] for item in answer["data"]] == [0, 1, 2]
            assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        pairs = {"model": "demo", "queries": DOCUMENTS, "documents": [QUERY] * 3}
        answer = (await server.http.post(path, json=pairs)).json()
        assert [item["score"] for item in answer["data"]] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("path", RERANK)
async def test_rerank_sorts_documents_by_relevance(run_server, small_plan, tokenizer, path: str) -> None:
    scores = [cosine(tokenizer, QUERY, document) for document in DOCUMENTS]
    order = sorted(range(3), key=lambda index: -scores[index])
    assert order[0] == 1  # the query itself
    body = {"model": "demo", "query": QUERY, "documents": DOCUMENTS}
    async with run_server(Embedding(small_plan())) as server:
        for top in (None, 0, 2, 9):
            results = (await server.http.post(path, json=body | {"top_n": top})).json()["results"]
            assert [result["index"] for result in results] == order[: top or 3]
            for result in results:
                assert result["document"] == {"text": DOCUMENTS[result["index"]]}
                assert result["relevance_score"] == pytest.approx(scores[result["index"]], abs=1e-5)


async def test_error_for_an_invalid_score_request_names_the_field(run_server, small_plan) -> None:
    ask = {"queries": QUERY, "documents": DOCUMENTS}
    async with run_server(Embedding(small_plan())) as server:
        for change, code, param in (
            ({"queries": None}, "invalid_value", "queries"),
            ({"items": QUERY}, "invalid_value", "queries"),
            ({"queries": DOCUMENTS[:2]}, "invalid_value", "queries"),
            ({"documents": []}, "invalid_value", "documents"),
            ({"documents": [{"content": []}]}, "invalid_value", "documents"),
            ({"documents": "word " * 9000}, "context_length_exceeded", "documents"),
            ({"instruction": "x"}, "unsupported_parameter", "instruction"),
            ({"chat_template_kwargs": {"a": 1}}, "unsupported_parameter", "chat_template_kwargs"),
            ({"max_tokens_per_doc": 5}, "unsupported_parameter", "max_tokens_per_doc"),
            ({"model": "other"}, "model_not_found", "model"),
        ):
            response = await server.http.post("/v1/score", json={"model": "demo"} | ask | change)
            error = response.json()["error"]
            assert (error["code"], error["param"]) == (code, param), (change, error)


@pytest.mark.parametrize("path", [*SCORE, *RERANK])
async def test_score_request_to_a_model_that_generates_text_is_rejected(server, path: str) -> None:
    sides = {"queries" if path in SCORE else "query": QUERY, "documents": DOCUMENTS}
    response = await server.http.post(path, json={"model": "demo"} | sides)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_endpoint")
