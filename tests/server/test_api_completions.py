"""POST /v1/completions over a real uvicorn, with the OpenAI SDK; every body checked against the SDK's types."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import Completion as SdkCompletion
from openai.types import CompletionChoice, Model

from tonnage.server.engines.base import Capabilities
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.engines.request import BASIC_PARAMS, GenerationRequest
from tonnage.server.text.tokenizer import Tokenizer

SECRET = "The quick brown fox jumps over the lazy dog. "


class ChunkChoice(CompletionChoice):
    """A choice of a chunk, whose ``finish_reason`` may be null until the last chunk.

    The SDK gives chunks and whole completions one type of choice; OpenAI's stream sends null.
    """

    finish_reason: Any = None


class ChunkCompletion(SdkCompletion):
    choices: list[ChunkChoice]


def nulls(value: Any, path: str = "") -> set[str]:
    """Paths of the nulls in a JSON document, list indices left out."""
    if isinstance(value, dict):
        return set().union(*(nulls(item, f"{path}.{key}" if path else key) for key, item in value.items()))
    if isinstance(value, list):
        return set().union(*(nulls(item, path) for item in value))
    return {path} if value is None else set()


def strict(text: str) -> SdkCompletion:
    """Return a whole completion, parsed strictly.

    OpenAI's document requires ``logprobs`` and permits null.
    """
    assert nulls(json.loads(text)) <= {"choices.logprobs"}
    return SdkCompletion.model_validate_json(text, strict=True)


def events(text: str, *, include_usage: bool = False) -> list[SdkCompletion]:
    """Return the chunks of a stream, each parsed strictly; the stream must end with [DONE].

    With ``include_usage`` each chunk has a usage, which is null in all but the last.
    """
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = []
    for line in lines[:-1]:
        document = json.loads(line)
        assert nulls(document) - {"usage"} <= {"choices.logprobs", "choices.finish_reason"}
        assert ("usage" in document) == include_usage
        if any(choice["finish_reason"] is None for choice in document["choices"]):
            chunks.append(ChunkCompletion.model_validate_json(line, strict=True))
        else:
            chunks.append(SdkCompletion.model_validate_json(line, strict=True))
    return chunks


def saying(text: str, tokenizer) -> Any:
    """Return a reply function that generates ``text`` and then stops."""
    ids = tokenizer.encode(text)

    def reply(request: GenerationRequest, index: int) -> Iterator[int]:
        return iter(ids)

    return reply


async def test_completion_has_finish_reason_and_token_usage(server) -> None:
    answer = strict((await server.complete(prompt="hello there", max_tokens=7)).text)
    assert answer.model == "demo"
    assert [(c.index, c.finish_reason) for c in answer.choices] == [(0, "length")]
    prompt = len(server.state.tokenizer.encode("hello there"))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 7)
    assert answer.usage.total_tokens == prompt + 7
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_max_tokens_defaults_to_16_and_is_limited_by_the_context(run_server, small_plan) -> None:
    async with run_server(FakeEngine(small_plan(max_model_len=64))) as server:
        answer = strict((await server.complete(prompt=[5])).text)
        assert answer.usage.completion_tokens == 16
        answer = strict((await server.complete(prompt=[5] * 60)).text)
        assert answer.usage.completion_tokens == 4
    async with run_server(FakeEngine(small_plan()), default_max_tokens=33) as server:
        assert strict((await server.complete(prompt=[5])).text).usage.completion_tokens == 33


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [("a b", 1), (["a", "b c", "d"], 3), ([1, 2, 3], 1), ([[1, 2], [3]], 2)],
    ids=["string", "strings", "token ids", "token id lists"],
)
async def test_prompts_may_be_strings_token_ids_or_lists_of_them(server, prompt: Any, choices: int) -> None:
    body = {"prompt": prompt, "max_tokens": 3, "n": 2, "temperature": 0}
    answer = strict((await server.complete(**body)).text)
    assert [c.index for c in answer.choices] == list(range(2 * choices))
    texts = [c.text for c in answer.choices]
    assert texts[0::2] == texts[1::2]  # greedy: the n sequences of a prompt are the same
    if isinstance(prompt, list) and isinstance(prompt[0], str | list):
        ones = [strict((await server.complete(**body | {"prompt": one, "n": 1})).text) for one in prompt]
        assert texts[0::2] == [one.choices[0].text for one in ones]
        assert answer.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in ones)
    assert answer.usage.completion_tokens == 3 * 2 * choices


@pytest.mark.parametrize("prompt", ["hello", ["a", "b"]])
async def test_streamed_chunks_add_up_to_the_full_response(server, prompt: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 20, "n": 3, "seed": 11}
    whole = strict((await server.complete(**body)).text)
    response = await server.complete(**body, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response.text, include_usage=True)
    assert len({chunk.id for chunk in chunks}) == 1
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in chunks:
        assert chunk.usage is None
        for choice in chunk.choices:
            assert choice.index not in reasons
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {c.index: c.text for c in whole.choices}
    assert reasons == {c.index: c.finish_reason for c in whole.choices}
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


async def test_openai_sdk_streams_the_full_response(server) -> None:
    stream = await server.openai.completions.create(
        model="demo", prompt="hello", max_tokens=12, seed=1, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage.completion_tokens == 12
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    answer = await server.openai.completions.create(model="demo", prompt="hello", max_tokens=12, seed=1)
    assert answer.choices[0].text == text


async def test_seed_and_sampling_parameters_reach_the_engine(run_server, small_plan) -> None:
    seen: list[GenerationRequest] = []

    def reply(request: GenerationRequest, index: int) -> Iterator[int]:
        seen.append(request)
        return itertools.repeat(100)

    async with run_server(FakeEngine(small_plan(), reply=reply)) as server:
        await server.complete(
            seed=-5, temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, max_tokens=2, stop_token_ids=[9],
            cache_salt="a", user="user-1",
        )  # fmt: skip
        await server.complete(max_tokens=2, top_k=-1, ignore_eos=True)
        eos = server.state.tokenizer.eos_token_ids
    params = seen[0].params
    assert (params.seed, params.temperature, params.top_p, params.top_k, params.min_p) == (
        -5,
        0.5,
        0.25,
        7,
        0.125,
    )
    assert params.max_tokens == 2
    assert params.stop_token_ids == (*eos, 9)
    assert eos
    assert seen[0].cache_salt == "a"
    params = seen[1].params
    assert (params.seed, params.temperature, params.top_p, params.top_k, params.min_p) == (
        None,
        1.0,
        1.0,
        0,
        0.0,
    )
    assert params.stop_token_ids == ()


async def test_equal_seeds_give_equal_outputs(server) -> None:
    texts = [
        [c.text for c in strict((await server.complete(seed=seed, n=2, max_tokens=8)).text).choices]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert texts[0][0] != texts[0][1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("brown", "The quick "),
        ("k b", "The quic"),  # inside one token and across the border to the next
        (["lazy", "fox", "zebra"], "The quick brown "),
        ("Z", SECRET.rstrip()),
        (["dog", "lazy dog"], "The quick brown fox jumps over the "),
    ],
)
async def test_output_ends_before_a_stop_string_and_does_not_contain_it(
    run_server, small_plan, tokenizer, stop: Any, expected: str, stream: bool
) -> None:
    engine = FakeEngine(small_plan(), reply=saying(SECRET.rstrip(), tokenizer))
    async with run_server(engine) as server:
        response = await server.complete(stop=stop, stream=stream, max_tokens=100)
        if stream:
            choices = [choice for chunk in events(response.text) for choice in chunk.choices]
        else:
            choices = strict(response.text).choices
        assert "".join(choice.text for choice in choices) == expected
        assert choices[-1].finish_reason == "stop"


async def test_stop_string_ends_generation_in_the_engine(run_server, small_plan, tokenizer) -> None:
    ids = tokenizer.encode("one two ")
    engine = FakeEngine(small_plan(), reply=lambda request, index: itertools.cycle(ids))
    async with run_server(engine) as server:
        answer = strict((await server.complete(stop="two", max_tokens=2000)).text)
        assert answer.choices[0].text == "one "
        assert answer.usage.completion_tokens <= 3
        assert engine.stats().generation_tokens < 100
        answer = strict((await server.complete(stop="two", max_tokens=20, n=3)).text)
        assert [c.text for c in answer.choices] == ["one "] * 3


async def test_stop_string_ends_only_its_own_sequence(run_server, small_plan, tokenizer) -> None:
    """And what it held does not wait for them: the engine draws no more for it."""
    one, three = tokenizer.encode("one two "), tokenizer.encode("three ")

    def reply(request: Any, index: int) -> Any:
        return itertools.cycle(three if index or len(request.prompt_token_ids) > 1 else one)

    engine = FakeEngine(small_plan(), token_rate=2000, reply=reply)
    async with run_server(engine) as server:
        answer = strict((await server.complete(prompt=[5], stop="two", max_tokens=300, n=3)).text)
        assert [c.finish_reason for c in answer.choices] == ["stop", "length", "length"]
        assert 600 <= engine.stats().generation_tokens < 700
        answer = strict((await server.complete(prompt=[[5], [5, 6]], stop="two", max_tokens=300)).text)
        assert [c.finish_reason for c in answer.choices] == ["stop", "length"]
        assert 900 <= engine.stats().generation_tokens < 1100
        assert engine.stats().pool.used == 0


async def test_stop_strings_are_ignored_before_min_tokens(run_server, small_plan, tokenizer) -> None:
    class Honouring(FakeEngine):
        capabilities = Capabilities(BASIC_PARAMS | {"min_tokens"})

    ids = tokenizer.encode("one two ")
    engine = Honouring(small_plan(), reply=lambda request, index: itertools.cycle(ids))
    async with run_server(engine) as server:
        short = strict((await server.complete(stop="two", max_tokens=100)).text)
        long = strict((await server.complete(stop="two", max_tokens=100, min_tokens=40)).text)
    assert short.choices[0].text == "one "
    assert long.choices[0].finish_reason == "stop"
    assert 40 < long.usage.completion_tokens < 50
    assert long.choices[0].text.count("two") > 5


async def test_finish_reason_is_length_at_max_tokens_and_stop_at_eos(run_server, small_plan, tokenizer) -> None:
    engine = FakeEngine(small_plan(), reply=saying("a b c", tokenizer))
    async with run_server(engine) as server:
        ends = [strict((await server.complete(max_tokens=m)).text).choices[0] for m in (2, 50)]
        assert [end.finish_reason for end in ends] == ["length", "stop"]
        assert ends[1].text == "a b c"
        assert server.state.accounts.outcomes["stop"] == server.state.accounts.outcomes["length"] == 1


async def test_characters_of_several_tokens_are_streamed_as_a_whole(run_server, small_plan, tokenizer) -> None:
    text = "naïve 👩‍👩‍👧 日本語 ok"
    async with run_server(FakeEngine(small_plan(), reply=saying(text, tokenizer))) as server:
        response = await server.complete(max_tokens=200, stream=True)
        pieces = [choice.text for chunk in events(response.text) for choice in chunk.choices]
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


async def test_echo_prepends_the_prompt_to_each_choice(server) -> None:
    tokenizer = server.state.tokenizer
    body = {"max_tokens": 4, "seed": 3}
    plain = strict((await server.complete(prompt="once upon", **body)).text).choices[0].text
    assert strict((await server.complete(prompt="once upon", echo=True, **body)).text).choices[0].text == (
        "once upon" + plain
    )
    ids = tokenizer.encode("once upon")
    response = await server.complete(prompt=[ids, ids], echo=True, stream=True, **body)
    texts = {0: "", 1: ""}
    for chunk in events(response.text):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "once upon" + plain, 1: "once upon" + plain}


async def test_cached_tokens_are_counted_per_cache_salt(server) -> None:
    prompt = list(range(100, 164))  # four blocks; the last token is always computed again

    async def cached(**more: Any) -> int:
        answer = strict((await server.complete(prompt=prompt, max_tokens=2, **more)).text)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert await cached() == 0
    assert await cached() == 48
    assert await cached(cache_salt="mine") == 0
    assert await cached(cache_salt="mine") == 48


async def test_models_and_completions_endpoints_use_the_served_model_name(run_server, small_plan) -> None:
    async with run_server(FakeEngine(small_plan()), served_model_name="org/tiny") as server:
        page = await server.openai.models.list()
        assert [model.id for model in page.data] == ["org/tiny"]
        card = (await server.http.get("/v1/models/org/tiny")).text
        assert not nulls(json.loads(card))
        assert Model.model_validate_json(card, strict=True).id == "org/tiny"
        assert (await server.openai.models.retrieve("org/tiny")).id == "org/tiny"
        assert (await server.complete(model="org/tiny")).status_code == 200
        assert (await server.complete(model="demo")).status_code == 404


async def test_neutral_values_of_unsupported_fields_are_accepted(server) -> None:
    # What langchain-openai and others always send.
    body = {"best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": None,
            "suffix": None, "stop": None, "n": None, "max_tokens": 2, "stream_options": None}  # fmt: skip
    assert (await server.complete(**body)).status_code == 200


async def test_continuous_usage_stats_reports_usage_in_every_chunk(server) -> None:
    """vLLM's continuous_usage_stats, which load tools ask for."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    bodies = {
        "/v1/completions": {"prompt": "hello"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    }
    for path, body in bodies.items():
        body |= {"model": "demo", "max_tokens": 5, "ignore_eos": True, "seed": 1}
        texts = [""]  # of so many tokens
        for count in range(1, 6):
            whole = (await server.http.post(path, json=body | {"max_tokens": count})).json()["choices"][0]
            texts.append(whole["text"] if "text" in whole else whole["message"]["content"])
        body |= {"stream": True}
        response = await server.http.post(path, json=body | {"stream_options": options})
        chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        text = ""
        for chunk in chunks:  # one for each token, unless the server is busy and says several at once
            for choice in chunk["choices"]:
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            assert text == texts[chunk["usage"]["completion_tokens"]]
        assert (text, chunks[-1]["choices"]) == (texts[5], [])
        assert len(set(texts)) == 6
        # Asked for alone it is without effect, as in vLLM.
        alone = await server.http.post(path, json=body | {"stream_options": {"continuous_usage_stats": True}})
        assert '"usage"' not in alone.text


