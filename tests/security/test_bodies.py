"""Small bodies that are expensive to handle: the client gets one sentence, and other clients notice nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading
import time
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tonnage.planner.engines.runtime.api import BODIES_BYTES
from tonnage.server.api import json_body
from tonnage.server.api.body import Fields, parse_steps
from tonnage.server.api.chat import protocol as chat
from tonnage.server.api.completions import protocol as completions
from tonnage.server.api.embeddings import protocol as embeddings
from tonnage.server.api.generation import _ENCODE_INLINE_CHARACTERS, Generator
from tonnage.server.api.json_body import MAX_ITEMS, most_values
from tonnage.server.api.messages import protocol as messages
from tonnage.server.api.messages.conversion import chat_request
from tonnage.server.api.responses import protocol as responses
from tonnage.server.api.responses.service import _messages as responses_messages
from tonnage.server.api.tokenize import _DETOKENIZE, _TOKENIZE, MAX_BYTES, MAX_TOKENS
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.errors import ApiError, ErrorCode
from tonnage.server.http.bodies import FREE_BYTES, LARGEST_AT_ONCE, BodyBytes, completed
from tonnage.server.settings import Settings
from tonnage.server.text.tokenizer import Tokenizer

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HELLO = {"role": "user", "content": "hello"}
NINES = 10**4300 - 1  # the longest integer that Python reads and writes


def called(arguments: str) -> list[dict[str, Any]]:
    """Return a conversation in which the assistant has called a function with ``arguments``."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "a"},
    ]


@pytest.mark.parametrize(
    ("path", "field", "more"),
    [
        (COMPLETIONS, "max_tokens", {"prompt": "a"}),
        (CHAT, "max_tokens", {"messages": [HELLO]}),
        (CHAT, "max_completion_tokens", {"messages": [HELLO]}),
        (RESPONSES, "max_output_tokens", {"input": "a"}),
    ],
)
async def test_integer_of_4300_digits_in_a_request_is_rejected(
    server, checked, path: str, field: str, more: dict[str, Any]
) -> None:
    response = await server.http.post(path, json={"model": "demo", field: NINES, **more})
    error = checked(response)
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, field)
    assert "2147483648" in error.message


@pytest.mark.parametrize("name", ["self", "messages", "tools"])
async def test_reserved_template_variables_are_rejected(server, checked, name: str) -> None:
    body = {"model": "demo", "messages": [HELLO], "chat_template_kwargs": {name: 1}}
    error = checked(await server.http.post(CHAT, json=body))
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, "chat_template_kwargs")


@pytest.mark.parametrize(
    "arguments", ['{"a":' * 5000 + "1" + "}" * 5000, '{"a": "\\ud800"}'], ids=["deep", "half a character"]
)
async def test_tool_call_arguments_that_templates_cannot_render_are_rejected(
    server, checked, arguments: str
) -> None:
    error = checked(await server.http.post(CHAT, json={"model": "demo", "messages": called(arguments)}))
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, "messages.1.tool_calls")
    fine = called('{"a": [1, {"b": null}]}')
    response = await server.http.post(CHAT, json={"model": "demo", "messages": fine, "max_tokens": 1})
    assert response.status_code == 200


async def test_json_body_without_content_type_is_rejected(server, checked) -> None:
    """The one form of a JSON body that a browser sends to a foreign server without asking it first."""
    body = json.dumps({"model": "demo", "prompt": "a", "max_tokens": 1}).encode()
    for origin in ("https://evil.example", "null"):
        for path in (COMPLETIONS, "/tokenize"):
            response = await server.http.post(path, content=body, headers={"origin": origin})
            error = checked(response)
            assert error.code == ErrorCode.UNSUPPORTED_MEDIA_TYPE
            assert "content-type: application/json" in error.message
    assert server.state.accounts.outcomes["stop"] + server.state.accounts.outcomes["length"] == 0
    assert (await server.http.post(COMPLETIONS, content=body)).status_code == 200  # curl, a script


