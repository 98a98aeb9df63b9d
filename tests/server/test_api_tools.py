"""Tools: calls a model writes, found by vLLM's parser of its form; calls that are forced, held by a grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from toolcalls import ASK, CLOCK, TEMPLATE, WEATHER, joined, told

from tonnage.planner.errors import ConfigError, DeploymentError
from tonnage.server.api.tools import ForcedReader
from tonnage.server.app import create_app
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.settings import Settings
from tonnage.server.text.chat_template import SHIPPED, ChatTemplate
from tonnage.server.text.tool_calls import CallDelta, calls_of

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (extra vllm)")

TEXT = (
    "I look.\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Paris", "why": "a } \\"é\\" 日本"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {"zone": "CET", "deep": {"a": [1, {}]}}}\n</tool_call>'
)
CALLS = [
    ("get_weather", {"city": "Paris", "why": 'a } "é" 日本'}),
    ("get_time", {"zone": "CET", "deep": {"a": [1, {}]}}),
]


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("template") / "tools.jinja"
    file.write_text(TEMPLATE)
    return file


@needs_vllm
async def test_generated_tool_calls_are_parsed_in_chat_completions(
    run_server, small_plan, tokenizer, template: Path
) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    engine = FakeEngine(small_plan(), reply=lambda request, index: iter(ids if index == 0 else ids[:3]))
    flags = {"chat_template": template, "enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    body: dict[str, Any] = {"model": "demo", "messages": ASK, "tools": [WEATHER, CLOCK], "max_tokens": 400}
    async with run_server(engine, **flags) as server:
        create = server.openai.chat.completions.create
        raw = await server.http.post("/v1/chat/completions", json=body | {"n": 2})
        answer = ChatCompletion.model_validate_json(raw.content, strict=True)
        assert told(answer.choices[0].message) == CALLS
        assert answer.choices[0].message.content.strip() == "I look."
        assert [choice.finish_reason for choice in answer.choices] == ["tool_calls", "stop"]
        assert "tool_calls" not in raw.json()["choices"][1]["message"]
        stream = await create(**body, stream=True, n=2)
        chunks = [chunk async for chunk in stream]
        text, calls, finish = joined(chunks)
        assert (text.strip(), calls, finish) == ("I look.", CALLS, "tool_calls")
        assert joined(chunks, 1) == (answer.choices[1].message.content, [], "stop")
        # Cut off within the first call: no reservation of a whole one.
        cut = ids.index(tokenizer.encode("Paris", add_special_tokens=False)[0])
        stream = await create(**body | {"max_tokens": cut}, stream=True)
        assert [c.choices[0].finish_reason async for c in stream if c.choices][-1] == "length"
        # The answers go back with their results; the template gets the arguments as an object.
        sent = answer.choices[0].message.model_dump(exclude_none=True)
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "fine"} for c in sent["tool_calls"]]
        again = await create(**body | {"messages": [*ASK, sent, *results], "max_tokens": 1})
        more = ChatTemplate(TEMPLATE).render(
            [
                *ASK,
                {
                    "role": "assistant",
                    "content": sent["content"],
                    "tool_calls": [
                        {"function": {"name": name, "arguments": arguments}} for name, arguments in CALLS
                    ],
                },
                *results,
            ],
            tools=[WEATHER, CLOCK],
        )
        assert again.usage.prompt_tokens == len(tokenizer.encode(more, add_special_tokens=False))
        off = await create(**body, tool_choice="none")
        assert off.choices[0].message.content == TEXT
        assert off.choices[0].finish_reason == "stop"
        plain = ChatTemplate(TEMPLATE).render(ASK)
        assert off.usage.prompt_tokens == len(tokenizer.encode(plain, add_special_tokens=False))


@needs_vllm
async def test_generated_tool_calls_are_parsed_in_responses(
    run_server, small_plan, tokenizer, template: Path
) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    engine = FakeEngine(small_plan(), reply=lambda request, index: iter(ids))
    flags = {"chat_template": template, "enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    tools = [{"type": "function", **tool["function"], "strict": None} for tool in (WEATHER, CLOCK)]
    body: dict[str, Any] = {"model": "demo", "input": ASK, "tools": tools, "max_output_tokens": 400}
    async with run_server(engine, **flags) as server:
        raw = await server.http.post("/v1/responses", json=body)
        answer = Response.model_validate_json(raw.content, strict=True)
        _, *calls = answer.output
        assert answer.output_text.strip() == "I look."
        assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
        kinds: list[str] = []
        done: list[Any] = []
        arguments: dict[str, str] = {}
        async for event in await server.openai.responses.create(**body, stream=True):
            assert event.sequence_number == len(kinds)
            kinds.append(event.type)
            if event.type == "response.function_call_arguments.delta":
                arguments[event.item_id] = arguments.get(event.item_id, "") + event.delta
            if event.type == "response.output_item.done":
                done.append(event.item)
            if event.type == "response.completed":
                assert [item.type for item in event.response.output] == [item.type for item in done]
        assert [item.type for item in done] == ["message", "function_call", "function_call"]
        assert [(item.name, json.loads(item.arguments)) for item in done[1:]] == CALLS
        assert [arguments[item.id] for item in done[1:]] == [item.arguments for item in done[1:]]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert kinds.count("response.output_item.added") == 3
        # Sent back with their results: the same prompt as the conversation in chat completions.
        sent = [item.model_dump(exclude_none=True) for item in answer.output]
        results = [
            {"type": "function_call_output", "call_id": c["call_id"], "output": "fine"} for c in sent[1:]
        ]
        again = await server.openai.responses.create(**body | {"input": [*ASK, *sent, *results]})
        chat = [
            *ASK,
            {
                "role": "assistant",
                "content": answer.output_text,
                "tool_calls": [
                    {
                        "id": c.call_id,
                        "type": "function",
                        "function": {"name": c.name, "arguments": c.arguments},
                    }
                    for c in calls
                ],
            },
            *({"role": "tool", "tool_call_id": c.call_id, "content": "fine"} for c in calls),
        ]
        same = await server.openai.chat.completions.create(
            model="demo", messages=chat, tools=[WEATHER, CLOCK], max_tokens=1
        )
        assert again.usage.input_tokens == same.usage.prompt_tokens
        refused = await server.http.post("/v1/responses", json=body | {"tools": [{"type": "file_search"}]})
        assert refused.json()["error"]["param"].startswith("tools.0")


NAMESPACE = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "close_agent"}]}


async def test_tools_and_fields_that_codex_always_sends_are_ignored_and_listed_in_a_header(server) -> None:
    body: dict[str, Any] = {
        "model": "demo", "input": "hello", "max_output_tokens": 2, "store": False,
        "include": ["reasoning.encrypted_content"],
        "tools": [{"type": "custom", "name": "apply_patch"}, {"type": "web_search"}, NAMESPACE],
        "client_metadata": {"session_id": "1"},
    }  # fmt: skip
    answer = await server.http.post("/v1/responses", json=body)
    assert answer.status_code == 200
    ignored = "tools.0 (custom), tools.1 (web_search), tools.2 (namespace), include, store, client_metadata"
    assert answer.headers["x-ignored-fields"] == ignored
    assert answer.json()["tools"] == []
    for change, param in (
        ({"tool_choice": {"type": "custom", "name": "apply_patch"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}, "include"),
        ({"tools": [{"type": "file_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "web_search\r\nx-injected: 1"}]}, "tools.0.type"),
        ({"tools": [{"type": "web_search_日本"}]}, "tools.0.type"),
    ):
        refused = await server.http.post("/v1/responses", json=body | change)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


NAMED = {"type": "function", "function": {"name": "get_weather"}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({}, "unsupported_parameter", "tools"),
    ({"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
    ({"tool_choice": NAMED}, "unsupported_parameter", "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "invalid_value", "tool_choice"),
    ({"tool_choice": "perhaps"}, "invalid_value", "tool_choice"),
    ({"tool_choice": "required", "tools": None}, "invalid_value", "tool_choice"),
    ({"tools": [WEATHER, WEATHER]}, "invalid_value", "tools"),
    ({"tools": [{"type": "custom"}]}, "invalid_value", "tools.0.type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "invalid_value", "tools.0.function.name"),
    ({"functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
    (
        {
            "tool_choice": "none",
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
                    ],
                }
            ],
        },
        "invalid_value",
        "messages.0.tool_calls",
    ),
]


async def test_unsupported_tool_options_are_rejected(run_server, small_plan, template: Path, checked) -> None:
    async with run_server(FakeEngine(small_plan()), chat_template=template) as server:
        valid = {"model": "demo", "messages": ASK, "max_tokens": 2, "tools": [WEATHER]}
        for change, code, param in REFUSED:
            error = checked(await server.http.post("/v1/chat/completions", json=valid | change))
            assert (error.code, error.param) == (code, param), (change, error)
    plain = template.with_name("plain.jinja")
    plain.write_text("{{ messages[-1].content }}")
    async with run_server(FakeEngine(small_plan()), chat_template=plain) as server:
        error = checked(await server.http.post("/v1/chat/completions", json=valid | {"tool_choice": NAMED}))
        assert (error.code, error.param) == ("unsupported_parameter", "tools")
        assert "--chat-template" in error.message
        assert "hermes, llama3_json, mistral" in error.message


async def test_incomplete_tool_parser_flags_and_missing_template_are_rejected(
    small_plan, tokenizer, tmp_path: Path
) -> None:
    for half in ({"enable_auto_tool_choice": True}, {"tool_call_parser": "hermes"}):
        with pytest.raises(DeploymentError, match="belong together"):
            create_app(Settings(model="demo", **half), FakeEngine(small_plan()), tokenizer)
    settings = Settings(model="demo", chat_template=tmp_path / "none")
    with pytest.raises(ConfigError, match="chat_template"):
        create_app(settings, FakeEngine(small_plan()), tokenizer)


@needs_vllm
async def test_unknown_tool_call_parser_is_rejected_by_name(run_server, small_plan) -> None:
    flags = {"enable_auto_tool_choice": True, "tool_call_parser": "hermess"}
    async with run_server(FakeEngine(small_plan()), ready=False, **flags) as server:
        await server.until(lambda: server.state.startup_error is not None, 120)
        assert "hermess" in str(server.state.startup_error)
        assert "hermes," in str(server.state.startup_error)


def test_chat_template_named_tool_use_is_used_for_requests_with_tools(tmp_path: Path) -> None:
    source = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.knows_tools
    assert (template.render([]), template.render([], tools=[WEATHER])) == ("plain", "1")
    assert not ChatTemplate("{{ messages }}").knows_tools
    # As Llama 3.1's begins: assigned where it is missing, and read later.
    assert ChatTemplate("{% if tools is not defined %}{% set tools = none %}{% endif %}{{ tools }}").knows_tools


CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    *ASK,
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": f"call_{at:09}", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(CALLS)
    ]},
    {"role": "tool", "content": "sunny", "tool_call_id": "call_000000000"},
    {"role": "tool", "content": "noon", "tool_call_id": "call_000000001"},
    *ASK,
]  # fmt: skip
SHOWN = {
    "hermes": (
        "<|im_start|>system\nBe brief.\n\n# Tools",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"',
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nnoon\n</tool_response><|im_end|>",
        "<|im_start|>assistant\n",
    ),
    "llama3_json": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n\nBe brief.",
        '{"name": "get_weather", "parameters": {"city": "Paris"',
        "<|start_header_id|>ipython<|end_header_id|>\n\nsunny<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": (
        "<s>[INST] What is the weather in Paris?[/INST]",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"',
        '[TOOL_RESULTS] {"content": "sunny", "call_id": "000000000"}[/TOOL_RESULTS]',
        "[/AVAILABLE_TOOLS][INST] Be brief.\n\nWhat is the weather in Paris?[/INST]",
    ),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_chat_template_shows_tools_calls_and_results(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    template = ChatTemplate.from_folder(tmp_path, Path(name))
    assert template is not None
    assert template.knows_tools
    text = template.render(CONVERSATION, tools=[WEATHER, CLOCK])
    begin, call, result, end = SHOWN[name]
    assert text.startswith(begin)
    assert text.endswith(end)
    assert call in text
    assert result in text
    assert all(text.count(json.dumps(each["function"]["name"])) >= 2 for each in (WEATHER, CLOCK))
    assert "get_time" not in template.render(ASK)
    with pytest.raises(ConfigError, match=r"hermess.*hermes, llama3_json, mistral"):
        ChatTemplate.from_folder(tmp_path, Path("hermess"))


@needs_vllm
async def test_tool_calls_in_the_format_of_the_hermes_template_are_read_by_the_hermes_parser(
    run_server, small_plan, tokenizer
) -> None:
    template = ChatTemplate.from_folder("", Path("hermes"))
    assert template is not None
    text = template.render(CONVERSATION[2:3], add_generation_prompt=False)
    text = text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
    ids = tokenizer.encode(text, add_special_tokens=False)
    engine = FakeEngine(small_plan(), reply=lambda request, index: iter(ids))
    # The demo model shows tools without any --chat-template.
    async with run_server(engine, enable_auto_tool_choice=True, tool_call_parser="hermes") as server:
        body: dict[str, Any] = {"model": "demo", "messages": ASK, "tools": [WEATHER, CLOCK], "max_tokens": 400}
        answer = await server.openai.chat.completions.create(**body)
        assert told(answer.choices[0].message) == CALLS


def test_server_warns_at_start_when_its_template_shows_no_tools(
    small_plan, tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = tmp_path / "plain.jinja"
    plain.write_text("{{ messages[-1].content }}")
    flags: dict[str, Any] = {"model": "demo", "enable_auto_tool_choice": True}
    create_app(Settings(**flags, tool_call_parser="hermes"), FakeEngine(small_plan()), tokenizer)
    assert caplog.messages == []
    for parser, named in (("mistral", "--chat-template mistral"), ("xlam", "--chat-template NAME (hermes,")):
        settings = Settings(**flags, tool_call_parser=parser, chat_template=plain)
        create_app(settings, FakeEngine(small_plan()), tokenizer)
        assert "does not show tools" in caplog.messages[-1]
        assert named in caplog.messages[-1]


def pushed(reader: ForcedReader, text: str) -> Sequence[CallDelta]:
    content, deltas, _ = reader.push(text, (), finished=False)
    assert content == ""
    return deltas


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":"), (" ,\n ", " : ")])
def test_forced_tool_calls_parse_across_any_chunk_split(separators: tuple[str, str]) -> None:
    document = [{"name": name, "parameters": arguments} for name, arguments in CALLS]
    array = json.dumps(document, separators=separators, ensure_ascii=False)
    single = json.dumps(CALLS[0][1], separators=separators)
    for size in range(1, len(array) + 1):
        reader, one = ForcedReader(None), ForcedReader("get_weather")
        deltas = [d for at in range(0, len(array), size) for d in pushed(reader, array[at : at + size])]
        assert [(call.name, json.loads(call.arguments)) for call in calls_of(deltas)] == CALLS
        deltas = [d for at in range(0, len(single), size) for d in pushed(one, single[at : at + size])]
        assert [(call.name, json.loads(call.arguments)) for call in calls_of(deltas)] == CALLS[:1]
    for length in range(len(array)):  # cut off anywhere: what there is of each call
        calls = calls_of(ForcedReader(None).push(array[:length], (), finished=True)[1])
        assert all(array.find(call.arguments) >= 0 for call in calls)
        assert [call.name for call in calls] == [name for name, _ in CALLS[: len(calls)]]
