"""The openai package: tools, formats, reasoning, stop strings, vLLM's extensions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from conversations import calling, reasoning
from pydantic import BaseModel
from serving import PATIENCE
from toolcalls import ASK, CLOCK, WEATHER, joined, told

NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Oslo"]


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as made:
        yield made


def chat(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "demo", "messages": ASK, "max_tokens": 60} | more)


def test_openai_client_gets_a_tool_call_that_the_model_chose(client: openai.OpenAI) -> None:
    call = [("get_weather", {"city": "Paris", "days": 1})]
    answer = chat(client, messages=calling(), tools=[WEATHER]).choices[0]
    assert (told(answer.message), answer.finish_reason) == (call, "tool_calls")
    chunks = list(chat(client, messages=calling(), tools=[WEATHER], stream=True))
    assert joined(chunks) == ("", call, "tool_calls")
    assert chunks[0].choices[0].delta.content is None
    back = [*calling(), answer.message, {
        "role": "tool", "tool_call_id": answer.message.tool_calls[0].id, "content": "Sun."
    }]  # fmt: skip
    assert chat(client, messages=back, tools=[WEATHER], tool_choice="none").choices[0].message.content


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_tool_call_takes_precedence_over_response_format(client: openai.OpenAI, choice: Any) -> None:
    schema = {"name": "answer", "schema": Weather.model_json_schema()}
    more = {"tools": [WEATHER], "tool_choice": choice}
    more |= {"response_format": {"type": "json_schema", "json_schema": schema}}
    ((name, _),) = told(chat(client, parallel_tool_calls=False, **more).choices[0].message)
    assert name == "get_weather"
    chunks = list(chat(client, stream=True, parallel_tool_calls=False, **more))
    assert all(chunk.choices[0].delta.content is None for chunk in chunks)
    assert [name for name, _ in joined(chunks)[1]] == ["get_weather"]


def test_openai_client_parses_a_response_format_into_its_model(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="demo", messages=ASK, response_format=Weather, max_tokens=60
    )  # fmt: skip
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    answer = client.responses.parse(model="demo", input=ASK, text_format=Weather, max_output_tokens=60)
    assert isinstance(answer.output_parsed, Weather)


def test_tool_without_parameters_is_called_with_an_empty_object(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "list_ships"}}]
    answer = chat(client, tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert told(answer.choices[0].message) == [("list_ships", {})]


def test_allowed_tools_choice_restricts_the_called_tools(client: openai.OpenAI) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    answer = chat(
        client, tools=[WEATHER, CLOCK], tool_choice={"type": "allowed_tools", "allowed_tools": allowed}
    )
    assert {name for name, _ in told(answer.choices[0].message)} == {"get_time"}


def test_openai_client_may_send_more_than_four_stop_strings(client: openai.OpenAI) -> None:
    stop = [f"never {number}" for number in range(20)]
    answer = client.completions.create(model="demo", prompt="1 2 3 4", max_tokens=9, stop=[*stop, "7"])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text.strip() == "5 6"


def test_reasoning_is_returned_separately_from_the_content(client: openai.OpenAI) -> None:
    answer = chat(client, messages=reasoning())
    message, usage = answer.choices[0].message, answer.usage
    assert message.model_extra["reasoning_content"].strip() == "They want a bird."
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    deltas = [chunk.choices[0].delta for chunk in chat(client, messages=reasoning(), stream=True)]
    thought = "".join((delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas)
    text = "".join(delta.content or "" for delta in deltas)
    assert (thought, text) == (message.model_extra["reasoning_content"], message.content)
    response = client.responses.create(model="demo", input=reasoning(), max_output_tokens=60)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output_text == text
    for effort in ("low", "high"):
        assert chat(client, reasoning_effort=effort, max_tokens=1).usage.completion_tokens == 1
    with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
        chat(client, reasoning_effort="banana")
    with pytest.raises(openai.BadRequestError, match="tool_call_id"):
        chat(client, messages=[*ASK, {"role": "tool", "content": "Sun."}])


def test_responses_endpoint_accepts_the_fields_that_codex_sends(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "demo", "input": ASK, "max_output_tokens": 60, "store": False, "parallel_tool_calls": False,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "a", "reasoning": {"summary": "auto"},
        "tools": [*FLAT, {"type": "custom", "name": "apply_patch"}, {"type": "web_search"}],
    }  # fmt: skip
    raw = client.responses.with_raw_response.create(**body, tool_choice="required")
    assert "web_search" in raw.headers["x-ignored-fields"]
    (call,) = raw.parse().output
    assert call.type == "function_call"
    events = list(client.responses.create(**body, tool_choice="required", stream=True))
    assert events[-1].type == "response.completed"
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sun."}
    more = body | {"input": [*ASK, call, output], "tool_choice": "none"}
    with client.responses.stream(**more) as stream:
        assert stream.get_final_response().output[0].type == "message"


def test_vllms_extra_request_fields_have_an_effect(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "demo", "prompt": "1 2 3 4", "max_tokens": 6}

    def said(**more: Any) -> str:
        return str(client.completions.create(**body, extra_body=more).choices[0].text)

    plain = said()
    assert "5" in plain
    assert "5" not in said(bad_words=[" 5"])
    assert said(stop=["6"], include_stop_str_in_output=True).endswith("6")
    assert json.loads(said(structured_outputs={"choice": ["7", "8"]})) in (7, 8)
    assert said(min_tokens=6, top_k=1, min_p=0.1, repetition_penalty=1.0, ignore_eos=True) == plain
    short = client.completions.create(**body, extra_body={"truncate_prompt_tokens": 2})
    assert short.usage.prompt_tokens == 2
    with_special = chat(client, max_tokens=60, extra_body={"skip_special_tokens": False})
    assert with_special.choices[0].finish_reason in ("stop", "length")


def test_head_requests_trailing_slashes_probes_and_key_headers_are_accepted(http: httpx.Client) -> None:
    for path in ("/v1/models", "/health", "/metrics", "/ping", "/version"):
        answer = http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
    body = {"model": "demo", "messages": ASK, "max_tokens": 1}
    assert http.post("/v1/chat/completions/", json=body).status_code == 200
    assert http.get("/v1/models/").status_code == 200
    for name in ("x-api-key", "api-key"):
        assert http.get("/v1/models", headers={name: "none"}).status_code == 200