async def test_suffix_requires_fill_in_the_middle_tokens(
    run_server, small_plan, tokenizer_folder, tmp_path
) -> None:
    """Three of the demo tokenizer's own special tokens get the names of StarCoder's."""
    text = (tokenizer_folder / "tokenizer.json").read_text()
    names = {"<repo_name>": "<fim_prefix>", "<file_sep>": "<fim_suffix>", "<gh_stars>": "<fim_middle>"}
    for old, new in names.items():
        text = text.replace(f'"{old}"', f'"{new}"')
    (tmp_path / "tokenizer.json").write_text(text)
    tokenizer = Tokenizer.from_folder(tmp_path)
    seen: list[GenerationRequest] = []

    def reply(request: GenerationRequest, index: int):
        seen.append(request)
        yield from tokenizer.encode("    return")

    async with run_server(FakeEngine(small_plan(), reply=reply), tokenizer=tokenizer) as server:
        body = {"prompt": "def f(x):", "suffix": "\n# end", "max_tokens": 8}
        answer = (await server.complete(**body, echo=True)).json()
        assert answer["choices"][0]["text"] == "def f(x):    return"
        asked = tuple(tokenizer.encode("<fim_prefix>def f(x):<fim_suffix>\n# end<fim_middle>"))
        assert seen[0].prompt_token_ids == asked
        assert answer["usage"]["prompt_tokens"] == len(asked)
        refused = await server.complete(**body | {"prompt": [1, 2]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")
