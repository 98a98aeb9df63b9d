"""Tests of limits on grammars inside vLLM's engine core, and of the ends of outputs with grammars."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import httpx
import openai
import pytest
from hostile_grammars import HOSTILE
from serving import PATIENCE

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (extra vllm)")


def complete(server: str, **said: Any) -> httpx.Response:
    body = {"model": "demo", "prompt": "The answer is", "max_tokens": 4} | said
    return httpx.post(f"{server}/v1/completions", json=body, trust_env=False, timeout=PATIENCE)


def test_grammars_that_exhaust_time_or_memory_do_not_stop_vllm(server: str) -> None:
    """Each grammar is served within the step's budget or gets a client error; other requests are served."""
    for name, grammar in HOSTILE.items():
        kind = "json" if grammar.kind == "json_schema" else grammar.kind
        wish = {kind: json.loads(grammar.text) if kind == "json" else grammar.text}
        with ThreadPoolExecutor(1) as thread:
            victim = thread.submit(complete, server, max_tokens=20, ignore_eos=True)
            response = complete(server, structured_outputs=wish, n=4, temperature=1)
            assert victim.result().json()["usage"]["completion_tokens"] == 20, name
        if response.status_code != 200:
            assert response.status_code == 400, (name, response.text)
            assert response.json()["error"]["code"] == "invalid_value", name
            assert response.headers["x-should-retry"] == "false", name
    digits = complete(server, structured_outputs={"regex": "[0-9]{3}"}).json()["choices"][0]
    assert digits["text"].isdigit()


def test_grammar_that_exceeds_its_budget_during_generation_is_a_client_error(server: str) -> None:
    """The grammar passes its trial, and the budget is exceeded after the first tokens were sent."""
    said = complete(
        server, structured_outputs={"regex": "(((a{1,50}){1,50}){1,50}){1,50}"}, max_tokens=200, stream=True
    ).text.splitlines()
    (told,) = [line.removeprefix("data: ") for line in said if '"error"' in line]
    error = json.loads(told)["error"]
    assert error["code"] == "invalid_value"
    assert "grammar is too" in error["message"]


def test_output_without_stop_token_ends_when_the_grammar_is_complete(server: str) -> None:
    response = complete(server, structured_outputs={"regex": "[0-9]{3}"}, ignore_eos=True, max_tokens=20)
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert len(choice["text"]) == 3
    assert choice["text"].isdigit()


def test_every_kind_of_structured_output_constraint_takes_effect(client: openai.OpenAI) -> None:
    same: dict[str, Any] = {"model": "demo", "prompt": "The answer is", "temperature": 1, "max_tokens": 60}
    wishes: dict[str, tuple[Any, Any]] = {
        "choice": (["Berlin", "Oslo"], lambda text: text in ("Berlin", "Oslo")),
        "regex": ("[a-f]{4}x", lambda text: text.endswith("x")),
        "grammar": ('root ::= "yes" | "no"', lambda text: text in ("yes", "no")),
        "json": ({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}, json.loads),
    }
    for kind, (wish, holds) in wishes.items():
        found = client.completions.create(**same, n=3, extra_body={"structured_outputs": {kind: wish}})
        assert [choice.finish_reason for choice in found.choices] == ["stop"] * 3, kind
        assert all(holds(choice.text) for choice in found.choices), kind
