"""Every success, chunk and error body against the openai package's types in strict mode.

The field tables are compared with the parameters of openai and vLLM.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import openai
import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsBase as BetaMessageParams
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from openai.types import Completion, EmbeddingCreateParams, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.responses import ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from openai.types.shared import ErrorObject
from pydantic import TypeAdapter
from strict_types import OPEN_FIELDS, CompletionChunk, OpenResponse, strictly, unknown

from tonnage.server.api.body import Fields
from tonnage.server.api.chat.protocol import FIELDS as CHAT_FIELDS
from tonnage.server.api.completions.protocol import FIELDS as COMPLETION_FIELDS
from tonnage.server.api.embeddings.protocol import FIELDS as EMBEDDING_FIELDS
from tonnage.server.api.fields import POOLING_PATHS, TABLES, FieldRule, Standing
from tonnage.server.api.messages.protocol import COUNT_FIELDS
from tonnage.server.api.messages.protocol import FIELDS as MESSAGES_FIELDS
from tonnage.server.api.pooling.protocol import CLASSIFICATION_FIELDS, POOLING_FIELDS
from tonnage.server.api.responses.protocol import FIELDS as RESPONSES_FIELDS
from tonnage.server.api.scores.protocol import RERANK_FIELDS, SCORE_FIELDS
from tonnage.server.engines.fake import FakeEngine

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]


async def events(server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with server.http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    if path != "/v1/responses":
        assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


BODIES: list[dict[str, Any]] = [{}, {"n": 3}, {"stop": ["e"]}, {"ignore_eos": True, "seed": 3, "top_k": 4}]


@pytest.mark.parametrize("more", BODIES, ids=str)
async def test_completions_match_openai_types_strictly(server, more: dict[str, Any]) -> None:
    body = {"model": "demo", "prompt": "hello", "max_tokens": 8, "temperature": 0.5} | more
    answer = (await server.http.post("/v1/completions", json=body)).json()
    strictly(Completion, answer)
    assert len(answer["choices"]) == more.get("n", 1)
    usage = {"stream_options": {"include_usage": True}}
    chunks = await events(server, "/v1/completions", body | usage)
    for chunk in chunks:
        strictly(CompletionChunk, chunk)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])  # there, and null


@pytest.mark.parametrize("more", BODIES, ids=str)
async def test_chat_completions_match_openai_types_strictly(server, more: dict[str, Any]) -> None:
    body = {"model": "demo", "messages": MESSAGES, "max_completion_tokens": 8} | more
    answer = (await server.http.post("/v1/chat/completions", json=body)).json()
    strictly(ChatCompletion, answer)
    chunks = await events(server, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    for chunk in chunks:
        strictly(ChatCompletionChunk, chunk)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    first = {chunk["choices"][0]["index"]: chunk for chunk in reversed(chunks[:-1])}
    assert all(chunk["choices"][0]["delta"].get("role") == "assistant" for chunk in first.values())
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert len(reasons) == more.get("n", 1)


async def test_responses_and_events_match_openai_types_strictly(server) -> None:
    body = {"model": "demo", "input": "hello", "max_output_tokens": 8, "instructions": "Be brief."}
    answer = (await server.http.post("/v1/responses", json=body)).json()
    strictly(OpenResponse, answer)
    assert answer["usage"]["output_tokens"] == 8
    assert answer["status"] == "incomplete"
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    told = await events(server, "/v1/responses", body)
    for number, event in enumerate(told):
        parsed = adapter.validate_json(json.dumps(event), strict=True)
        assert unknown(parsed) == (OPEN_FIELDS if "response" in event else set())
        assert event["sequence_number"] == number
    assert [event["type"] for event in (told[0], told[-1])] == ["response.created", "response.incomplete"]
    text = "".join(event["delta"] for event in told if event["type"] == "response.output_text.delta")
    assert text == told[-1]["response"]["output"][0]["content"][0]["text"]


async def test_models_endpoint_matches_openai_types_strictly(server) -> None:
    answer = (await server.http.get("/v1/models")).json()
    assert answer["object"] == "list"
    for model in (*answer["data"], (await server.http.get("/v1/models/demo")).json()):
        Model.model_validate_json(json.dumps(model), strict=True)


async def test_stream_error_events_match_openai_error_type(run_server, small_plan) -> None:
    async with run_server(FakeEngine(small_plan(), token_rate=50)) as server:
        for path, more in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": MESSAGES}),
        ):
            body = {"model": "demo", "max_tokens": 500, "stream": True} | more
            async with server.http.stream("POST", path, json=body) as response:
                lines = []
                async for line in response.aiter_lines():
                    lines += [line] if line else []
                    if len(lines) == 2:
                        server.engine.die()
            error = json.loads(lines[-2].removeprefix("data: "))
            assert set(error) == {"error"}
            ErrorObject.model_validate_json(json.dumps(error["error"]), strict=True)
            server.engine._dead = None  # the next path dies again


async def test_failed_response_sends_error_and_response_failed_events(run_server, small_plan) -> None:
    """Check the ``error`` event in both forms, and the ``response.failed`` event that Open Responses requires.

    The event is flat, as in OpenAI's reference. It also has a field ``error``, as OpenAI's servers send it and
    openai's client requires it to raise.
    """
    async with run_server(FakeEngine(small_plan(), token_rate=50)) as server:
        body = {"model": "demo", "input": "hello", "max_output_tokens": 500, "stream": True}
        told: list[dict[str, Any]] = []
        async with server.http.stream("POST", "/v1/responses", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    told.append(json.loads(line.removeprefix("data: ")))
                    if len(told) == 6:
                        server.engine.die()
        assert [event["sequence_number"] for event in told] == list(range(len(told)))
        error, failed = told[-2:]
        adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
        parsed = adapter.validate_json(json.dumps(error), strict=True)
        assert unknown(parsed) == {".error"}
        nested = ErrorObject.model_validate_json(json.dumps(error["error"]), strict=True)
        assert parsed.code == nested.code == "engine_dead"
        assert parsed.message == nested.message
        parsed = adapter.validate_json(json.dumps(failed), strict=True)
        assert unknown(parsed) == OPEN_FIELDS
        assert (failed["type"], parsed.response.status) == ("response.failed", "failed")
        assert (parsed.response.error.code, parsed.response.error.message) == ("server_error", nested.message)
        server.engine._dead = None
        stream = await server.openai.responses.create(**body)

        async def read_on() -> None:
            async for _ in stream:
                server.engine.die()

        with pytest.raises(openai.APIError, match="engine process ended"):
            await read_on()


CLIENTS = {
    "/v1/completions": CompletionCreateParamsBase,
    "/v1/chat/completions": chat_params.CompletionCreateParamsBase,
    "/v1/responses": ResponseCreateParamsBase,
    "/v1/messages": BetaMessageParams,
    "/v1/messages/count_tokens": MessageCountTokensParams,
    "/v1/embeddings": EmbeddingCreateParams,
    # of vLLM, without a client of OpenAI
    "/v1/score": object,
    "/v1/rerank": object,
    "/pooling": object,
    "/classify": object,
}
HEADERS = {"betas"}  # parameters of the anthropic package that it sends as headers
FIELDS = {
    "/v1/completions": COMPLETION_FIELDS,
    "/v1/chat/completions": CHAT_FIELDS,
    "/v1/responses": RESPONSES_FIELDS,
    "/v1/messages": MESSAGES_FIELDS,
    "/v1/messages/count_tokens": COUNT_FIELDS,
    "/v1/embeddings": EMBEDDING_FIELDS,
    "/v1/score": SCORE_FIELDS,
    "/v1/rerank": RERANK_FIELDS,
    "/pooling": POOLING_FIELDS,
    "/classify": CLASSIFICATION_FIELDS,
}
NO_STREAM = (*POOLING_PATHS, "/v1/messages/count_tokens")


@pytest.mark.parametrize("path", TABLES)
def test_every_request_field_of_the_client_packages_is_honoured_ignored_or_rejected(path: str) -> None:
    names = set(getattr(CLIENTS[path], "__annotations__", ())) | (
        {"stream"} if path not in NO_STREAM else set()
    )
    assert names - TABLES[path].keys() - HEADERS == set()


@pytest.mark.parametrize("path", TABLES)
def test_honoured_fields_equal_the_fields_of_the_request_models(path: str) -> None:
    """Every honoured field is in the request model, and the model has no other field."""
    fields: Fields = FIELDS[path]
    honoured = {
        name for name, rule in fields.table.items() if rule.standing is Standing.HONOURED and "." not in name
    }
    assert honoured == set(fields.model.model_fields)
    assert all(isinstance(rule, FieldRule) for rule in fields.table.values())


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (extra vllm)")
def test_every_request_field_of_vllm_is_honoured_ignored_or_rejected() -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.pooling.classify.protocol import ClassificationCompletionRequest
    from vllm.entrypoints.pooling.embed.protocol import EmbeddingCompletionRequest
    from vllm.entrypoints.pooling.pooling.protocol import PoolingCompletionRequest
    from vllm.entrypoints.pooling.scoring.protocol import (
        RerankRequest,
        ScoreDataRequest,
        ScoreQueriesDocumentsRequest,
        ScoreQueriesItemsRequest,
        ScoreTextRequest,
    )

    for path, model in (
        ("/v1/completions", CompletionRequest),
        ("/v1/chat/completions", ChatCompletionRequest),
        ("/v1/responses", ResponsesRequest),
        ("/v1/messages", AnthropicMessagesRequest),
        ("/v1/messages/count_tokens", AnthropicCountTokensRequest),
        ("/v1/embeddings", EmbeddingCompletionRequest),
        ("/v1/score", ScoreQueriesDocumentsRequest),
        ("/v1/score", ScoreQueriesItemsRequest),
        ("/v1/score", ScoreDataRequest),
        ("/v1/score", ScoreTextRequest),
        ("/v1/rerank", RerankRequest),
        ("/pooling", PoolingCompletionRequest),
        ("/classify", ClassificationCompletionRequest),
    ):
        assert set(model.model_fields) - TABLES[path].keys() == set(), path


async def test_ignored_fields_are_listed_and_unknown_fields_need_lenient_mode(run_server, small_plan) -> None:
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 2, "store": True, "metadata": {"a": "b"}}
    async with run_server(FakeEngine(small_plan())) as server:
        response = await server.http.post("/v1/chat/completions", json=body)
        assert (response.status_code, response.headers["x-ignored-fields"]) == (200, "store, metadata")
        response = await server.http.post("/v1/chat/completions", json=body | {"mesages": 1})
        assert response.status_code == 400
        assert "did you mean messages?" in response.json()["error"]["message"]
    async with run_server(FakeEngine(small_plan()), lenient=True) as server:
        more = {"foo": 1, "messages": [MESSAGES[1] | {"bar": 2}], "stream": True}
        response = await server.http.post("/v1/chat/completions", json=body | more)
        assert response.status_code == 200
        assert response.headers["x-ignored-fields"] == "store, metadata, foo, messages.0.bar"
        response = await server.http.post("/v1/chat/completions", json=body | {"é\r\nx: 1": 1, "日": {"本": 2}})
        assert (response.status_code, response.headers["x-ignored-fields"]) == (
            200,
            "store, metadata, ???x: 1, ?",
        )
        # Lenient to what is unknown, not to what is known and has no effect.
        refused = await server.http.post("/v1/chat/completions", json=body | {"audio": {"voice": "x"}})
        assert refused.json()["error"]["code"] == "unsupported_parameter"
