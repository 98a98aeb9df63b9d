"""Answers come back as they are: every client of the tests sends what it got as messages of the next turn.

The engine says one text, or one call where a call is forced, and keeps the prompts it was asked: whatever form
a client has of an answer, the model is shown the same conversation.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import instructor
import openai
import pydantic
import pytest
import pytest_asyncio
from openai.types.responses import ResponseOutputMessage, ResponseOutputRefusal
from serving import PATIENCE
from toolcalls import ASK, TEMPLATE, WEATHER

from tonnage.server.engines.base import Capabilities
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.engines.request import BASIC_PARAMS, GenerationRequest
from tonnage.server.text.chat_template import ChatTemplate
from tonnage.server.text.tokenizer import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SAID, ARGUMENTS, RESULT = "It is mild.", {"city": "Paris", "days": 1}, "mild"
THEN = {"role": "user", "content": "And then?"}
FORCED = {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
FLAT_TOOL = {"type": "function", "strict": None, **WEATHER["function"]}
FLAT_FORCED = {"tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "get_weather"}}
CALL = {"function": {"name": "get_weather", "arguments": ARGUMENTS}}
TEXT_TURN = [*ASK, {"role": "assistant", "content": SAID}, THEN]
CALL_TURN = [
    *ASK,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": RESULT},
]


class Scripted(FakeEngine):
    """Says SAID, or ARGUMENTS to a grammar, unless ``script`` has something else to say first."""

    def __init__(self, plan: Any, tokenizer: Tokenizer) -> None:
        super().__init__(plan, reply=self._next_words)
        self.script: list[str] = []
        self.prompts: list[tuple[int, ...]] = []
        self._tokenizer = tokenizer

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(honours=BASIC_PARAMS | {"grammar"})

    def _next_words(self, request: GenerationRequest, index: int) -> Iterator[int]:
        self.prompts.append(request.prompt_token_ids)
        said = json.dumps(ARGUMENTS) if request.params.grammar else SAID
        text = self.script.pop(0) if self.script else said
        return iter(self._tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True)
class Served:
    url: str
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    engine: Scripted
    tokenizer: Tokenizer

    def shows(self, messages: list[dict[str, Any]]) -> tuple[int, ...]:
        """Return the prompt tokens of a conversation as the engine receives them."""
        text = ChatTemplate(TEMPLATE).render(messages)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = await self.http.post(path, json={"model": "demo", **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        response = await self.http.post(path, json={"model": "demo", "stream": True, **body})
        assert response.status_code == 200, response.text
        return [
            json.loads(line.removeprefix("data: "))
            for line in response.text.splitlines()
            if line.startswith("data: {")
        ]

    def check(self, turn: list[dict[str, Any]]) -> None:
        """Check that the engine's last prompt was the conversation ``turn``."""
        assert self.engine.prompts[-1] == self.shows(turn)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(run_server, small_plan, tokenizer, tmp_path_factory) -> AsyncIterator[Served]:
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    engine = Scripted(small_plan(), tokenizer)
    async with run_server(engine, chat_template=template) as server:
        yield Served(server.url, server.http, server.openai, engine, tokenizer)


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a message joined from its deltas, with all of their fields."""
    message: dict[str, Any] = {}
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        for call in delta.pop("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append(call)
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        content = (message.get("content") or "") + (delta.pop("content", None) or "")
        message |= delta | {"content": content}
    return message


async def test_messages_received_over_http_can_be_sent_back_in_the_next_request(served: Served) -> None:
    """Bodies as they are, and messages joined from the deltas of a stream."""
    whole = (await served.post(CHAT, messages=ASK))["choices"][0]["message"]
    for said in (whole, joined(await served.events(CHAT, messages=ASK))):
        assert said["content"] == SAID
        await served.post(CHAT, messages=[*ASK, said, THEN])
        served.check(TEXT_TURN)
    whole = (await served.post(CHAT, messages=ASK, **FORCED))["choices"][0]["message"]
    for called in (whole, joined(await served.events(CHAT, messages=ASK, **FORCED))):
        result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": RESULT}
        await served.post(CHAT, messages=[*ASK, called, result])
        served.check(CALL_TURN)
    answer = await served.post(RESPONSES, input=ASK)
    stream = await served.events(RESPONSES, input=ASK)
    done = [event["item"] for event in stream if event["type"] == "response.output_item.done"]
    for items in (answer["output"], stream[-1]["response"]["output"], done):
        await served.post(RESPONSES, input=[*ASK, *items, THEN])
        served.check(TEXT_TURN)
    answer = await served.post(RESPONSES, input=ASK, **FLAT_FORCED)
    stream = await served.events(RESPONSES, input=ASK, **FLAT_FORCED)
    for items in (answer["output"], stream[-1]["response"]["output"]):
        result = {"type": "function_call_output", "call_id": items[0]["call_id"], "output": RESULT}
        await served.post(RESPONSES, input=[*ASK, *items, result])
        served.check(CALL_TURN)


class Weather(pydantic.BaseModel):
    city: Literal["Paris", "Oslo"]
    days: int


def forms(answer: pydantic.BaseModel) -> list[Any]:
    """Return the forms in which users send an object of openai's types back: the object and its dicts."""
    return [
        answer,
        answer.model_dump(),
        answer.model_dump(mode="json", exclude_unset=True),
        json.loads(answer.model_dump_json()),
        answer.to_dict(),  # type: ignore[attr-defined]
    ]


