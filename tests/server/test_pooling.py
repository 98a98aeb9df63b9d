"""Tests of /pooling, /classify and cross-encoders with known values; of models: vllm/test_classifiers."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tonnage.planner.errors import ConfigError
from tonnage.server.engines.base import Capabilities
from tonnage.server.engines.chunk import Chunk, Pooled
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.engines.request import GenerationRequest, PoolingTask
from tonnage.server.errors import ErrorCode
from tonnage.server.http import outbox
from tonnage.server.text.classifier import ClassifierConfig, read_classifier
from tonnage.server.text.tokenizer import Tokenizer

TEXTS = ["A fox runs.", "def f(x): return x", "The bank."]
LABELS = {0: "animal", 1: "code"}


def values(ids: tuple[int, ...]) -> tuple[float, ...]:
    """Return two values that depend on the tokens."""
    return ((sum(ids) % 97) / 97, (len(ids) % 5) / 5)


class Pooler(FakeEngine):
    """An engine that does one pooling task; it records the requests."""

    def __init__(
        self, plan: Any, task: PoolingTask, pool: Callable[[tuple[int, ...]], Pooled] = values
    ) -> None:
        super().__init__(plan)
        self.task, self.pool = task, pool
        self.requests: list[GenerationRequest] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(pools=self.task)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        self.requests.append(request)
        yield Chunk(request.request_id, 0, (), "stop", pooled=self.pool(request.prompt_token_ids))


async def test_classify_endpoint_returns_the_label_with_the_largest_value(
    run_server, small_plan, tokenizer
) -> None:
    expected = [values(tuple(tokenizer.encode(text))) for text in TEXTS]
    engine = Pooler(small_plan(), "classify")
    async with run_server(engine) as server:
        server.state.classifier = ClassifierConfig(LABELS)
        body = {"model": "demo", "input": TEXTS, "use_activation": False}
        answer = (await server.http.post("/classify", json=body)).json()
        assert answer["object"] == "list"
        for index, (item, probs) in enumerate(zip(answer["data"], expected, strict=True)):
            best = LABELS[probs.index(max(probs))]
            assert item == {"index": index, "label": best, "probs": list(probs), "num_classes": 2}
        tokens = sum(len(tokenizer.encode(text)) for text in TEXTS)
        assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        assert [request.params.pooling.use_activation for request in engine.requests] == [False] * 3
        server.state.classifier = ClassifierConfig({})
        answer = (await server.http.post("/classify", json={"model": "demo", "input": [1, 2]})).json()
        assert answer["data"][0]["label"] is None
        assert engine.requests[-1].params.pooling.use_activation is None


@pytest.mark.parametrize("task", ["embed", "classify", "token_classify"])
async def test_pooling_endpoint_returns_the_models_values_in_every_format(
    run_server, small_plan, tokenizer, task: PoolingTask
) -> None:
    def rows(ids: tuple[int, ...]) -> Pooled:
        return tuple((token % 7 / 7, 0.5) for token in ids) if task == "token_classify" else values(ids)

    ids = tuple(tokenizer.encode(TEXTS[0]))
    async with run_server(Pooler(small_plan(), task, rows)) as server:
        for asked in (None, task):
            body = {"model": "demo", "input": TEXTS[0], "task": asked}
            answer = (await server.http.post("/pooling", json=body)).json()
            expected = json.loads(json.dumps(rows(ids)))
            assert answer["data"] == [{"index": 0, "object": "pooling", "data": expected}]
        packed = await server.http.post("/pooling", json=body | {"encoding_format": "base64"})
        raw = base64.b64decode(packed.json()["data"][0]["data"])
        flat = [number for row in rows(ids) for number in (row if isinstance(row, tuple) else (row,))]
        assert struct.unpack(f"<{len(flat)}f", raw) == pytest.approx(flat)
        other = "embed" if task != "embed" else "classify"
        for change, param in (({"task": other}, "task"), ({"task": "score"}, "task"), ({"input": []}, "input")):
            error = (await server.http.post("/pooling", json=body | change)).json()["error"]
            assert (error["code"], error["param"]) == ("invalid_value", param), (change, error)
        error = (await server.http.post("/pooling", json=body | {"dimensions": 8})).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", "dimensions")


@pytest.mark.parametrize(
    ("task", "served"),
    [
        (None, {"completions"}),
        ("embed", {"embeddings", "score", "rerank", "pooling"}),
        ("classify", {"classify", "pooling", "score", "rerank"}),
        ("token_classify", {"pooling"}),
    ],
)
async def test_endpoints_reject_models_that_do_not_support_their_task(
    run_server, small_plan, task, served
) -> None:
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "completions": ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        "embeddings": ("/v1/embeddings", {"input": "a"}),
        "score": ("/v1/score", {"queries": "a", "documents": "b"}),
        "rerank": ("/v1/rerank", {"query": "a", "documents": "b"}),
        "classify": ("/classify", {"input": "a"}),
        "pooling": ("/pooling", {"input": "a"}),
    }
    engine = FakeEngine(small_plan()) if task is None else Pooler(small_plan(), task, lambda ids: (0.5,))
    async with run_server(engine) as server:
        server.state.classifier = ClassifierConfig({0: "score"} if task == "classify" else {})
        for name, (path, body) in bodies.items():
            response = await server.http.post(path, json={"model": "demo"} | body)
            if name in served:
                assert response.status_code == 200, (name, response.text)
            else:
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (400, "unsupported_endpoint"), name
                assert (error["param"], "'demo'" in error["message"]) == ("model", True)


async def test_cross_encoder_scores_a_pair_of_texts_as_one_prompt(run_server, small_plan, tokenizer) -> None:
    def value(ids: tuple[int, ...]) -> Pooled:
        return ((sum(ids) % 89) / 89,)

    query, documents = TEXTS[0], TEXTS[1:]
    pairs = [tuple(tokenizer.encode(query) + tokenizer.encode(document)) for document in documents]
    scores = [value(ids)[0] for ids in pairs]
    engine = Pooler(small_plan(), "classify", value)
    async with run_server(engine) as server:
        server.state.classifier = ClassifierConfig({0: "score"})
        body = {"model": "demo", "queries": query, "documents": documents}
        answer = (await server.http.post("/v1/score", json=body)).json()
        assert [item["score"] for item in answer["data"]] == scores
        assert answer["usage"]["prompt_tokens"] == sum(map(len, pairs))
        assert {request.prompt_token_ids for request in engine.requests} == set(pairs)
        body = {"model": "demo", "query": query, "documents": documents, "top_n": 1}
        (result,) = (await server.http.post("/v1/rerank", json=body)).json()["results"]
        assert (result["relevance_score"], result["index"]) == (max(scores), scores.index(max(scores)))
        server.state.classifier = ClassifierConfig({0: "score"}, separates=False)
        answer = (await server.http.post("/v1/rerank", json=body | {"documents": "The  bank"})).json()
        joined = tuple(tokenizer.encode(f"{query}The  bank"))
        assert answer["results"][0]["relevance_score"] == value(joined)[0]
        long = await server.http.post("/v1/rerank", json=body | {"documents": "word " * 9000})
        assert long.json()["error"]["code"] == "context_length_exceeded"
        server.state.classifier = ClassifierConfig(LABELS)
        error = (await server.http.post("/v1/rerank", json=body)).json()["error"]
        assert (error["code"], "2 labels" in error["message"]) == ("unsupported_endpoint", True)


async def test_chat_template_given_at_start_formats_the_pairs_of_a_cross_encoder(
    run_server, small_plan, tokenizer, tmp_path
) -> None:
    file = tmp_path / "pairs.jinja"
    file.write_text("{{ instruction }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    engine = Pooler(small_plan(), "classify", lambda ids: (0.5,))
    async with run_server(engine, chat_template=file) as server:
        server.state.classifier = ClassifierConfig({0: "score"})
        body = {"model": "demo", "query": "a", "documents": ["b"]}
        for more in ({"instruction": "Find."}, {"chat_template_kwargs": {"instruction": "Find."}}):
            assert (await server.http.post("/v1/rerank", json=body | more)).status_code == 200
            expected = tuple(tokenizer.encode("Find.<query>a<document>b"))
            assert engine.requests[-1].prompt_token_ids == expected
        error = await server.http.post("/v1/rerank", json=body | {"chat_template_kwargs": {"messages": []}})
        assert error.json()["error"]["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"id2label": {"0": "bad", "1": "good"}}, ClassifierConfig({0: "bad", 1: "good"})),
        ({"num_labels": 1}, ClassifierConfig({0: "LABEL_0"})),
        ({}, ClassifierConfig({0: "LABEL_0", 1: "LABEL_1"})),
        ({"num_labels": 1, "use_sep_token": False}, ClassifierConfig({0: "LABEL_0"}, separates=False)),
        ({"num_labels": 1, "use_pad_token": False}, ClassifierConfig({0: "LABEL_0"}, separates=False)),
        ({"num_labels": 1, "type_vocab_size": 2}, ClassifierConfig({0: "LABEL_0"}, has_types=True)),
        ({"num_labels": 1, "type_vocab_size": 1}, ClassifierConfig({0: "LABEL_0"})),
    ],
)
def test_classifier_labels_and_pair_format_are_read_from_config_json(
    tmp_path: Path, config: dict[str, Any], expected: ClassifierConfig
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_classifier(tmp_path) == expected


@pytest.mark.parametrize(
    ("config", "field"), [({"id2label": ["a"]}, "id2label"), ({"num_labels": "two"}, "num_labels")]
)
def test_error_for_invalid_classifier_labels_names_the_config_field(
    tmp_path: Path, config: dict[str, Any], field: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        read_classifier(tmp_path)
    assert caught.value.field == field


async def test_results_with_a_vector_per_token_count_towards_the_limit_of_buffered_answers(
    run_server, small_plan, checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results of an input of 8,192 tokens have a vector for each, and a request may have hundreds."""
    monkeypatch.setattr(outbox, "OUTBOX_BYTES", 100_000)
    engine = Pooler(small_plan(), "token_classify", lambda ids: tuple((0.5,) * 10 for _ in ids))
    async with run_server(engine) as server:
        body = {"model": "demo", "input": [[1] * 100] * 8}
        answer = (await server.http.post("/pooling", json=body)).json()
        assert [len(item["data"]) for item in answer["data"]] == [100] * 8
        error = checked(await server.http.post("/pooling", json=body | {"input": [[1] * 100] * 20}))
        assert error.code == ErrorCode.SERVER_OVERLOADED
        assert (server.state.outboxes.held, server.state.outboxes.behind) == (0, 0)


async def test_query_longer_than_the_context_is_rejected_before_it_is_joined_with_documents(
    run_server, small_plan, checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query of 130 KB with 256 documents made prompts of 34 million tokens before it was refused."""
    engine = Pooler(small_plan(max_model_len=4096), "classify", lambda ids: (0.5,))
    joined: list[int] = []

    def encode_pairs(self: Tokenizer, pairs: Sequence[tuple[str, str]], special: bool = True) -> Any:
        joined.append(len(pairs))
        return plain(self, pairs, special)

    plain = Tokenizer.encode_pairs
    monkeypatch.setattr(Tokenizer, "encode_pairs", encode_pairs)
    async with run_server(engine) as server:
        server.state.classifier = ClassifierConfig({0: "score"})
        body = {"model": "demo", "query": "a b " * 8000, "documents": [str(at) for at in range(100)]}
        error = checked(await server.http.post("/rerank", json=body))
        assert (error.code, error.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "documents")
        assert joined == []
        answer = await server.http.post("/rerank", json=body | {"query": "a"})
        assert (answer.status_code, sum(joined)) == (200, 100)
