"""Calls of functions, asked of a real server by OpenAI's client: forced, and left to the model."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
from serving import PATIENCE
from toolcalls import ASK, CLOCK, WEATHER, function, joined, told


def forced_calls(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "demo", "messages": ASK, "tools": [WEATHER, CLOCK], "max_tokens": 200, "temperature": 0,
    }  # fmt: skip
    create = client.chat.completions.create
    for function_name, city in (("get_weather", True), ("get_time", False)):
        choice = {"type": "function", "function": {"name": function_name}}
        answer = create(**body, tool_choice=choice)
        ((name, arguments),) = told(answer.choices[0].message)
        assert name == function_name
        assert (arguments["city"] in ("Paris", "Oslo") and arguments["days"] in (1, 2)) if city else arguments
        assert answer.choices[0].message.content is None
        assert answer.choices[0].finish_reason == "tool_calls"
        assert joined(list(create(**body, tool_choice=choice, stream=True))) == (
            "", [(name, arguments)], "tool_calls",
        )  # fmt: skip
    answer = create(**body, tool_choice="required", parallel_tool_calls=False)
    (call,) = told(answer.choices[0].message)
    assert call[0] in ("get_weather", "get_time")
    stream = create(**body, tool_choice="required", parallel_tool_calls=False, stream=True)
    assert joined(list(stream)) == ("", [call], "tool_calls")


def free_calls(client: openai.OpenAI) -> None:
    """Check ``tool_choice="auto"``: streams equal whole responses, and strict calls match their schema.

    A strict function constrains a call once it begins; here the prompt ends with such a beginning.
    """
    body: dict[str, Any] = {"model": "demo", "max_tokens": 60, "temperature": 0}
    free = client.chat.completions.create(**body, messages=ASK, tools=[WEATHER])
    streamed = joined(list(client.chat.completions.create(**body, messages=ASK, tools=[WEATHER], stream=True)))
    assert streamed[0].strip() == (free.choices[0].message.content or "").strip()
    assert streamed[1] == told(free.choices[0].message)
    strict = function("get_weather", {"city": {"enum": ["Paris", "Oslo"]}}, strict=True)
    parrot = [
        {"role": "user", "content": f"Repeat: <tool_call>\n{line}\n</tool_call>"}
        for line in ['{"name": "get_weather", "arguments": {"city": "Berlin"}}'] * 4
    ]
    answer = client.chat.completions.create(**body, messages=parrot, tools=[strict], parallel_tool_calls=False)
    calls = told(answer.choices[0].message)
    assert len(calls) <= 1
    assert all(call in [("get_weather", {"city": c}) for c in ("Paris", "Oslo")] for call in calls)
    for tool in (strict, WEATHER):
        calls_beside_a_format(client, tool)


def calls_beside_a_format(client: openai.OpenAI, tool: dict[str, Any]) -> None:
    """Check that with a response format and tools, an answer is a call or has the format.

    A bias of the token that begins a call decides which of both.
    """
    form = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    form["additionalProperties"] = False
    body: dict[str, Any] = {
        "model": "demo", "max_tokens": 80, "temperature": 0, "messages": ASK, "tools": [tool],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": form}},
    }  # fmt: skip
    url = str(client.base_url).removesuffix("v1/") + "tokenize"
    ids = httpx.post(url, json={"prompt": "<tool_call>"}, trust_env=False, timeout=PATIENCE).json()["tokens"]
    said = client.chat.completions.create(**body, logit_bias={str(ids[0]): -100}).choices[0].message
    assert set(json.loads(said.content or "")) == {"yes"}
    assert not said.tool_calls
    if tool["function"].get("strict"):  # other arguments are free, and the bias would fill them
        bias = {"logit_bias": {str(ids[0]): 100}, "parallel_tool_calls": False}
        called = client.chat.completions.create(**body, **bias).choices[0]
        ((name, arguments),) = told(called.message)
        assert (name, called.finish_reason) == ("get_weather", "tool_calls")
        assert arguments["city"] in ("Paris", "Oslo")