async def test_openai_clients_chat_messages_can_be_sent_back_in_the_next_request(served: Served) -> None:
    chat = served.openai.chat.completions
    same: dict[str, Any] = {"model": "demo", "messages": ASK}
    async with chat.stream(**same) as stream:
        streamed = await stream.get_final_completion()
    for answer in (await chat.create(**same), await chat.parse(**same), streamed):
        for said in forms(answer.choices[0].message):
            await chat.create(model="demo", messages=[*ASK, said, THEN])
            served.check(TEXT_TURN)
    parsed = await chat.parse(**same, response_format=Weather)
    assert parsed.choices[0].message.parsed == Weather(**ARGUMENTS)
    async with chat.stream(**same, response_format=Weather) as stream:
        streamed = await stream.get_final_completion()
    for answer in (parsed, streamed):
        for said in forms(answer.choices[0].message):
            await chat.create(model="demo", messages=[*ASK, said, THEN])
            served.check([*ASK, {"role": "assistant", "content": json.dumps(ARGUMENTS)}, THEN])
    strict = same | FORCED | {"tools": [openai.pydantic_function_tool(Weather, name="get_weather")]}
    async with chat.stream(**strict) as stream:
        streamed = await stream.get_final_completion()
    for answer in (await chat.create(**same, **FORCED), await chat.parse(**strict), streamed):
        for called in forms(answer.choices[0].message):
            call_id = answer.choices[0].message.tool_calls[0].id
            result = {"role": "tool", "tool_call_id": call_id, "content": RESULT}
            await chat.create(model="demo", messages=[*ASK, called, result])
            served.check(CALL_TURN)


async def test_openai_clients_response_items_can_be_sent_back_in_the_next_request(served: Served) -> None:
    responses = served.openai.responses
    same: dict[str, Any] = {"model": "demo", "input": ASK}
    async with responses.stream(**same) as stream:
        streamed = await stream.get_final_response()
    for answer in (await responses.create(**same), await responses.parse(**same), streamed):
        for said in forms(answer.output[0]):
            await responses.create(model="demo", input=[*ASK, said, THEN])
            served.check(TEXT_TURN)
    strict = same | FLAT_FORCED | {"tools": [FLAT_TOOL | {"strict": True}]}
    async with responses.stream(**strict) as stream:
        streamed = await stream.get_final_response()
    for answer in (await responses.create(**same, **FLAT_FORCED), await responses.parse(**strict), streamed):
        for called in forms(answer.output[0]):
            result = {"type": "function_call_output", "call_id": answer.output[0].call_id, "output": RESULT}
            await responses.create(model="demo", input=[*ASK, called, result])
            served.check(CALL_TURN)


