"""The anthropic package: messages, tools, streaming, thinking, count_tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message
from conversations import reasoning
from serving import PATIENCE
from toolcalls import ASK, CLOCK, WEATHER

TOOLS: list[Any] = [
    {"name": tool["name"], "input_schema": tool["parameters"]}
    for tool in (WEATHER["function"], CLOCK["function"])
]
BODY: dict[str, Any] = {"model": "demo", "max_tokens": 60, "messages": ASK, "system": "Be brief."}
BODY |= {"extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as made:
        yield made


def test_anthropic_client_gets_the_same_message_whole_and_streamed(client: anthropic.Anthropic) -> None:
    raw = client.messages.with_raw_response.create(**BODY)
    message = Message.model_validate_json(raw.http_response.content, strict=True)
    with client.messages.stream(**BODY) as stream:
        text = "".join(stream.text_stream)
        assert text == message.content[0].text
        assert stream.get_final_message().usage.output_tokens == message.usage.output_tokens
    counted = client.messages.count_tokens(**{name: BODY[name] for name in ("model", "messages", "system")})
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=str)
def test_anthropic_client_sends_the_result_of_a_forced_tool_use_back(
    client: anthropic.Anthropic, choice: Any
) -> None:
    more = {"tools": TOOLS, "tool_choice": choice | {"disable_parallel_tool_use": True}}
    message = client.messages.create(**BODY, **more)
    (used,) = message.content
    assert (used.type, message.stop_reason) == ("tool_use", "tool_use")
    with client.messages.stream(**BODY, **more) as stream:
        assert stream.get_final_message().content[0].input == used.input
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "Sun."}
    turns = [*ASK, message.to_param(), {"role": "user", "content": [result]}]
    assert client.messages.create(**BODY | {"messages": turns, "tools": TOOLS}).content


def test_anthropic_client_gets_a_tool_use_that_the_model_chose(client: anthropic.Anthropic) -> None:
    turns: list[Any] = []
    for number, city in enumerate(("Oslo", "Paris", "Oslo", "Paris")):
        turns.append({"role": "user", "content": f"What is the weather in {city}?"})
        used = {
            "type": "tool_use",
            "id": f"call_{number}",
            "name": "get_weather",
            "input": {"city": city, "days": 1},
        }
        turns.append({"role": "assistant", "content": [used]})
    body = {"model": "demo", "max_tokens": 60, "messages": turns[:-1], "tools": TOOLS[:1]}
    message = client.messages.create(**body)
    assert (message.stop_reason, message.content[-1].input) == ("tool_use", {"city": "Paris", "days": 1})


def test_anthropic_client_gets_reasoning_as_a_thinking_block(client: anthropic.Anthropic) -> None:
    body = BODY | {"messages": reasoning(), "system": anthropic.omit, "thinking": {"type": "adaptive"}}
    with client.messages.stream(**body) as stream:
        streamed = stream.get_final_message()
    for message in (client.messages.create(**body), streamed):
        thought, said = message.content
        assert thought.thinking.strip() == "They want a bird."
        assert said.type == "text"


def test_anthropic_client_raises_its_own_error_classes(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**BODY | {"model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**BODY | {"messages": [{"role": "user", "content": "a " * 5000}]})
