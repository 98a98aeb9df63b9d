"""Reasoning: found by vLLM's parsers in answers of any engine, and the effort that reaches chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anthropic
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from toolcalls import ASK, WEATHER, joined, told

from tonnage.planner.deployment import Deployment
from tonnage.planner.planning.build import make_plan
from tonnage.planner.plans import Plan
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.text.tokenizer import Tokenizer

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (extra vllm)")

THOUGHT, SAID = "They ask for Paris. 日本?", "It is Paris."
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 1}}\n</tool_call>'
# As Qwen3's: reasoning that is switched off is an empty block in the prompt; R1's template opens the block.
QWEN = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[-1].content }}\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
R1 = "{{ messages[-1].content }}<think>\n"


@pytest.fixture(scope="module")
def model(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model whose tokenizer has the tokens <think> and </think>, as Qwen3's has."""
    folder = tmp_path_factory.mktemp("thinks")
    for file in tokenizer_folder.iterdir():
        (folder / file.name).symlink_to(file)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        (folder / name).unlink()
        text = text.replace("<repo_name>", "<think>").replace("<reponame>", "</think>")
        (folder / name).write_text(text)
    document = json.loads((folder / "tokenizer.json").read_text())
    for token in document["added_tokens"]:
        token["special"] = token["special"] and "think" not in token["content"]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


@pytest.fixture(scope="module")
def plan(model: Path) -> Plan:
    pool = 256 * 16 * 30 * 2 * 3 * 64 * 2
    return make_plan(str(model), Deployment(
        device_memory=8 * 2**30, kv_cache_memory_bytes=pool, block_size=16, max_model_len=2048, max_num_seqs=8
    ))  # fmt: skip


@pytest.fixture
def saying(run_server, plan: Plan, model: Path, tmp_path: Path) -> Callable[..., Any]:
    """Return ``saying(text, template, **flags)``: a server whose model says ``text``."""
    tokenizer = Tokenizer.from_folder(model)

    def made(text: str, template: str = QWEN, **flags: Any) -> Any:
        file = tmp_path / "template.jinja"
        file.write_text(template)
        ids = tokenizer.encode(text, add_special_tokens=False)
        engine = FakeEngine(plan, reply=lambda request, index: iter(ids))
        flags = {"reasoning_parser": "qwen3", "chat_template": file} | flags
        return run_server(engine, tokenizer=tokenizer, **flags)

    return made