async def test_assistant_messages_of_other_servers_are_accepted(served: Served) -> None:
    """A conversation that began elsewhere: with reasoning, in vLLM's and OpenAI's forms, or with a refusal."""
    thought = "It says mild."
    turn = [*ASK, {"role": "assistant", "content": SAID, "reasoning_content": thought}, THEN]
    for name in ("reasoning", "reasoning_content"):
        said = {"role": "assistant", "content": SAID, name: thought, "tool_calls": []}
        await served.post(CHAT, messages=[*ASK, said, THEN])
        served.check(turn)
        await served.post(CHAT, messages=[*ASK, said | {name: None}, THEN])
        served.check(TEXT_TURN)
        refused = await served.http.post(CHAT, json={"model": "demo", "messages": [ASK[0] | {name: thought}]})
        assert refused.json()["error"]["param"] == f"messages.0.{name}"
    reasoning = {
        "id": "rs_1", "type": "reasoning", "summary": [{"type": "summary_text", "text": "A summary."}],
        "content": [{"type": "reasoning_text", "text": thought}], "encrypted_content": None, "status": None,
    }  # fmt: skip
    message = {"role": "assistant", "content": SAID}
    await served.post(RESPONSES, input=[*ASK, reasoning, message, THEN])
    served.check(turn)
    await served.post(RESPONSES, input=[*ASK, reasoning | {"content": None}, message, THEN])
    served.check(TEXT_TURN)
    call = {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
    result = {"type": "function_call_output", "call_id": "1", "output": RESULT}
    await served.post(RESPONSES, input=[*ASK, reasoning, call, result])
    served.check([ASK[0], CALL_TURN[1] | {"reasoning_content": thought}, CALL_TURN[2]])
    body = {"model": "demo", "input": [*ASK, reasoning | {"encrypted_content": "x"}, message]}
    refused = await served.http.post(RESPONSES, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    refusal = ResponseOutputMessage(
        id="msg_1", type="message", role="assistant", status="completed",
        content=[ResponseOutputRefusal(type="refusal", refusal=SAID)],
    )  # fmt: skip
    for said in forms(refusal):
        await served.openai.responses.create(model="demo", input=[*ASK, said, THEN])
        served.check(TEXT_TURN)
    user = {"role": "user", "content": [{"type": "refusal", "refusal": SAID}]}
    body = {"model": "demo", "input": [user]}
    assert (await served.http.post(RESPONSES, json=body)).json()["error"]["param"] == "input.0.content"


@pytest.mark.parametrize("version", ["chat", "v0", "responses/v1", "v1"])
async def test_langchain_messages_can_be_sent_back_in_the_next_request(served: Served, version: str) -> None:
    """``version``: its own form of messages; all but "chat" go through /v1/responses."""
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is in the dev extra")
    own = {} if version == "chat" else {"use_responses_api": True, "output_version": version}
    model = langchain.ChatOpenAI(
        model="demo", base_url=f"{served.url}/v1", api_key="none", max_retries=0, **own
    )
    ask, then = ("user", ASK[0]["content"]), ("user", THEN["content"])

    async def streamed(which: Any) -> Any:
        parts = [part async for part in which.astream([ask])]
        return sum(parts[1:], start=parts[0])

    for said in (await model.ainvoke([ask]), await streamed(model)):
        await model.ainvoke([ask, said, then])
        served.check(TEXT_TURN)
    caller = model.bind_tools([WEATHER], tool_choice="get_weather")
    for called in (await caller.ainvoke([ask]), await streamed(caller)):
        (call,) = called.tool_calls
        assert call["args"] == ARGUMENTS
        result = {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
        await model.ainvoke([ask, called, result])
        served.check(CALL_TURN)


LITELLM = """
import json, sys
import litellm
litellm.suppress_debug_info = True
url, ask, then, forced, flat, result = json.loads(sys.argv[1])
for provider in ("hosted_vllm", "openai"):
    same = {"model": provider + "/demo", "api_base": url, "api_key": "none", "max_retries": 0}
    def chat(messages, **more):
        whole = litellm.completion(messages=messages, **same, **more).choices[0].message
        parts = list(litellm.completion(messages=messages, stream=True, **same, **more))
        built = litellm.stream_chunk_builder(parts, messages=messages).choices[0].message
        return [form for said in (whole, built) for form in (said, said.model_dump(), said.json())]
    for said in chat(ask):
        litellm.completion(messages=[*ask, said, then], **same)
        print("text")
    for called in chat(ask, **forced):
        calls = called["tool_calls"]
        output = {"role": "tool", "tool_call_id": calls[0]["id"], "content": result}
        litellm.completion(messages=[*ask, called, output], **same)
        print("call")
same["model"] = "openai/demo"
for said in litellm.responses(input=ask, **same).output:
    for form in (said, said.model_dump()):
        litellm.responses(input=[*ask, form, then], **same)
        print("text")
for called in litellm.responses(input=ask, **flat, **same).output:
    output = {"type": "function_call_output", "call_id": called.call_id, "output": result}
    for form in (called, called.model_dump()):
        litellm.responses(input=[*ask, form, output], **same)
        print("call")
"""


async def test_litellm_messages_can_be_sent_back_in_the_next_request(served: Served) -> None:
    """In a process of its own: it is imported with a price list for the whole world."""
    asked = [f"{served.url}/v1", ASK, THEN, FORCED, FLAT_FORCED, RESULT]
    before = len(served.engine.prompts)
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", LITELLM, json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = done.stdout.split()
    assert (told.count("text"), told.count("call")) == (14, 14)
    turns = {"text": served.shows(TEXT_TURN), "call": served.shows(CALL_TURN)}
    shown = [prompt for prompt in served.engine.prompts[before:] if prompt in turns.values()]
    assert shown == [turns[each] for each in told]


async def test_instructor_sends_an_invalid_tool_call_back_when_it_retries(served: Served) -> None:
    """It sends a call that it could not read back, with what was wrong."""
    client = instructor.from_openai(served.openai, mode=instructor.Mode.TOOLS)
    wrong = {"city": "Rome", "days": 1}
    served.engine.script = [json.dumps(wrong)]
    weather, answer = await client.chat.completions.create_with_completion(
        model="demo", messages=ASK, response_model=Weather, max_retries=1
    )
    assert weather.model_dump() == ARGUMENTS
    again = served.tokenizer.decode(list(served.engine.prompts[-1]))
    assert again.index(json.dumps(wrong)) < again.index("\ntool\n") < again.index("validation error")
    call_id = answer.choices[0].message.tool_calls[0].id
    for called in forms(answer.choices[0].message):
        result = {"role": "tool", "tool_call_id": call_id, "content": RESULT}
        await served.openai.chat.completions.create(model="demo", messages=[*ASK, called, result])
        call = {"function": {"name": "Weather", "arguments": ARGUMENTS}}
        served.check([ASK[0], CALL_TURN[1] | {"tool_calls": [call]}, CALL_TURN[2]])