MANY = 100_000
WRONG: dict[str, tuple[Fields[Any], dict[str, Any], str]] = {
    "messages": (chat.FIELDS, {"messages": [{}] * (MANY - 1)}, "messages.0.role"),
    "scalars for messages": (chat.FIELDS, {"messages": [0] * MANY}, "messages.0"),
    "parts": (chat.FIELDS, {"messages": [HELLO | {"content": [0] * MANY}]}, "messages.0.content"),
    "calls": (chat.FIELDS, {"messages": [HELLO | {"tool_calls": [0] * MANY}]}, "messages.0.tool_calls.0"),
    "unknown names": (chat.FIELDS, {"messages": [HELLO | {f"a{at}": 0 for at in range(MANY)}]}, "messages"),
    "names of tools": (
        chat.FIELDS,
        {"messages": [HELLO], "tools": [{f"a{at}": 0 for at in range(2000)}] * 50},
        "tools.0.type",
    ),
    "lists in lists": (chat.FIELDS, {"messages": [HELLO | {"content": [[]] * 1000}] * 101}, "messages"),
    "biases": (
        completions.FIELDS, {"prompt": "a", "logit_bias": {str(at): "" for at in range(MANY)}}, "logit_bias",
    ),
    "stop strings": (completions.FIELDS, {"prompt": "a", "stop": [1] * MANY}, "stop"),
    "stop sequences": (
        messages.FIELDS,
        {"messages": [HELLO], "max_tokens": 1, "stop_sequences": [1] * MANY},
        "stop_sequences.0",
    ),
    "tools": (
        messages.FIELDS,
        {"messages": [HELLO], "max_tokens": 1, "tools": [{"type": "web_search_1"}] * (MANY - 2)},
        "tools",
    ),
    "items": (responses.FIELDS, {"input": [{}] * (MANY - 1)}, "input"),
    "texts": (responses.FIELDS, {"input": [{"role": "user", "content": [0] * MANY}]}, "input"),
    "inputs": (embeddings.FIELDS, {"input": ["a"] * MANY}, "input"),
    "conversation": (_TOKENIZE, {"messages": [0] * MANY}, "messages.0"),
    "tokens": (_DETOKENIZE, {"tokens": ["a"] * MANY}, "tokens.0"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        (responses.FIELDS, {"input": "a", "metadata": {"k" * 100_000: 1}}),
        (responses.FIELDS, {"input": "a", "metadata": {"k": "v" * 100_000}}),
    ],
    ids=["name", "value"],
)
def test_error_message_repeats_only_the_beginning_of_a_long_field_name(
    fields: Fields[Any], more: dict[str, Any]
) -> None:
    with pytest.raises(ApiError) as caught:
        completed(parse_steps(json.dumps({"model": "demo"} | more).encode(), fields))
    assert len(caught.value.message) < 300
    assert len(caught.value.param or "") < 100


def test_long_field_name_is_not_copied_for_each_value_inside_it() -> None:
    """A body of 60 KB took 430 MB, because half of a surrogate pair was searched with a path for each value."""
    body = b'{"model":"m","prompt":"\\ud800","%b":[%b0]}' % (b"a" * 30_000, b"0," * 15_000)
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match="prompt: character 0 is half of a surrogate pair"):
            completed(parse_steps(body, completions.FIELDS))
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()


def test_ignored_fields_are_listed_in_a_short_header() -> None:
    tools = [{"type": "web_search_" + "a" * 40}] * 1000
    body = {"model": "demo", "messages": [HELLO], "max_tokens": 1, "tools": tools}
    _, ignored = completed(parse_steps(json.dumps(body).encode(), messages.FIELDS))
    assert len(", ".join(ignored)) < 4000
    assert ignored[-1] == "and 968 more"
    body = {"model": "demo", "prompt": "a"} | {f"unknown{at}": 1 for at in range(1000)}
    _, ignored = completed(parse_steps(json.dumps(body).encode(), completions.FIELDS, lenient=True))
    assert ignored[-1] == "and 968 more"


def processor_seconds(work: Callable[[], object]) -> float:
    """Return the processor time of ``work``, the shortest of three runs."""
    found = []
    for _ in range(3):
        since = time.process_time()
        work()
        found.append(time.process_time() - since)
    return min(found)


