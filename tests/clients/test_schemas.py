"""Every answer, chunk, event and error of both backends against the types of openai and anthropic, strictly."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from conversations import calling, reasoning
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from openai.types.shared import ErrorObject
from strict_types import OPEN_FIELDS, CompletionChunk, EchoCompletion, OpenResponse, strictly
from toolcalls import ASK, CLOCK, WEATHER

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"]}
FLAT = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]
FUNCTIONS = [tool["function"] for tool in (WEATHER, CLOCK)]
USED = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in FUNCTIONS]
CHAT: dict[str, dict[str, Any]] = {
    "plain": {},
    "length": {"max_tokens": 2},
    "choices": {"n": 2, "temperature": 1, "seed": 3},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "stop": {"stop": ["e", "a", "i", "o", "u", "y"]},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}},
    "object": {"response_format": {"type": "json_object"}},
    "required": {"tools": [WEATHER, CLOCK], "tool_choice": "required"},
    "named": {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    "auto": {"tools": [WEATHER], "messages": calling()},
    "reasoning": {"messages": reasoning()},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, *ASK]},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "length": {"max_tokens": 1},
    "choices": {"n": 2, "seed": 3},
    "logprobs": {"logprobs": 3},
    "echo": {"echo": True, "logprobs": 1},
    "prompts": {"prompt": ["1 2 3", "a b c"]},
    "ids": {"prompt": [1, 2, 3]},
    "stop": {"stop": ["5", "6", "7", "8", "9", "10"]},
    "choice": {"structured_outputs": {"choice": ["7", "8"]}},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "incomplete": {"max_output_tokens": 2},
    "instructions": {"instructions": "Be brief.", "metadata": {"a": "b"}, "store": False},
    "schema": {"text": {"format": {"type": "json_schema", "name": "city", "schema": CITY}}},
    "required": {"tools": FLAT, "tool_choice": "required"},
    "named": {"tools": FLAT, "tool_choice": {"type": "function", "name": "get_weather"}},
    "reasoning": {"input": reasoning(), "reasoning": {"effort": "low"}},
    "codex": {"tools": [*FLAT, {"type": "web_search"}], "include": ["reasoning.encrypted_content"]},
}
MESSAGES: dict[str, dict[str, Any]] = {
    "plain": {"system": "Be brief."},
    "length": {"max_tokens": 2},
    "stop": {"stop_sequences": ["e", "a"]},
    "any": {"tools": USED, "tool_choice": {"type": "any"}},
    "tool": {"tools": USED, "tool_choice": {"type": "tool", "name": "get_weather"}},
    "thinking": {"messages": reasoning(), "thinking": {"type": "adaptive"}},
}
# vLLM's field for reasoning, which openai's types do not have
REASONING = frozenset({".choices.message.reasoning_content", ".choices.delta.reasoning_content"})
# of response.function_call_arguments.done: in OpenAI's document and the package's types before 3.0
NAME = frozenset({".name"})


def answer(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    response = http.post(path, json={"model": "demo", "temperature": 0} | body)
    assert response.status_code == 200, response.text
    return response.json()


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    response = http.post(path, json={"model": "demo", "temperature": 0, "stream": True} | body)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("case", CHAT)
def test_chat_completions_match_openais_types_strictly(
    http: httpx.Client, case: str, checked: Callable[[int], None]
) -> None:
    body = {"messages": ASK, "max_tokens": 40} | CHAT[case]
    whole = answer(http, "/v1/chat/completions", body)
    strictly(ChatCompletion, whole, REASONING)
    chunks = events(http, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    for chunk in chunks:
        strictly(ChatCompletionChunk, chunk, REASONING)
    checked(1 + len(chunks))
    assert chunks[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


@pytest.mark.parametrize("case", COMPLETIONS)
def test_completions_match_openais_types_strictly(
    http: httpx.Client, case: str, checked: Callable[[int], None]
) -> None:
    body = {"prompt": "1 2 3 4", "max_tokens": 8} | COMPLETIONS[case]
    strictly(EchoCompletion if body.get("echo") else Completion, answer(http, "/v1/completions", body))
    chunks = events(http, "/v1/completions", body)
    for chunk in chunks:
        strictly(EchoCompletion if body.get("echo") else CompletionChunk, chunk)
    checked(1 + len(chunks))


@pytest.mark.parametrize("case", RESPONSES)
def test_responses_match_openais_types_strictly(
    http: httpx.Client, case: str, checked: Callable[[int], None]
) -> None:
    body = {"input": ASK, "max_output_tokens": 40} | RESPONSES[case]
    strictly(OpenResponse, answer(http, "/v1/responses", body))
    found = events(http, "/v1/responses", body)
    for event in found:
        strictly(ResponseStreamEvent, event, frozenset(OPEN_FIELDS) | NAME)
    strictly(OpenResponse, found[-1]["response"])
    checked(2 + len(found))


@pytest.mark.parametrize("case", MESSAGES)
def test_messages_match_anthropics_types_strictly(
    http: httpx.Client, case: str, checked: Callable[[int], None]
) -> None:
    body = {"messages": ASK, "max_tokens": 40} | MESSAGES[case]
    strictly(Message, answer(http, "/v1/messages", body))
    found = events(http, "/v1/messages", body)
    for event in found:
        strictly(RawMessageStreamEvent, event)
    counted = {"model": "demo"} | {name: body[name] for name in body if name in ("messages", "system", "tools")}
    strictly(MessageTokensCount, http.post("/v1/messages/count_tokens", json=counted).json())
    checked(2 + len(found))


ERRORS: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/chat/completions", {}, 400),
    ("/v1/chat/completions", {"messages": ASK, "mesages": 1}, 400),
    ("/v1/chat/completions", {"messages": ASK, "temperature": 9}, 400),
    ("/v1/chat/completions", {"messages": ASK, "model": "other"}, 404),
    ("/v1/chat/completions", {"messages": ASK, "max_tokens": 10**6}, 400),
    ("/v1/chat/completions", {"messages": ASK, "tool_choice": "required"}, 400),
    ("/v1/completions", {}, 400),
    ("/v1/completions", {"prompt": "a", "n": 0}, 400),
    ("/v1/responses", {}, 400),
    ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}, 400),
    ("/v1/embeddings", {"input": "a"}, 400),
    ("/v1/audio/speech", {}, 404),
]


def test_errors_and_models_match_openais_types_strictly(
    http: httpx.Client, checked: Callable[[int], None]
) -> None:
    for path, body, status in ERRORS:
        response = http.post(path, json={"model": "demo"} | body)
        assert response.status_code == status, (path, body, response.text)
        assert set(response.json()) == {"error"}
        strictly(ErrorObject, response.json()["error"])
    models = http.get("/v1/models").json()["data"]
    for model in (*models, http.get("/v1/models/demo").json()):
        strictly(Model, model, frozenset({".max_model_len"}))
    checked(len(ERRORS) + len(models) + 1)
