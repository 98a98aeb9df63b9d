"""Requests whose handling grows faster than their size: stop strings, templates, logprobs, arguments."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
import threading
import time
import tracemalloc
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tonnage.server.api.body import parse_steps
from tonnage.server.api.chat import protocol as chat
from tonnage.server.api.completions import protocol as completions
from tonnage.server.api.logprobs import COMPLETION_LISTS, JsonLists, with_logprobs
from tonnage.server.api.responses import protocol as responses
from tonnage.server.api.tools import ForcedReader
from tonnage.server.engines.inbox import Inbox
from tonnage.server.engines.request import BASIC_PARAMS
from tonnage.server.engines.vllm.output_parser import _Reader, load_output_parser
from tonnage.server.errors import ApiError, ErrorCode
from tonnage.server.http import outbox
from tonnage.server.http.bodies import completed
from tonnage.server.http.outbox import HeldAnswer, Outboxes
from tonnage.server.text import chat_template
from tonnage.server.text.chat_template import ChatTemplate, TemplateRefused
from tonnage.server.text.stop_strings import MAX_STOP_CHARACTERS
from tonnage.server.text.tool_calls import Parsed, calls_of

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (extra vllm)")

HELLO = {"role": "user", "content": "hello"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


# -- stop strings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["a" * (MAX_STOP_CHARACTERS + 1), ["ab"] * (MAX_STOP_CHARACTERS // 2 + 1)])
async def test_stop_strings_beyond_the_limit_are_rejected_with_the_limit(server, checked, stop: Any) -> None:
    body = {"model": "demo", "prompt": "a", "max_tokens": 1, "stop": stop}
    error = checked(await server.http.post(COMPLETIONS, json=body))
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, "stop")
    assert "at most 4,096 characters together" in error.message


async def test_more_than_four_stop_strings_are_accepted(server) -> None:
    body = {"model": "demo", "prompt": "a", "max_tokens": 2, "stop": [f"stop {at}" for at in range(100)]}
    assert (await server.http.post(COMPLETIONS, json=body)).status_code == 200


async def test_reading_many_queued_chunks_lets_other_tasks_run_in_between() -> None:
    inbox: Inbox[int] = Inbox()
    for item in range(1000):
        inbox.put_nowait(item)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count())
    got = [await inbox.get() for _ in range(1000)]
    other.cancel()
    assert got == list(range(1000))
    assert turns >= 1000 // 16


# -- chat templates -------------------------------------------------------------------------------------------


def nested(depth: int) -> dict[str, Any]:
    """Return an object in which objects are nested ``depth`` levels deep."""
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def test_template_that_indents_nested_tools_is_stopped_at_the_size_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_template, "MOST_CHARACTERS", 100_000)
    template = ChatTemplate("{{ tools | tojson(indent=4) }}")
    tools = [nested(180) for _ in range(2000)]
    tracemalloc.start()
    try:
        with pytest.raises(TemplateRefused, match="more than 100,000 characters"):
            template.render([HELLO], tools=tools)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * 2**20
    small = [nested(3)]
    assert template.render([HELLO], tools=small) == json.dumps(small, indent=4)


def test_template_loop_is_stopped_at_the_limit_of_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MOST_CHARACTERS", 10_000)
    template = ChatTemplate("{% for a in range(1000) %}{% for b in range(1000) %}x{% endfor %}{% endfor %}")
    with pytest.raises(TemplateRefused, match="more than 10,000 characters"):
        template.render([HELLO])


async def test_long_conversations_are_formatted_outside_the_event_loop(
    server, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    plain = ChatTemplate.render

    def recorded(self: ChatTemplate, *arguments: Any, **named: Any) -> str:
        threads.append(threading.current_thread())
        return plain(self, *arguments, **named)

    monkeypatch.setattr(ChatTemplate, "render", recorded)
    for content in ("hello", "hello " * 5000):
        body = {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        await server.http.post(CHAT, json=body)
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_number_of_json_values_in_tool_call_arguments_is_limited_before_parsing(server, checked) -> None:
    arguments = '{"a":[' + "{}," * 250_000 + "{}]}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    error = checked(await server.http.post(CHAT, json={"model": "demo", "messages": messages}))
    assert error.code == ErrorCode.INVALID_VALUE
    assert "the JSON in tool call arguments has 250003 objects and lists; at most 200000" in error.message


# -- fields without effect ------------------------------------------------------------------------------------


def test_request_fields_without_effect_are_not_kept_in_memory() -> None:
    large = ["x" * 1000] * 10
    message = HELLO | {"parsed": large, "annotations": large, "provider_specific_fields": {"a": large}}
    body, _ = completed(parse_steps(json.dumps({"model": "demo", "messages": [message]}).encode(), chat.FIELDS))
    (kept,) = body.messages
    assert (kept.parsed, kept.annotations, kept.provider_specific_fields) == (None, None, None)
    part = {"type": "output_text", "text": "a", "parsed": large, "annotations": []}
    answer = {"type": "message", "role": "assistant", "id": "1", "status": "completed", "content": [part]}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "parsed_arguments": large}
    text = json.dumps({"model": "demo", "input": [answer, call]}).encode()
    assert "xxx" not in repr(completed(parse_steps(text, responses.FIELDS))[0])


WAITING: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        CHAT,
        {
            "messages": [HELLO | {"content": "large"}], "chat_template_kwargs": {"a": "large"},
            "tools": [{"type": "function", "function": {"name": "f", "description": "large"}}],
            "tool_choice": "none",
        },
    ),
    "completions": (COMPLETIONS, {"prompt": "large"}),
    "responses": (
        RESPONSES,
        {
            "input": "large", "instructions": "large", "chat_template_kwargs": {"a": "large"},
            "tools": [{"type": "function", "name": "f", "description": "large"}], "tool_choice": "none",
            "metadata": {"a": "large"},
        },
    ),
    "messages": (
        MESSAGES,
        {
            "messages": [HELLO | {"content": "large"}], "system": "large",
            "chat_template_kwargs": {"a": "large"}, "tool_choice": {"type": "none"},
            "tools": [{"name": "f", "description": "large", "input_schema": {}}],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WAITING)
async def test_waiting_request_frees_its_messages_tools_and_parsed_body(
    server, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    path, more = WAITING[case]
    seen: list[Any] = []
    plain = parse_steps

    def recorded(*arguments: Any, **named: Any) -> Any:
        found = yield from plain(*arguments, **named)
        seen.append(found[0])
        return found

    monkeypatch.setattr("tonnage.server.api.body.parse_steps", recorded)
    limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": 1}
    assert (await server.http.post(path, json={"model": "demo"} | limit | more)).status_code == 200
    (request,) = seen
    assert "large" not in repr(request)


def test_waiting_request_keeps_its_token_ids_in_a_packed_array() -> None:
    """256 requests with the longest lists took 184 MB more than planned in the engine process."""
    honours = BASIC_PARAMS | {"allowed_token_ids", "logit_bias"}
    lists = {"allowed_token_ids": [*range(10_000)], "logit_bias": {str(at): at / 11 for at in range(1024)}}
    body = json.dumps({"model": "demo", "prompt": "a"} | lists).encode()
    request, _ = completed(parse_steps(body, completions.FIELDS, honours))
    sent = pickle.dumps(request.sampling(1, (), 49_152))
    tracemalloc.start()
    try:
        received = pickle.loads(sent)
        assert tracemalloc.get_traced_memory()[0] < 80_000
    finally:
        tracemalloc.stop()
    assert (len(received.allowed_token_ids), list(received.allowed_token_ids)[-1]) == (10_000, 9999)
    assert list(received.logit_bias)[:2] == [(0, 0.0), (1, 1 / 11)]
    assert received == request.sampling(1, (), 49_152)
    request.forget()
    assert (request.allowed_token_ids, request.logit_bias) == (None, None)


async def test_request_fields_that_a_response_repeats_are_limited_in_size(server, checked) -> None:
    tool = {"type": "function", "name": "f", "description": "x" * 140_000}
    body = {"model": "demo", "input": "a", "tools": [tool], "tool_choice": "none", "max_output_tokens": 1}
    error = checked(await server.http.post(RESPONSES, json=body))
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, "tools")
    assert "at most 131,072" in error.message
    body["tools"] = [tool | {"description": "x" * 1000}]
    answer = (await server.http.post(RESPONSES, json=body)).json()
    assert answer["tools"][0]["description"] == "x" * 1000


# -- forced calls ---------------------------------------------------------------------------------------------


def test_forced_tool_call_is_parsed_in_linear_time() -> None:
    """Each token with a brace was read together with all tokens before it."""

    def seconds(count: int) -> float:
        reader, since = ForcedReader("f"), time.process_time()
        reader.push('{"a":[', (), finished=False)
        for _ in range(count):
            reader.push("{},", (), finished=False)
        assert "".join(each.arguments for each in reader.push("{}]}", (), finished=True).calls) == "{}]}"
        return time.process_time() - since

    assert seconds(16_000) < 16 * min(seconds(2000) for _ in range(3))


# -- log probabilities ----------------------------------------------------------------------------------------


def test_logprobs_written_in_pieces_give_the_same_response_as_at_once() -> None:
    pieces = [JsonLists(COMPLETION_LISTS) for _ in range(2)]
    lists: dict[str, list[Any]] = {
        "tokens": ["a", '"logprobs":null'], "token_logprobs": [-1.5, None], "top_logprobs": [None, {}],
        "text_offset": [0, 1],
    }  # fmt: skip
    assert pieces[0].add(lists) == pieces[1].add(lists) > 40
    pieces[1].add(lists)
    said = json.dumps({"choices": [{"text": '"logprobs":null', "logprobs": None}] * 2}, separators=(",", ":"))
    whole = json.loads(with_logprobs(said, [each.text('"more":1') for each in pieces]))
    assert [choice["text"] for choice in whole["choices"]] == ['"logprobs":null'] * 2
    assert whole["choices"][0]["logprobs"] == lists | {"more": 1}
    assert whole["choices"][1]["logprobs"] == {name: values * 2 for name, values in lists.items()} | {"more": 1}


def test_largest_unstreamed_response_is_rejected_when_all_buffers_exceed_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "OUTBOX_BYTES", 1000)
    outboxes = Outboxes()
    small, large = HeldAnswer(outboxes), HeldAnswer(outboxes)
    small.hold(300)
    large.hold(600)
    small.hold(200)  # over the limit together: the larger one is given up
    assert (large.is_cut, small.is_cut, outboxes.held) == (True, False, 500)
    with pytest.raises(ApiError, match="stream: true") as caught:
        large.hold(1)
    assert caught.value.code == ErrorCode.SERVER_OVERLOADED
    small.close()
    large.close()
    assert (outboxes.held, outboxes.behind) == (0, 0)


@needs_vllm
def test_vllms_tool_parser_gets_long_text_in_longer_pieces(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pieces: list[int] = []
    output_parser = load_output_parser("hermes", None, tokenizer_folder)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    use = output_parser.use([tool], [], parallel=True, grammar=None, template_arguments={})
    assert use.reader is not None

    def parsed_in_pieces(text: str) -> tuple[str, list[str]]:
        reader = use.reader([1])
        push = _Reader.push

        def counted(self: _Reader, text: str, token_ids: list[int], *, finished: bool) -> Parsed:
            pieces.append(len(text))
            return push(self, text, token_ids, finished=finished)

        with monkeypatch.context() as patch:
            patch.setattr(_Reader, "push", counted)
            ends = range(4, len(text) + 4, 4)
            found = [reader.push(text[end - 4 : end], [5], finished=end >= len(text)) for end in ends]
        calls = calls_of([call for each in found for call in each.calls])
        return "".join(each.text for each in found), [call.arguments for call in calls]

    arguments = json.dumps({"a": "lorem " * 10_000})
    text = f'Well. <tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    said, (found,) = parsed_in_pieces(text)
    assert said.strip() == "Well."
    assert found == arguments
    assert sum(pieces) == len(text)
    assert len(pieces) < 4096 / 4 + 256 * math.log(len(text) / 4096) + 10  # 15,000 pieces without joining
    assert pieces[0] == pieces[100] == 4  # a short answer is parsed at once

    wrong = "<tool_call>not JSON</tool_call>"
    assert use.reader([1]).whole(wrong, [5]).text == wrong
    assert not any(record.exc_info for record in caplog.records)