@pytest.mark.parametrize("kind", ["turns", "calls"])
def test_conversion_of_a_conversation_takes_linear_time(kind: str) -> None:
    def converted(count: int) -> Callable[[], object]:
        if kind == "turns":
            turns = [messages.AnthropicMessage(role="user", content="a" * 2000)] * count
            request = messages.CountTokensRequest(model="m", messages=turns)
            return lambda: chat_request(request)
        call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
        given = responses.ResponseRequest.model_validate({"model": "m", "input": [call] * count})
        return lambda: responses_messages(given)

    # eight times as many: at most 16 times as long; it was 40 times for the turns, 30 for the calls
    assert processor_seconds(converted(8000)) < 16 * processor_seconds(converted(1000))


def test_thousands_of_messages_are_validated_in_short_steps() -> None:
    parts = [{"type": "text", "text": "a"}] * 9
    body = json.dumps({"model": "m", "messages": [HELLO | {"content": parts}] * 5900}).encode()

    def longest() -> float:
        steps, found = parse_steps(body, chat.FIELDS), 0.0
        while True:
            since = time.thread_time()
            ended = next(steps, "end") == "end"
            found = max(found, time.thread_time() - since)
            if ended:
                return found

    gc.collect()
    gc.disable()
    try:
        assert min(longest() for _ in range(3)) < 0.03
    finally:
        gc.enable()


@pytest.mark.parametrize("lenient", [False, True], ids=["strict", "lenient"])
@pytest.mark.parametrize("case", WRONG)
def test_validation_of_a_body_takes_no_longer_with_many_errors(case: str, lenient: bool) -> None:
    """What the body takes as Python objects is all; it was kilobytes for each wrong item."""
    fields, more, param = WRONG[case]
    body = json.dumps({"model": "demo"} | more).encode()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as caught:
            completed(parse_steps(body, fields, lenient=lenient))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 * 2**20
    assert caught.value.param == param
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize(
    ("items", "what"),
    [
        ("{}," * 2_000_000, "objects and lists"),
        ("[]," * 2_000_000, "objects and lists"),
        ('"a",' * 2_000_000, "strings"),
        ('"\\\\","\\"",' * 700_000, "strings"),
        ("1," * 4_000_000, "values"),
    ],
    ids=["objects", "lists", "strings", "escapes", "numbers"],
)
def test_number_of_json_values_is_limited_before_parsing(items: str, what: str) -> None:
    body = f'{{"model":"demo","prompt":[{items}0]}}'.encode()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match=what) as caught:
            completed(parse_steps(body, completions.FIELDS))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.code == ErrorCode.INVALID_VALUE
    assert peak < 2.5 * len(body)


def test_number_of_json_object_keys_is_limited_before_parsing() -> None:
    """Each costs ten times what a number does: 250,000 of them held the event loop for 150 ms."""
    body = b'{"model":"demo","metadata":{' + b",".join(b'"%x":1' % at for at in range(240_000)) + b"}}"
    with pytest.raises(ApiError, match="240002 names in objects; at most 120000"):
        completed(parse_steps(body, chat.FIELDS))


