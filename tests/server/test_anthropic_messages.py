"""Anthropic's API, /v1/messages, called by the anthropic package: on the hf engine, and on the fake engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter
from serving import PATIENCE, serving

from tonnage.server.api.fields import MESSAGES, Standing
from tonnage.server.engines.fake import FakeEngine

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (extra vllm)")

KEY = "a-key-of-the-anthropic-tests"
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"],
        "additionalProperties": False,
    },
}  # fmt: skip
FORCED: dict[str, Any] = {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    flags = ["--max-model-len", "512", "--kv-cache-memory-bytes", "128MiB", "--max-num-seqs", "4"]
    with serving("demo", "--backend", "hf", *flags) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with (
        anthropic.DefaultHttpxClient(trust_env=False, timeout=PATIENCE) as http,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, http_client=http) as made,
    ):
        yield made


def ask(client: anthropic.Anthropic, **more: Any) -> Message:
    body = {"model": "demo", "max_tokens": 8, "messages": ASK} | more
    raw = client.messages.with_raw_response.create(**body, extra_body={"temperature": 0})
    Message.model_validate_json(raw.http_response.content, strict=True)
    parsed: Message = raw.parse()
    assert unknown(parsed) == set()
    return parsed


def unknown(value: Any) -> set[str]:
    """Return the fields in an answer that the types of the package do not have."""
    if isinstance(value, BaseModel):
        inside = (unknown(getattr(value, name)) for name in type(value).model_fields)
        return set(value.model_extra or ()).union(*inside)
    return set().union(*map(unknown, value)) if isinstance(value, list) else set()


def chat(url: str, **more: Any) -> dict[str, Any]:
    body = {"model": "demo", "max_tokens": 8, "messages": ASK, "temperature": 0} | more
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=PATIENCE)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def test_anthropic_message_equals_the_chat_completion_of_the_same_conversation(
    client: anthropic.Anthropic, url: str
) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Name a city."}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Paris"}]},
        {"role": "user", "content": [{"type": "text", "text": "And its country?"}]},
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: differs from call to call"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    answer = ask(client, messages=turns, system=system, max_tokens=4)
    flat = [{"role": turn["role"], "content": turn["content"][0]["text"]} for turn in turns]
    same = chat(url, messages=[{"role": "system", "content": "Be brief."}, *flat], max_tokens=4)
    assert answer.content[0].text == same["choices"][0]["message"]["content"]
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == same["usage"]["prompt_tokens"]
    assert (usage.output_tokens, answer.stop_reason) == (4, "max_tokens")
    counted = client.messages.count_tokens(model="demo", messages=turns, system=system)
    assert counted.input_tokens == same["usage"]["prompt_tokens"]


def test_anthropic_stream_has_all_events_and_the_text_of_the_whole_message(client: anthropic.Anthropic) -> None:
    whole = ask(client)
    body: dict[str, Any] = {"model": "demo", "max_tokens": 8, "messages": ASK}
    with client.messages.stream(**body, extra_body={"temperature": 0}) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert final.model_dump(exclude={"id", "usage"}) == whole.model_dump(exclude={"id", "usage"})
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert sum(tokens(final)) == sum(tokens(whole))


def tokens(message: Message) -> tuple[int, int]:
    return message.usage.input_tokens, message.usage.cache_read_input_tokens or 0


@pytest.mark.parametrize("choice", [FORCED["tool_choice"], {"type": "any", "disable_parallel_tool_use": True}])
def test_forced_anthropic_tool_is_used_and_its_result_can_be_sent_back(
    client: anthropic.Anthropic, url: str, choice: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"max_tokens": 40, "tools": [WEATHER], "tool_choice": choice}
    answer = ask(client, **body)
    (block,) = answer.content
    assert (block.type, block.name, answer.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert block.id.startswith("toolu_")
    assert block.input in ({"city": "Paris"}, {"city": "Oslo"})
    with client.messages.stream(model="demo", messages=ASK, **body, extra_body={"temperature": 0}) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_message().content
    assert (streamed.name, streamed.input) == (block.name, block.input)
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [*ASK, answer.to_param(), {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]}]
    after = ask(client, messages=turns, tools=[WEATHER], tool_choice={"type": "none"})
    function = {"name": "get_weather", "arguments": json.dumps(block.input)}
    same = chat(url, messages=[
        *ASK, {"role": "assistant", "tool_calls": [{"id": block.id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": block.id, "content": "sunny"}, {"role": "user", "content": "Well?"},
    ])  # fmt: skip
    assert sum(tokens(after)) == same["usage"]["prompt_tokens"]


def test_tool_runner_of_the_anthropic_package_calls_the_tool(client: anthropic.Anthropic) -> None:
    called: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: Literal["Paris", "Oslo"]) -> str:
        """Return the weather of a city."""
        called.append(city)
        return "sunny"

    # The runner asks for a conversation that the server stores, is told that there is none, and does without.
    runner = client.beta.messages.tool_runner(
        model="demo",
        max_tokens=40,
        max_iterations=2,
        messages=ASK,
        tools=[get_weather],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    first, second = list(runner)
    assert [block.type for block in (*first.content, *second.content)] == ["tool_use", "tool_use"]
    assert called[0] == first.content[0].input["city"]
    assert sum(tokens(second)) > sum(tokens(first))


def test_anthropic_tool_with_a_name_longer_than_openais_limit_can_be_called(
    client: anthropic.Anthropic,
) -> None:
    tool = WEATHER | {"name": "mcp__server__" + "x" * 110}
    answer = ask(client, tools=[tool], tool_choice={"type": "tool", "name": tool["name"]}, max_tokens=40)
    assert answer.content[0].name == tool["name"]
    again = ask(client, tools=[tool], tool_choice={"type": "any"}, max_tokens=200)
    assert again.content[0].name == tool["name"]


def test_anthropic_count_tokens_includes_the_tools(client: anthropic.Anthropic, url: str) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "description": WEATHER["description"],
            "parameters": WEATHER["input_schema"]}}  # fmt: skip
    same = chat(url, tools=[tool], tool_choice="required", max_tokens=1)
    counted = client.messages.count_tokens(
        model="demo", messages=ASK, tools=[WEATHER], tool_choice={"type": "any"}
    )
    assert counted.input_tokens == same["usage"]["prompt_tokens"]


def test_anthropic_message_continues_the_last_message_of_the_conversation_if_it_is_the_assistants(
    client: anthropic.Anthropic, url: str
) -> None:
    turns = [*ASK, {"role": "assistant", "content": "In Paris the weather"}]
    answer = ask(client, messages=turns)
    same = chat(url, messages=turns, add_generation_prompt=False, continue_final_message=True)
    assert answer.content[0].text == same["choices"][0]["message"]["content"]


def test_anthropic_message_reports_the_stop_sequence_that_ended_it(client: anthropic.Anthropic) -> None:
    text = ask(client).content[0].text
    stop = text[5:8]
    answer = ask(client, stop_sequences=["never written", stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]


def test_anthropic_max_tokens_beyond_the_context_is_reduced_to_what_fits(client: anthropic.Anthropic) -> None:
    answer = ask(client, max_tokens=100_000, messages=[{"role": "user", "content": "word " * 480}])
    assert answer.stop_reason in ("model_context_window_exceeded", "end_turn")
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        ask(client, messages=[{"role": "user", "content": "word " * 600}])


def test_anthropic_output_format_is_enforced(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"],
        "additionalProperties": False,
    }  # fmt: skip
    form = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    answer = ask(client, max_tokens=40, output_config=form)
    assert set(json.loads(answer.content[0].text)) == {"city"}


def test_tool_use_cut_off_by_max_tokens_still_has_an_object_as_its_input(client: anthropic.Anthropic) -> None:
    answer = ask(client, **FORCED, max_tokens=3)
    assert answer.stop_reason == "max_tokens"
    assert all(isinstance(block.input, dict) for block in answer.content)


# What each field that `tonnage doctor` prints as honoured does; the other tests of this file check the rest.
CHECKED = {
    "model", "messages", "system", "max_tokens", "stream", "stop_sequences", "tools", "tool_choice",
    "output_config", "output_config.effort", "output_config.format",
}  # fmt: skip


def temperature(client: anthropic.Anthropic) -> None:
    body: dict[str, Any] = {"model": "demo", "max_tokens": 16, "messages": ASK}
    hot = [client.messages.create(**body, extra_body={"temperature": 2.0}).content for _ in range(2)]
    assert hot[0] != hot[1]


def top_k(client: anthropic.Anthropic) -> None:
    body: dict[str, Any] = {"model": "demo", "max_tokens": 1, "messages": ASK}
    drawn = [client.messages.create(**body, extra_body={"top_k": 1}).content for _ in range(3)]
    assert drawn == 3 * [ask(client, max_tokens=1).content]


def top_p(client: anthropic.Anthropic) -> None:
    body: dict[str, Any] = {"model": "demo", "max_tokens": 8, "messages": ASK}
    assert client.messages.create(**body, extra_body={"top_p": 1e-6}).content == ask(client).content


def cache_salt(client: anthropic.Anthropic) -> None:
    body: dict[str, Any] = {
        "model": "demo",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "a " * 99}],
    }
    cached = [
        client.messages.create(**body, extra_body={"cache_salt": salt}).usage.cache_read_input_tokens
        for salt in ("one", "one", "two")
    ]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0


def request_id(client: anthropic.Anthropic) -> None:
    body: dict[str, Any] = {"model": "demo", "max_tokens": 1, "messages": ASK}
    answer = client.messages.create(**body, extra_body={"request_id": "mine"})
    assert (answer.id, answer._request_id) == ("msg_mine", "mine")


def add_special_tokens(client: anthropic.Anthropic) -> None:
    body: dict[str, Any] = {"model": "demo", "max_tokens": 1, "messages": ASK}
    client.messages.create(**body, extra_body={"add_special_tokens": True})


def priority(client: anthropic.Anthropic) -> None:
    body: dict[str, Any] = {"model": "demo", "max_tokens": 1, "messages": ASK}
    client.messages.create(**body, extra_body={"priority": 1})
    with pytest.raises(anthropic.BadRequestError, match="priority"):
        client.messages.create(**body, extra_body={"priority": 5000})


FIELD_CHECKS: dict[str, Callable[[anthropic.Anthropic], None]] = {
    "temperature": temperature, "top_k": top_k, "top_p": top_p, "cache_salt": cache_salt,
    "request_id": request_id, "add_special_tokens": add_special_tokens, "priority": priority,
}  # fmt: skip
IN_TEMPLATE = {"thinking", "chat_template_kwargs"}  # in the test with a template


def test_every_honoured_anthropic_field_has_a_test_of_its_effect() -> None:
    honoured = {name for name, rule in MESSAGES.items() if rule.standing is Standing.HONOURED}
    assert honoured == CHECKED | FIELD_CHECKS.keys() | IN_TEMPLATE


@pytest.mark.parametrize("field", FIELD_CHECKS)
def test_each_honoured_anthropic_field_has_its_effect(client: anthropic.Anthropic, field: str) -> None:
    FIELD_CHECKS[field](client)


# -- the fake engine -----------------------------------------------------------------------------------------


async def test_anthropic_thinking_and_effort_reach_the_chat_template(
    run_server, small_plan, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[-1].content }} {{ enable_thinking }} {{ reasoning_effort }} {{ mark }}")
    body: dict[str, Any] = {"model": "demo", "messages": ASK}
    async with run_server(FakeEngine(small_plan()), chat_template=template) as server:

        async def count(**more: Any) -> int:
            answer = await server.http.post("/v1/messages/count_tokens", json=body | more)
            return int(answer.raise_for_status().json()["input_tokens"])

        async def encoded(text: str) -> int:
            return int((await server.http.post("/tokenize", json={"prompt": text})).json()["count"])

        question = ASK[0]["content"]
        for more, written in (
            ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, " True  "),
            ({"thinking": {"type": "adaptive"}}, " True  "),
            ({"thinking": {"type": "disabled"}, "output_config": {"effort": "xhigh"}}, " False xhigh "),
            ({"chat_template_kwargs": {"mark": "fox fox"}}, "   fox fox"),
        ):
            assert await count(**more) == await encoded(question + written)


@needs_vllm
async def test_tool_use_that_the_model_generates_follows_its_text_block(
    run_server, small_plan, tokenizer
) -> None:
    text = 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    ids = tokenizer.encode(text, add_special_tokens=False)
    engine = FakeEngine(small_plan(), reply=lambda request, index: iter(ids))
    async with run_server(engine, enable_auto_tool_choice=True, tool_call_parser="hermes") as server:
        client = anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0)
        body: dict[str, Any] = {"model": "demo", "max_tokens": 200, "messages": ASK, "tools": [WEATHER]}
        answer = await client.messages.create(**body)
        async with client.messages.stream(**body) as stream:
            streamed = await stream.get_final_message()
        for message in (answer, streamed):
            said, used = message.content
            assert said.text.strip() == "I look."
            assert (used.name, used.input, message.stop_reason) == (
                "get_weather",
                {"city": "Paris"},
                "tool_use",
            )


async def test_every_anthropic_stream_event_matches_the_packages_types(server) -> None:
    body = {"model": "demo", "max_tokens": 6, "messages": ASK, "stream": True}
    answer = await server.http.post("/v1/messages", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    kinds = []
    for kind, data in blocks:
        event = adapter.validate_json(data.removeprefix("data: "), strict=True)
        assert kind == f"event: {event.type}"
        assert unknown(event) == set()
        kinds.append(event.type)
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_api_key_is_accepted_in_any_of_three_headers(run_server, small_plan) -> None:
    body: dict[str, Any] = {"model": "demo", "max_tokens": 2, "messages": ASK}
    async with run_server(FakeEngine(small_plan()), api_key=(KEY,)) as server:
        for headers in ({"x-api-key": KEY}, {"api-key": KEY}, {"authorization": f"Bearer {KEY}"}):
            answer = await server.http.post("/v1/messages", json=body, headers=headers)
            assert answer.status_code == 200
        # The header Authorization decides, where there is one.
        both = {"x-api-key": KEY, "authorization": "Bearer a-wrong-key-of-the-tests"}
        assert (await server.http.post("/v1/messages", json=body, headers=both)).status_code == 401
        for make in (
            lambda key: anthropic.AsyncAnthropic(base_url=server.url, api_key=key, max_retries=0),
            lambda key: anthropic.AsyncAnthropic(base_url=server.url, auth_token=key, max_retries=0),
        ):
            assert (await make(KEY).messages.create(**body)).content
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await make("a-wrong-key-of-the-tests").messages.create(**body)
            assert caught.value.body["error"]["type"] == "authentication_error"


CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"max_tokens": None}, "max_tokens"),
    ({"temperature": 9}, "temperature"),
    ({"mesages": []}, "did you mean messages"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "other is not among the tools"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "no images and documents"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
            ]
        },
        "a tool_use block is not allowed in a message of the role user",
    ),
]


async def test_errors_of_the_messages_endpoint_have_anthropics_format(server) -> None:
    body: dict[str, Any] = {"model": "demo", "max_tokens": 2, "messages": ASK}
    for change, words in REFUSED:
        answer = await server.http.post("/v1/messages", json=body | change)
        assert answer.status_code == 400, change
        document = answer.json()
        assert set(document) == {"type", "error", "request_id"}
        assert (document["type"], document["error"]["type"]) == ("error", "invalid_request_error")
        assert words in document["error"]["message"], document
        assert answer.headers["request-id"] == answer.headers["x-request-id"] == document["request_id"]
        assert int(answer.headers["content-length"]) == len(answer.content)
    for path, change, status, kind in (
        ("/v1/messages", {"model": "other"}, 404, "not_found_error"),
        ("/v1/messages/batches", {}, 404, "not_found_error"),
        ("/v1/messages/count_tokens", {"max_tokens": 2}, 400, "invalid_request_error"),
    ):
        answer = await server.http.post(path, json=body | change)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert (await server.http.get("/v1/messages")).json()["error"]["type"] == "invalid_request_error"
    # Other paths keep OpenAI's form.
    assert "type" not in (await server.http.post("/v1/chat/completions", json={})).json()


async def test_engine_failure_during_an_anthropic_stream_is_sent_as_an_error_event(
    run_server, small_plan
) -> None:
    async with run_server(FakeEngine(small_plan(), token_rate=50)) as server:
        client = anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0)
        stream = await client.messages.create(model="demo", max_tokens=500, messages=ASK, stream=True)

        async def read_on() -> None:
            async for _ in stream:
                server.engine.die()

        with pytest.raises(anthropic.APIStatusError, match="engine process ended") as caught:
            await read_on()
        assert caught.value.body["error"]["type"] == "overloaded_error"


async def test_beta_client_of_anthropic_gets_an_answer(server) -> None:
    """The fields are those that agents on this API send with every request."""
    client = anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0)
    answer = await client.beta.messages.create(
        model="demo",
        max_tokens=4,
        betas=["context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        metadata={"user_id": "someone"},
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}, *ASK],
    )
    assert answer.content[0].type == "text"


async def test_predefined_anthropic_tools_are_ignored_and_listed_in_a_header(server) -> None:
    body: dict[str, Any] = {
        "model": "demo", "max_tokens": 2, "messages": ASK, "metadata": {"user_id": "u"},
        "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}],
    }  # fmt: skip
    answer = await server.http.post("/v1/messages", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "tools.0 (web_search_20250305), metadata"
