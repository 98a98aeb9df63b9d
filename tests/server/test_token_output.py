"""Tests of vLLM's return_token_ids and prompt_logprobs, with an engine whose tokens are known.

Their values on the hf engine and behind vLLM: test_fields_honoured, vllm/served/test_fields_honoured.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from tonnage.server.engines.base import Capabilities
from tonnage.server.engines.chunk import Chunk, TokenLogprobs
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.engines.request import BASIC_PARAMS, GenerationRequest
from tonnage.server.http import outbox

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


class Scoring(FakeEngine):
    """An engine that gives each prompt token the log probability -1 and two alternatives."""

    capabilities = Capabilities(BASIC_PARAMS | {"logprobs", "prompt_logprobs"})

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        ids = request.prompt_token_ids
        best = ((7, -0.5), (8, -math.inf))
        scores = (None, *(TokenLogprobs(token, -1.0, best, 2) for token in ids[1:]))
        async for chunk in super().generate(request):
            first = chunk.index == 0 and request.params.prompt_logprobs is not None
            yield replace(chunk, prompt_logprobs=scores) if first else chunk


def chunks(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def tokens_of(events: list[dict[str, Any]], index: int) -> list[int]:
    """Return the ids of all chunks of a choice, together."""
    found: list[int] = []
    for event in events:
        for choice in event["choices"]:
            found += choice.get("token_ids", []) if choice["index"] == index else []
    return found


async def test_completion_returns_token_ids_of_each_prompt_and_choice(
    run_server, small_plan, tokenizer
) -> None:
    ids = tokenizer.encode("one two three four")
    engine = FakeEngine(small_plan(), reply=lambda request, index: itertools.islice(itertools.cycle(ids), 9))
    body = {"model": "demo", "prompt": [[5, 6, 7], [8, 9]], "n": 2, "max_tokens": 5, "return_token_ids": True}
    async with run_server(engine) as server:
        whole = (await server.http.post(COMPLETIONS, json=body)).json()["choices"]
        events = chunks((await server.http.post(COMPLETIONS, json=body | {"stream": True})).text)
        stopped = body | {"prompt": "a", "n": 1, "stop": " two"}
        (cut,) = (await server.http.post(COMPLETIONS, json=stopped)).json()["choices"]
        plain = await server.http.post(COMPLETIONS, json=body | {"return_token_ids": False})
    expected = [*ids, *ids][:5]
    assert [choice["prompt_token_ids"] for choice in whole] == [[5, 6, 7]] * 2 + [[8, 9]] * 2
    assert [choice["token_ids"] for choice in whole] == [expected] * 4
    assert [tokens_of(events, index) for index in range(4)] == [expected] * 4
    told = {
        (c["index"], *c["prompt_token_ids"]) for e in events for c in e["choices"] if "prompt_token_ids" in c
    }
    assert told == {(0, 5, 6, 7), (1, 5, 6, 7), (2, 8, 9), (3, 8, 9)}
    assert (cut["text"], cut["token_ids"], cut["finish_reason"]) == ("one", ids[:2], "stop")
    assert "token_ids" not in plain.text


async def test_chat_completion_returns_token_ids_of_prompt_and_choices(
    run_server, small_plan, tokenizer
) -> None:
    ids = tokenizer.encode("naïve 👩‍👩‍👧 日本語 ok")  # characters of several tokens: chunks without text
    engine = FakeEngine(small_plan(), reply=lambda request, index: iter(ids))
    body = {"model": "demo", "messages": MESSAGES, "n": 2, "max_tokens": 100, "return_token_ids": True}
    async with run_server(engine) as server:
        whole = (await server.http.post(CHAT, json=body)).json()
        events = chunks((await server.http.post(CHAT, json=body | {"stream": True})).text)
        prompt = (await server.http.post("/tokenize", json={"messages": MESSAGES})).json()["tokens"]
        plain = await server.http.post(CHAT, json=body | {"return_token_ids": None})
    assert whole["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in whole["choices"]] == [ids, ids]
    assert [tokens_of(events, index) for index in range(2)] == [ids, ids]
    assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [prompt]
    assert "prompt_token_ids" in events[0]
    assert "token_ids" not in plain.text


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_prompt_logprobs_have_vllms_format(run_server, small_plan, path: str) -> None:
    body = {"model": "demo", "max_tokens": 1, "n": 2, "prompt_logprobs": 2, "return_token_ids": True}
    body |= {"prompt": [[5, 6, 7], [7, 7]]} if path == COMPLETIONS else {"messages": MESSAGES}
    async with run_server(Scoring(small_plan())) as server:
        answer = (await server.http.post(path, json=body)).json()
        refused = await server.http.post(path, json=body | {"stream": True})
        plain = await server.http.post(path, json=body | {"prompt_logprobs": None})
    holders = answer["choices"] if path == COMPLETIONS else [answer]
    for holder in holders:
        first, *scored = holder["prompt_logprobs"]
        ids = holder["prompt_token_ids"]
        assert (first, len(scored)) == (None, len(ids) - 1)
        for token, position in zip(ids[1:], scored, strict=True):
            assert list(position) == list(dict.fromkeys([str(token), "7", "8"]))
            assert (position[str(token)]["logprob"], position[str(token)]["rank"]) == (-1.0, 2)
            assert position["8"] == {
                "logprob": -9999.0,
                "rank": 2,
                "decoded_token": position["8"]["decoded_token"],
            }
    assert len(holders) == (4 if path == COMPLETIONS else 1)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "invalid_value", "prompt_logprobs")
    assert "prompt_logprobs" not in plain.text


async def test_prompt_logprobs_need_an_engine_that_scores_prompts(server) -> None:
    for body in ({"prompt": "a"}, {"messages": MESSAGES}):
        path = CHAT if "messages" in body else COMPLETIONS
        refused = await server.http.post(
            path, json={"model": "demo", "max_tokens": 1, "prompt_logprobs": 0, **body}
        )
        assert refused.json()["error"]["code"] == "unsupported_parameter"
    response = await server.http.post(
        "/v1/responses", json={"model": "demo", "input": "a", "return_token_ids": True}
    )
    assert response.json()["error"]["param"] == "return_token_ids"


@pytest.mark.parametrize("field", ["return_token_ids", "prompt_logprobs"])
async def test_returned_token_ids_and_prompt_logprobs_count_towards_the_buffer_limit(
    run_server, small_plan, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "demo", "prompt": [5] * 100, "n": 4, "max_tokens": 1}
    async with run_server(Scoring(small_plan())) as server:
        monkeypatch.setattr(outbox, "OUTBOX_BYTES", 1000)
        assert (await server.http.post(COMPLETIONS, json=body)).status_code == 200
        response = await server.http.post(COMPLETIONS, json=body | {field: 1 if "log" in field else True})
        assert response.status_code == 503
        assert server.state.outboxes.held == 0