def in_json(value: Any) -> Counter[str]:
    """How many of what `_check_values` counts are in a value."""
    count: Counter[str] = Counter(strings=isinstance(value, str))
    if isinstance(value, (dict, list)):
        count += Counter({"objects and lists": 1, "values": max(0, len(value) - 1)})
        count += sum(map(in_json, value.values() if isinstance(value, dict) else value), Counter())
    if isinstance(value, dict):
        count += Counter({"names in objects": len(value), "strings": len(value)})
    return count


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_json_values_are_counted_correctly_across_slice_boundaries(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the text is cut: in a string, behind a backslash."""
    draw = random.Random(size)

    def value(depth: int) -> Any:
        text = "".join(draw.choice('ab,:[]{}"\\\n\u00e9') for _ in range(draw.randrange(9)))
        if depth == 0 or draw.random() < 0.3:
            return draw.choice((text, 1, None))
        items = [value(depth - 1) for _ in range(draw.randrange(4))]
        return items if draw.random() < 0.5 else {f"{text}{at}": item for at, item in enumerate(items)}

    monkeypatch.setattr(json_body, "_COUNTED_AT_ONCE", size)
    limits = {
        "strings": "_MAX_STRINGS", "objects and lists": "_MAX_BRACKETS", "names in objects": "_MAX_NAMES",
    }  # fmt: skip
    for _ in range(60):
        document = value(4)
        text = json.dumps(document, ensure_ascii=draw.random() < 0.5).encode()
        count = in_json(document)
        text += b" " * 2 * count["names in objects"]  # long enough to be looked at
        for what, name in limits.items():
            monkeypatch.setattr(json_body, name, count[what])
        completed(json_body._check_values(text, count["values"]))
        for what in [*limits, "values"]:
            if count[what]:
                with monkeypatch.context() as patch:
                    if what != "values":
                        patch.setattr(json_body, limits[what], count[what] - 1)
                    with pytest.raises(ApiError, match=what):
                        completed(json_body._check_values(text, count["values"] - (what == "values")))


async def test_large_bodies_are_parsed_one_at_a_time_without_blocking_other_requests() -> None:
    """However many are there at once, the event loop gets as much time after each step as the step took."""
    bodies, large = BodyBytes(10 * FREE_BYTES), 2 * FREE_BYTES
    begun, ended = list[float](), list[float]()

    def step() -> None:
        begun.append(time.perf_counter())
        time.sleep(0.01)
        ended.append(time.perf_counter())

    def parse() -> Iterator[None]:
        step()
        yield
        step()
        return bodies.held

    held = await asyncio.gather(*(bodies.in_turn(large, parse()) for _ in range(8)))
    assert held == [FREE_BYTES * left for left in (8, 7, 6, 5, 4, 3, 2, 1)]  # bodies that wait count
    assert bodies.held == 0
    took = [end - begin for begin, end in zip(begun, ended, strict=True)]
    free = [begin - end for begin, end in zip(begun[1:], ended[:-1], strict=True)]
    assert all(rest > 0.9 * of for rest, of in zip(free, took[:-1], strict=True))
    turned: list[bool] = []
    asyncio.get_running_loop().call_soon(turned.append, True)
    assert await bodies.in_turn(FREE_BYTES, parse()) == 0
    assert not turned  # a small body is parsed at once
    with pytest.raises(ApiError, match="request bodies"):
        await asyncio.gather(*(bodies.in_turn(11 * FREE_BYTES, parse()) for _ in range(4)))


async def test_error_for_a_large_body_frees_the_memory_of_the_parsed_body() -> None:
    class Built:
        pass

    built: list[weakref.ref[Built]] = []

    def parse() -> Iterator[None]:
        document = Built()
        yield
        built.append(weakref.ref(document))
        try:
            raise ValueError(document)
        except ValueError:
            raise ApiError(ErrorCode.INVALID_VALUE, "it is wrong") from None

    with pytest.raises(ApiError) as caught:
        await BodyBytes(10 * FREE_BYTES).in_turn(2 * FREE_BYTES, parse())
    assert caught.value.message == "it is wrong"
    assert [reference() for reference in built] == [None]


async def test_number_of_long_texts_tokenized_concurrently_is_bounded(
    server, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, now, most = threading.Lock(), 0, 0
    apart = Tokenizer.encode_all

    def encode_all(self: Tokenizer, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.05)
        found = apart(self, texts, add_special_tokens)
        with lock:
            now -= 1
        return found

    monkeypatch.setattr(Tokenizer, "encode_all", encode_all)
    body = {"model": "demo", "prompt": "a " * 10_000, "max_tokens": 1}
    answers = await asyncio.gather(*(server.http.post(COMPLETIONS, json=body) for _ in range(8)))
    assert [answer.status_code for answer in answers] == [400] * 8
    assert most == 2


async def test_large_tokenize_responses_are_built_one_at_a_time(
    server, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, now, most, largest = threading.Lock(), 0, 0, 0
    texts_of = Tokenizer.token_texts

    def token_texts(self: Tokenizer, ids: Any) -> list[str]:
        nonlocal now, most, largest
        with lock:
            now += 1
            most, largest = max(most, now), max(largest, len(ids))
        time.sleep(0.02)
        found = texts_of(self, ids)
        with lock:
            now -= 1
        return found

    monkeypatch.setattr(Tokenizer, "token_texts", token_texts)
    text = "one two " * 12_000
    body = {"prompt": text, "return_token_strs": True}
    answers = await asyncio.gather(*(server.http.post("/tokenize", json=body) for _ in range(4)))
    for answer in answers:
        told = answer.json()
        assert "".join(told["token_strs"]) == text
        assert told["count"] == len(told["tokens"]) > _ENCODE_INLINE_CHARACTERS
    assert (most, largest) == (1, _ENCODE_INLINE_CHARACTERS)


@pytest.mark.parametrize("text", ['{"a":[1,2]},' * 600_000, "[" * 2_000_000, '\\"' * 900_000, "," * 7_000_000])
def test_long_prompt_whose_text_looks_like_json_is_accepted(text: str) -> None:
    body = json.dumps({"model": "demo", "prompt": text, "max_tokens": 1}).encode()
    found, _ = completed(parse_steps(body, completions.FIELDS))
    assert found.prompt == text


def test_body_limit_grows_with_max_model_len() -> None:
    body = json.dumps({"model": "demo", "prompt": [1] * 1_000_000}).encode()
    with pytest.raises(ApiError, match="1000000 values"):
        completed(parse_steps(body, completions.FIELDS))
    found, _ = completed(parse_steps(body, completions.FIELDS, most=most_values(2**20)))
    assert len(found.prompt) == 1_000_000


def test_lenient_server_drops_unknown_fields_of_every_message() -> None:
    body = {"model": "demo", "messages": [HELLO | {"foo": 1}] * 3}
    _, ignored = completed(parse_steps(json.dumps(body).encode(), chat.FIELDS, lenient=True))
    assert ignored == ("messages.0.foo", "messages.1.foo", "messages.2.foo")
    different = {"model": "demo", "messages": [HELLO | {f"foo{at}": 1} for at in range(1000)]}
    with pytest.raises(ApiError, match=r"unknown field: messages\.20\.foo20"):
        completed(parse_steps(json.dumps(different).encode(), chat.FIELDS, lenient=True))


def test_conversation_with_the_maximum_number_of_messages_is_accepted() -> None:
    parts = HELLO | {"content": [{"type": "text", "text": "a"}]}
    text = json.dumps({"model": "demo", "messages": [parts] * MAX_ITEMS}).encode()
    body, _ = completed(parse_steps(text, chat.FIELDS))
    assert len(body.messages) == MAX_ITEMS


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Of each call of the tokenizer: whether it held the event loop, and its characters."""
    calls: list[tuple[bool, int]] = []
    inline, apart = Tokenizer.encode, Tokenizer.encode_all

    def encode(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        calls.append((threading.current_thread() is threading.main_thread(), len(text)))
        return inline(self, text, add_special_tokens)

    def encode_all(self: Tokenizer, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        calls.append((threading.current_thread() is threading.main_thread(), sum(map(len, texts))))
        return apart(self, texts, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    monkeypatch.setattr(Tokenizer, "encode_all", encode_all)
    return calls


async def test_more_prompts_than_queue_places_are_rejected_before_tokenization(
    server, checked, encoded
) -> None:
    body = {"model": "demo", "prompt": ["a"] * 200_000}
    error = checked(await server.http.post(COMPLETIONS, json=body))
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, "prompt")
    assert "at most 512" in error.message
    assert not encoded


async def test_long_prompts_are_tokenized_in_slices_off_the_event_loop(server, checked, encoded) -> None:
    prompts = ["one two " * 500, "three " * 3000, "", *["four " * 1000] * 9]
    body = {"model": "demo", "prompt": prompts, "max_tokens": 1}
    error = checked(await server.http.post(COMPLETIONS, json=body))  # the second is too long for the model
    assert error.code == ErrorCode.INVALID_VALUE  # and the third has no tokens
    assert encoded
    assert not any(in_loop for in_loop, _ in encoded)
    assert sum(size for _, size in encoded) == sum(map(len, prompts))
    assert max(size for _, size in encoded) == 18_000 > _ENCODE_INLINE_CHARACTERS
    assert len(encoded) < len(prompts)


@pytest.mark.parametrize("text", ["lorem ipsum " * 600_000, "\u6f22\u5b57" * 50_000], ids=["ascii", "wide"])
async def test_prompt_far_above_max_model_len_is_not_tokenized_in_full(server, checked, encoded, text) -> None:
    """Encoding it in one piece would take 100 to 210 bytes of memory for each byte of UTF-8."""
    for path, more in ((COMPLETIONS, {"prompt": text}), (CHAT, {"messages": [HELLO | {"content": text}]})):
        encoded.clear()
        error = checked(await server.http.post(path, json={"model": "demo", "max_tokens": 1} | more))
        assert (error.code, error.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, next(iter(more)))
        assert str(len(text))[:3] in error.message
        assert not any(in_loop for in_loop, _ in encoded)
        assert max(size for _, size in encoded) <= _ENCODE_INLINE_CHARACTERS
        assert sum(size for _, size in encoded) < 20 * server.state.max_model_len + _ENCODE_INLINE_CHARACTERS


async def test_equal_token_ids_of_a_long_prompt_share_one_int_object(server) -> None:
    generator = Generator(server.state)
    (ids,) = await generator.encode_all(["one two three four " * 2000])
    assert len({id(token) for token in ids}) == len(set(ids)) < len(ids)


def test_batch_tokenization_equals_single_tokenization(tokenizer: Tokenizer) -> None:
    texts = ["", "hello", " hello\n", "<|im_start|>user\nça va? \U0001f600<|im_end|>", "a" * 5000]
    for special in (True, False):
        assert tokenizer.encode_all(texts, special) == [tokenizer.encode(text, special) for text in texts]
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode_without_gil(ids) == tokenizer.decode(ids)
        assert tokenizer.token_texts(ids) == [tokenizer.token_text(token) for token in ids]


async def test_tokenize_and_detokenize_return_a_long_text_unchanged(server, checked, encoded) -> None:
    text = "one two three " * 5000
    answer = (await server.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert "".join(answer["token_strs"]) == text
    assert encoded == [(False, len(text))]
    answer = (await server.http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert answer == {"prompt": text}
    long = {"prompt": "a" * (max(MAX_BYTES, 8 * server.state.max_model_len) + 1)}
    error = checked(await server.http.post("/tokenize", json=long))
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, "prompt")
    assert str(MAX_BYTES) in error.message
    error = checked(await server.http.post("/detokenize", json={"tokens": [1] * (MAX_TOKENS + 1)}))
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, "tokens")
    assert str(MAX_TOKENS) in error.message


def test_plan_for_a_cpu_includes_the_memory_of_request_bodies() -> None:
    default = Settings.model_fields["max_request_body_bytes"].default
    assert BodyBytes(default).most == BODIES_BYTES


async def test_slowly_arriving_request_bodies_never_exceed_the_common_memory_limit(
    run_server, small_plan
) -> None:
    limit = 1_000_000
    async with run_server(FakeEngine(small_plan()), max_request_body_bytes=limit) as server:
        host, port = server.url.removeprefix("http://").split(":")
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {limit}\r\n\r\n"
        bodies = server.state.bodies
        connections = []
        for _ in range(LARGEST_AT_ONCE):
            before = bodies.held
            connections.append(await asyncio.open_connection(host, int(port)))
            connections[-1][1].write(head.encode() + b" " * (limit - 1))
            await server.until(lambda before=before: bodies.held >= before + limit - 1 - FREE_BYTES)
        large = {"model": "demo", "prompt": "a" * 900_000}
        response = await server.http.post("/v1/completions", json=large)
        assert response.json()["error"]["code"] == ErrorCode.SERVER_OVERLOADED
        assert int(response.headers["retry-after-ms"]) > 0
        assert (await server.complete(max_tokens=1)).status_code == 200  # a small one has room
        for _, writer in connections:
            writer.close()
        await server.until(lambda: bodies.held == 0)
        assert (await server.http.post("/v1/completions", json=large)).status_code == 400  # too long, but read
