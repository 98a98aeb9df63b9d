"""Libraries on top of openai's client: litellm, langchain-openai, dspy, instructor, the Agents SDK."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest
from conversations import calling, reasoning
from pydantic import BaseModel
from toolcalls import ASK, CLOCK, WEATHER


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Oslo"]


# -- litellm -------------------------------------------------------------------------------------------------


def test_litellm_client_calls_tools_and_streams_answers(url: str) -> None:
    import litellm

    same: dict[str, Any] = {
        "model": "hosted_vllm/demo",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "max_tokens": 60,
    }
    message = litellm.completion(messages=calling(), tools=[WEATHER], **same).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, message.content) == ("get_weather", None)
    stop = [f"never {number}" for number in range(8)]
    parts = list(litellm.completion(messages=calling(), tools=[WEATHER], stop=stop, stream=True, **same))
    whole = litellm.stream_chunk_builder(parts).choices[0].message
    assert whole.tool_calls[0].function.arguments == call.function.arguments
    thought = litellm.completion(messages=reasoning(), **same).choices[0].message
    assert thought.reasoning_content.strip() == "They want a bird."
    form = litellm.completion(
        messages=ASK, response_format=Weather, tools=[WEATHER], tool_choice="required", **same
    )
    assert form.choices[0].message.tool_calls
    assert Weather.model_validate_json(
        litellm.completion(messages=ASK, response_format=Weather, **same).choices[0].message.content
    )
    response = litellm.responses(
        model="openai/demo", input="hello", api_base=f"{url}/v1", api_key="none", max_output_tokens=16
    )
    assert 0 < response.usage.output_tokens <= 16
    message = litellm.completion(
        model="anthropic/demo", api_base=url, api_key="none", messages=ASK, max_tokens=60,
        tools=[WEATHER], tool_choice="required",
    ).choices[0].message  # fmt: skip
    assert message.tool_calls[0].function.name == "get_weather"
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=ASK, **same | {"max_tokens": 10**6})


# -- langchain-openai ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain_calls_tools_and_sends_their_results_back(url: str, responses: bool) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="demo", base_url=f"{url}/v1", api_key="none", max_tokens=60, max_retries=0,
        use_responses_api=responses,
    )  # fmt: skip
    forced = model.bind_tools([WEATHER, CLOCK], tool_choice="get_weather").invoke("The weather in Paris?")
    assert [call["name"] for call in forced.tool_calls] == ["get_weather"]
    back = [("user", "The weather?"), forced, ("tool", "Sun.", forced.tool_calls[0]["id"])]
    back[-1] = {"role": "tool", "content": "Sun.", "tool_call_id": forced.tool_calls[0]["id"]}
    assert model.invoke(back).content is not None
    pieces = list(model.bind_tools([WEATHER], tool_choice="any", parallel_tool_calls=False).stream("Paris?"))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert [call["name"] for call in whole.tool_calls] == ["get_weather"]
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Weather, method=method).invoke("Paris?"), Weather)


# -- dspy ----------------------------------------------------------------------------------------------------


def test_dspy_completes_and_parses_a_json_schema(url: str) -> None:
    import dspy

    lm = dspy.LM("openai/demo", api_base=f"{url}/v1", api_key="none", max_tokens=60, cache=False, num_retries=0)
    assert lm("Say hi.")

    schema = {"name": "where", "schema": Weather.model_json_schema()}
    form = {"response_format": {"type": "json_schema", "json_schema": schema}}
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        where = dspy.Predict(dspy.Signature("question -> city"))
        assert where(question="Where is the Eiffel tower?", config=form).city in ("Paris", "Oslo")


# -- instructor ----------------------------------------------------------------------------------------------

MODES = ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"]


@pytest.mark.parametrize("mode", MODES)
def test_instructor_returns_a_pydantic_model_in_every_mode(url: str, mode: str) -> None:
    import instructor

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    made: Any = instructor.from_openai(client, mode=instructor.Mode[mode])
    more: dict[str, Any] = {"max_output_tokens" if mode == "RESPONSES_TOOLS" else "max_tokens": 60}
    more |= {"model": "demo", "messages": ASK, "max_retries": 0}
    assert isinstance(made.chat.completions.create(response_model=Weather, **more), Weather)


# -- Agents SDK ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_openai_agents_sdk_calls_a_tool_although_an_output_type_is_set(url: str, kind: str) -> None:
    import agents

    asked: list[str] = []

    @agents.function_tool
    def get_weather(city: Literal["Paris", "Oslo"]) -> str:
        """Return the weather of a city."""
        asked.append(city)
        return "Sun."

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    made = agents.OpenAIChatCompletionsModel if kind == "chat" else agents.OpenAIResponsesModel
    agent: Any = agents.Agent(
        "weather", instructions="Be brief.", tools=[get_weather], output_type=Weather,
        model=made("demo", openai_client=client), tool_use_behavior="stop_on_first_tool",
        model_settings=agents.ModelSettings(tool_choice="required", max_tokens=60, parallel_tool_calls=False),
    )  # fmt: skip
    assert agents.Runner.run_sync(agent, "What is the weather in Paris?").final_output == "Sun."
    assert asked
    agent.model_settings = agents.ModelSettings(tool_choice="none", max_tokens=60)
    result = agents.Runner.run_sync(agent, "What is the weather in Paris?")
    assert isinstance(result.final_output, Weather)
