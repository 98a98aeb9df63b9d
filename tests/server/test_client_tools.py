"""Tool calls as common clients request them, on the hf engine with the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import instructor
import openai
import pydantic
import pytest
from serving import PATIENCE, serving
from toolcalls import ASK, WEATHER

FLAGS = ["--max-model-len", "1024", "--kv-cache-memory-bytes", "128MiB", "--max-num-seqs", "8"]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": {"type": "object", "properties": {"yes": {"type": "boolean"}}}},
}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """Return a client of the demo model as it is started without any option for tools."""
    with (
        serving("demo", "--backend", "hf", *FLAGS) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as client,
    ):
        yield client


def body(**more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": ASK, "max_tokens": 60, "temperature": 0, "tools": [WEATHER]} | more


def message(http: httpx.Client, **more: Any) -> dict[str, Any]:
    answer = http.post("/v1/chat/completions", json=body(**more))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]["message"]
    return found


@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
def test_forced_tool_call_takes_precedence_over_response_format(http: httpx.Client, choice: Any) -> None:
    found = message(http, tool_choice=choice, response_format=FORMAT)
    assert [call["function"]["name"] for call in found["tool_calls"]] == ["get_weather"]
    flat = {"type": "function", **WEATHER["function"]}
    form = {"type": "json_schema", "name": "answer", "schema": FORMAT["json_schema"]["schema"]}
    answer = http.post(
        "/v1/responses",
        json={
            "model": "demo", "input": ASK, "max_output_tokens": 60, "temperature": 0, "tools": [flat],
            "tool_choice": choice if isinstance(choice, str) else {"type": "function", "name": "get_weather"},
            "text": {"format": form},
        },
    )  # fmt: skip
    assert [item["type"] for item in answer.raise_for_status().json()["output"]] == ["function_call"]


def test_response_format_applies_to_an_answer_without_a_tool_call(http: httpx.Client) -> None:
    found = message(http, tool_choice="none", response_format=FORMAT)
    assert found["content"].startswith("{")
    assert "tool_calls" not in found


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}])
def test_tool_without_parameters_is_called_with_an_empty_object(http: httpx.Client, parameters: Any) -> None:
    function = {"name": "list_ships"} | ({} if parameters is None else {"parameters": parameters})
    tools = [{"type": "function", "function": function}]
    for choice in ("required", {"type": "function", "function": {"name": "list_ships"}}):
        found = message(http, tools=tools, tool_choice=choice, parallel_tool_calls=False, temperature=1, seed=7)
        (call,) = found["tool_calls"]
        assert call["function"] == {"name": "list_ships", "arguments": "{}"}


CLOCK = {"type": "function", "function": {"name": "get_time"}}


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_allowed_tools_choice_restricts_the_called_tools(http: httpx.Client, mode: str) -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [CLOCK]}}
    flat = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]
    response = {
        "model": "demo", "input": ASK, "max_output_tokens": 60, "tools": flat,
        "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": flat[1:]},
    }  # fmt: skip
    answer = http.post("/v1/chat/completions", json=body(tools=[WEATHER, CLOCK], tool_choice=allowed))
    other = http.post("/v1/responses", json=response)
    if mode == "auto":  # this server has no tool parser
        assert answer.json()["error"]["param"] == other.json()["error"]["param"] == "tools"
        return
    calls = answer.raise_for_status().json()["choices"][0]["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"get_time"}
    items = other.raise_for_status().json()
    assert {item["name"] for item in items["output"]} == {"get_time"}
    assert items["tool_choice"]["type"] == "allowed_tools"
    unknown = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}
    refused = http.post("/v1/chat/completions", json=body(tools=[CLOCK], tool_choice=unknown))
    assert "get_weather is not among the tools" in refused.json()["error"]["message"]


def test_streamed_forced_tool_call_contains_no_empty_text(http: httpx.Client) -> None:
    for more in ({}, {"logprobs": True}):
        text = http.post("/v1/chat/completions", json=body(tool_choice=NAMED, stream=True, **more)).text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
        assert deltas[0] == {"role": "assistant", "content": None, "refusal": None}
        assert all(delta.get("content") is None for delta in deltas)
        assert any("tool_calls" in delta for delta in deltas)


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Oslo"]


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "RESPONSES_TOOLS", "ANTHROPIC_TOOLS"])
def test_instructor_gets_its_pydantic_model_by_a_forced_tool_call(http: httpx.Client, mode: str) -> None:
    url, more = str(http.base_url), {"max_output_tokens" if mode == "RESPONSES_TOOLS" else "max_tokens": 60}
    made: Any
    if mode == "ANTHROPIC_TOOLS":
        made = instructor.from_anthropic(
            anthropic.Anthropic(base_url=url, api_key="none", max_retries=0), instructor.Mode.ANTHROPIC_TOOLS
        )
    else:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        made = instructor.from_openai(client, mode=instructor.Mode[mode])
        more |= {"temperature": 0}
    found = made.chat.completions.create(
        model="demo", messages=ASK, response_model=Weather, max_retries=0, **more
    )
    assert isinstance(found, Weather)


def test_openai_client_parses_a_response_format_beside_a_forced_tool_call(http: httpx.Client) -> None:
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)
    flat = {"type": "function", "strict": True, **WEATHER["function"]}
    answer = client.responses.parse(
        model="demo", input="Paris?", text_format=Weather, max_output_tokens=60, tools=[flat],
        tool_choice="required",
    )  # fmt: skip
    assert {item.type for item in answer.output} == {"function_call"}
