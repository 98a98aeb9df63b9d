"""Rules of OpenAI's reference beyond its types: messages sent back, and values of fields without effect."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import (
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
    ParsedChatCompletionMessage,
)
from openai.types.chat.chat_completion_message_function_tool_call import Function

from tonnage.server.api.logprobs import CompletionLogprobs
from tonnage.server.engines.chunk import TokenLogprobs
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.text.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hello"}


async def text(server: Any, *messages: dict[str, Any]) -> str:
    """Return the prompt text that the model receives for a conversation."""
    tokens = (await server.http.post("/tokenize", json={"messages": messages})).json()["tokens"]
    said: str = (await server.http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
    return said


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("role", ["user", "system", "developer", "tool"])
async def test_chat_message_without_content_is_rejected(server, role: str, stream: bool) -> None:
    for message in ({"role": role}, {"role": role, "content": None}):
        body = {"model": "demo", "messages": [USER, message], "max_tokens": 2, "stream": stream}
        response = await server.http.post(CHAT, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "missing_required_parameter")
        assert error["param"] == "messages.1.content"
    assert server.engine.stats().prompt_tokens == 0
    response = await server.http.post("/tokenize", json={"messages": [{"role": role}]})
    assert response.status_code == 400


async def test_assistant_message_of_openai_client_is_accepted_unchanged(server) -> None:
    call = ChatCompletionMessageFunctionToolCall(
        id="call_1", type="function", function=Function(name="f", arguments='{"a": 1}')
    )
    plain = {"role": "assistant", "content": "It is."}
    for message in (
        ChatCompletionMessage(role="assistant", content="It is."),
        ParsedChatCompletionMessage[dict[str, int]](role="assistant", content="It is.", parsed={"a": 1}),
    ):
        whole = message.model_dump()
        assert {"audio", "function_call", "refusal", "annotations"} <= whole.keys()
        assert await text(server, USER, whole) == await text(server, USER, plain)
        body = {"model": "demo", "messages": [USER, whole, USER], "max_tokens": 2}
        assert (await server.http.post(CHAT, json=body)).status_code == 200
    called = ChatCompletionMessage(role="assistant", content=None, tool_calls=[call]).model_dump()
    body = {"model": "demo", "messages": [USER, called, USER], "max_tokens": 2}
    assert (await server.http.post(CHAT, json=body)).status_code == 200


async def test_refusal_part_is_rendered_as_assistant_text(server) -> None:
    said = await text(server, USER, {"role": "assistant", "content": "I will not."})
    parts = [{"type": "refusal", "refusal": "I will not."}]
    assert await text(server, USER, {"role": "assistant", "content": parts}) == said
    declined = ChatCompletionMessage(role="assistant", content=None, refusal="I will not.")
    assert await text(server, USER, declined.model_dump()) == said
    response = await server.http.post("/tokenize", json={"messages": [{"role": "user", "content": parts}]})
    assert response.json()["error"]["param"] == "messages.0.content"


WRONG: list[tuple[str, str, Any]] = [
    (CHAT, "metadata", "a"), (CHAT, "metadata", {"a": 1}), (CHAT, "metadata", {str(i): "" for i in range(17)}),
    (CHAT, "store", 1), (CHAT, "store", "true"),
    (CHAT, "service_tier", 1),
    ("/v1/responses", "store", 0), ("/v1/responses", "service_tier", ["auto"]),
]  # fmt: skip


@pytest.mark.parametrize("lenient", [False, True], ids=["strict", "lenient"])
async def test_types_of_ignored_request_fields_are_checked(run_server, small_plan, lenient: bool) -> None:
    async with run_server(FakeEngine(small_plan()), lenient=lenient) as server:
        for path, name, value in WRONG:
            given = (
                {"messages": [USER], "max_tokens": 2}
                if path == CHAT
                else {"input": "a", "max_output_tokens": 2}
            )
            response = await server.http.post(path, json={"model": "demo", name: value} | given)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, "invalid_type", name)
            right = {"metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
            for good in (right[name], None):
                response = await server.http.post(path, json={"model": "demo", name: good} | given)
                assert response.status_code == 200
                assert response.headers.get("x-ignored-fields") == (None if good is None else name)


def test_top_logprobs_include_the_sampled_token(tokenizer: Tokenizer) -> None:
    """OpenAI's reference of ``logprobs`` permits up to logprobs + 1 elements."""
    best = ((300, -0.1), (301, -2.5), (302, -3.0))
    for token, logprob, size in ((400, -7.0, 3), (301, -2.5, 2)):
        lists = CompletionLogprobs(tokenizer, 2).take([TokenLogprobs(token, logprob, best)])
        (top,) = lists["top_logprobs"]
        assert len(top) == size
        assert top[lists["tokens"][0]] == lists["token_logprobs"][0] == logprob
        assert top[tokenizer.token_text(300)] == -0.1
    (only,) = CompletionLogprobs(tokenizer, 0).take([TokenLogprobs(400, -7.0, ())])["top_logprobs"]
    assert only == {tokenizer.token_text(400): -7.0}