def thought_of(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(
        (c.choices[0].delta.model_extra or {}).get("reasoning_content") or "" for c in chunks if c.choices
    )


@needs_vllm
@pytest.mark.parametrize(
    ("parser", "template", "text"),
    [
        ("qwen3", QWEN, f"<think>{THOUGHT}</think>{SAID}"),
        ("deepseek_r1", QWEN, f"<think>{THOUGHT}</think>{SAID}"),
        ("deepseek_r1", R1, f"{THOUGHT}</think>{SAID}"),
    ],
)
async def test_chat_completion_returns_reasoning_separately_from_the_content(
    saying, model, parser: str, template: str, text: str
) -> None:
    count = len(Tokenizer.from_folder(model).encode(text.partition(SAID)[0], add_special_tokens=False))
    body: dict[str, Any] = {"model": "demo", "messages": ASK, "max_tokens": 200}
    async with saying(text, template, reasoning_parser=parser) as server:
        raw = await server.http.post("/v1/chat/completions", json=body | {"n": 2})
        ChatCompletion.model_validate_json(raw.content, strict=True)
        for choice in raw.json()["choices"]:
            assert choice["message"]["reasoning_content"] == THOUGHT
            assert choice["message"]["content"].strip() == SAID
        details = raw.json()["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": 2 * count}
        stream = await server.openai.chat.completions.create(
            **body, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert thought_of(chunks) == THOUGHT
        assert joined(chunks)[0].strip() == SAID
        assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == count
        # Cut off within the reasoning: no content.
        cut = (await server.http.post("/v1/chat/completions", json=body | {"max_tokens": 4})).json()
        message = cut["choices"][0]["message"]
        assert (message["content"], cut["choices"][0]["finish_reason"]) == (None, "length")
        assert THOUGHT.startswith(message["reasoning_content"].strip())
        # An answer goes back as it came.
        sent = [*ASK, raw.json()["choices"][0]["message"], *ASK]
        assert (
            await server.http.post("/v1/chat/completions", json=body | {"messages": sent})
        ).status_code == 200


@needs_vllm
@pytest.mark.parametrize(
    ("parser", "before", "between"),
    [
        ("granite", "Here is my thought process:", "Here is my response:"),
        ("olmo3", "<think>", "</think>"),
    ],
)
async def test_reasoning_tokens_are_counted_for_parsers_that_find_reasoning_by_its_text(
    saying, model, parser: str, before: str, between: str
) -> None:
    """These parsers compare the text, and do not know which tokens are content."""
    body: dict[str, Any] = {"model": "demo", "messages": ASK, "max_tokens": 200}
    usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    count = len(Tokenizer.from_folder(model).encode(before + THOUGHT, add_special_tokens=False))
    text = f"{before}{THOUGHT}{between}{SAID}"
    async with saying(text, "{{ messages[-1].content }}", reasoning_parser=parser) as server:
        answer = await server.openai.chat.completions.create(**body)
        message = answer.choices[0].message
        assert message.model_extra["reasoning_content"].strip() == THOUGHT
        assert message.content.strip() == SAID
        chunks = [chunk async for chunk in await server.openai.chat.completions.create(**body | usage)]
        assert (thought_of(chunks).strip(), joined(chunks)[0].strip()) == (THOUGHT, SAID)
        for counted in (answer.usage, chunks[-1].usage):
            assert abs(counted.completion_tokens_details.reasoning_tokens - count) <= 1  # a token on the border


@needs_vllm
async def test_answer_without_reasoning_is_returned_as_content_only(saying) -> None:
    body: dict[str, Any] = {"model": "demo", "messages": ASK, "max_tokens": 200, "reasoning_effort": "none"}
    for parser in ("qwen3", "deepseek_r1"):
        async with saying(SAID, reasoning_parser=parser) as server:
            answer = (await server.http.post("/v1/chat/completions", json=body)).json()
            assert answer["choices"][0]["message"]["content"] == SAID
            assert "reasoning_content" not in answer["choices"][0]["message"]
            assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
            chunks = [chunk async for chunk in await server.openai.chat.completions.create(**body, stream=True)]
            assert (joined(chunks)[0], thought_of(chunks)) == (SAID, "")


@needs_vllm
async def test_tool_calls_after_reasoning_are_parsed(saying) -> None:
    body: dict[str, Any] = {"model": "demo", "messages": ASK, "max_tokens": 200, "tools": [WEATHER]}
    flags = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    async with saying(f"<think>{THOUGHT}</think>\n{CALL}", **flags) as server:
        answer = await server.openai.chat.completions.create(**body)
        message = answer.choices[0].message
        assert told(message) == [("get_weather", {"city": "Paris", "days": 1})]
        assert message.model_extra["reasoning_content"] == THOUGHT
        chunks = [chunk async for chunk in await server.openai.chat.completions.create(**body, stream=True)]
        assert thought_of(chunks) == THOUGHT
        assert joined(chunks)[1:] == (told(message), "tool_calls")


@needs_vllm
@pytest.mark.parametrize("thought", [f"Here is my thought process:{THOUGHT}Here is my response:", ""])
async def test_tool_calls_are_parsed_when_plain_text_marks_the_end_of_reasoning(saying, thought: str) -> None:
    body: dict[str, Any] = {"model": "demo", "messages": ASK, "max_tokens": 200, "tools": [WEATHER]}
    flags = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "granite"}
    async with saying(f"{thought}{CALL}", **flags) as server:
        message = (await server.openai.chat.completions.create(**body)).choices[0].message
        assert told(message) == [("get_weather", {"city": "Paris", "days": 1})]
        chunks = [chunk async for chunk in await server.openai.chat.completions.create(**body, stream=True)]
        assert joined(chunks) == (message.content or "", told(message), "tool_calls")
        assert thought_of(chunks) == message.model_extra.get("reasoning_content", "") == THOUGHT * bool(thought)


@needs_vllm
async def test_responses_endpoint_returns_a_reasoning_item(saying) -> None:
    body: dict[str, Any] = {
        "model": "demo",
        "input": ASK,
        "max_output_tokens": 200,
        "reasoning": {"effort": "low"},
    }
    async with saying(f"<think>{THOUGHT}</think>{SAID}") as server:
        raw = await server.http.post("/v1/responses", json=body)
        answer = Response.model_validate_json(raw.content, strict=True)
        thought, said = answer.output
        assert (thought.type, thought.content[0].text) == ("reasoning", THOUGHT)
        assert said.content[0].text.strip() == SAID
        assert answer.usage.output_tokens_details.reasoning_tokens > 3
        assert answer.reasoning.effort == "low"
        adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
        text = (await server.http.post("/v1/responses", json=body | {"stream": True})).text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        events = [adapter.validate_json(line, strict=True) for line in lines]
        assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == THOUGHT
        done = events[-1].response
        assert [item.type for item in done.output] == ["reasoning", "message"]
        assert done.output[0].content[0].text == THOUGHT
        assert done.usage.output_tokens_details == answer.usage.output_tokens_details
        again = await server.http.post(
            "/v1/responses", json=body | {"input": [*ASK, *raw.json()["output"], *ASK]}
        )
        assert again.status_code == 200


@needs_vllm
async def test_anthropic_message_returns_reasoning_as_a_thinking_block(saying) -> None:
    body: dict[str, Any] = {"model": "demo", "messages": ASK, "max_tokens": 200}
    async with saying(f"<think>{THOUGHT}</think>{SAID}") as server:
        client = anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0)
        answer = await client.messages.create(**body)
        async with client.messages.stream(**body) as stream:
            streamed = await stream.get_final_message()
        for message in (answer, streamed):
            thought, said = message.content
            assert (thought.type, thought.thinking, said.text.strip()) == ("thinking", THOUGHT, SAID)
            assert 3 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
        back = [*ASK, answer.to_param(), *ASK]
        assert (await client.messages.create(**body | {"messages": back})).content


@needs_vllm
async def test_include_reasoning_false_leaves_the_reasoning_out(saying) -> None:
    chat: dict[str, Any] = {"model": "demo", "messages": ASK, "include_reasoning": False}
    response: dict[str, Any] = {"model": "demo", "input": ASK, "include_reasoning": False}
    async with saying(f"<think>{THOUGHT}</think>{SAID}") as server:
        for path, body in (("/v1/chat/completions", chat), ("/v1/responses", response)):
            for more in ({}, {"stream": True}):
                answer = await server.http.post(path, json=body | more)
                assert answer.status_code == 200
                assert "Paris" in answer.text
                assert "They" not in answer.text
                assert "reasoning_text" not in answer.text


@needs_vllm
async def test_unknown_reasoning_parser_is_rejected_by_name(saying, run_server, small_plan) -> None:
    async with saying("", ready=False, reasoning_parser="qwenn3") as server:
        await server.until(lambda: server.state.startup_error is not None, 120)
        assert "qwenn3" in str(server.state.startup_error)
        assert "qwen3," in str(server.state.startup_error)
    # The demo model's tokenizer has no tokens for reasoning.
    async with run_server(FakeEngine(small_plan()), ready=False, reasoning_parser="deepseek_r1") as server:
        await server.until(lambda: server.state.startup_error is not None, 120)
        assert "deepseek_r1 does not work with this model" in str(server.state.startup_error)


async def test_reasoning_effort_is_validated_and_passed_to_the_chat_template(
    run_server, small_plan, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[-1].content }} {{ reasoning_effort }} {{ enable_thinking }}")
    async with run_server(FakeEngine(small_plan()), chat_template=template) as server:

        async def prompt(path: str, **more: Any) -> int:
            conversation = "input" if path.endswith("responses") else "messages"
            answer = await server.http.post(path, json={"model": "demo", conversation: ASK, **more})
            usage = answer.raise_for_status().json()["usage"]
            return int(usage["input_tokens"] if path.endswith("responses") else usage["prompt_tokens"])

        async def encoded(text: str) -> int:
            return int((await server.http.post("/tokenize", json={"prompt": text})).json()["count"])

        question = ASK[0]["content"]
        for effort, thinks in (("none", "False"), ("minimal", "True"), ("xhigh", "True")):
            expected = await encoded(f"{question} {effort} {thinks}")
            assert await prompt("/v1/chat/completions", reasoning_effort=effort, max_tokens=1) == expected
            assert await prompt("/v1/responses", reasoning={"effort": effort}, max_output_tokens=1) == expected
        for path, field, value in (
            ("/v1/chat/completions", "reasoning_effort", "banana"),
            ("/v1/responses", "reasoning", {"effort": "banana"}),
        ):
            body = {"model": "demo", "messages" if "chat" in path else "input": ASK, field: value}
            refused = await server.http.post(path, json=body)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"].startswith(field)
            assert "banana" in refused.json()["error"]["message"]


async def test_chat_message_with_a_tool_result_requires_the_id_of_the_call(server) -> None:
    body = {"model": "demo", "messages": [*ASK, {"role": "tool", "content": "sunny"}]}
    refused = await server.http.post("/v1/chat/completions", json=body)
    assert refused.json()["error"]["code"] == "missing_required_parameter"
    assert refused.json()["error"]["param"] == "messages.1.tool_call_id"
