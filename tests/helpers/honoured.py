"""What each field that `tonnage doctor` prints as honoured is to do, asked of a real server.

One check for each row of server/api/fields.py. Grammars at fault are here too, tools in called.py: the servers
that are asked are the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from called import forced_calls, free_calls
from endpoints import CHAT, COMPLETIONS, RESPONSES, Api
from tokenizers import Tokenizer

from tonnage.server.demo.model import ensure_demo

# ChatML; shows tools as Hermes does, and what chat_template_kwargs name.
TEMPLATE = """\
{{- mark or '' }}{{ reasoning_effort or '' }}{% if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")  # beside TEMPLATE

TOKENIZER = Tokenizer.from_file(str(ensure_demo() / "tokenizer.json"))
EOS = TOKENIZER.token_to_id("<|im_end|>")
WORD = TOKENIZER.encode(" fox").ids[0]
ONLY_WORD, ONLY_EOS = {str(WORD): 100}, {str(EOS): 100}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3}
SCHEMA = {
    "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip
LONG = "one two three four five six seven eight nine ten " * 30


# -- one function for each field -----------------------------------------------------------------------------


def model(api: Api) -> None:
    assert api.post(model="other").json()["error"]["code"] == "model_not_found"
    assert api.ask().document["model"] == "demo"


def limit(name: str) -> Callable[[Api], None]:
    def check(api: Api) -> None:
        for tokens in (1, 5):
            answer = api.ask(tokens=None, ignore_eos=True, **{"max_tokens": None, name: tokens})
            assert (answer.completion_tokens, answer.finishes) == (tokens, ["length"])

    return check


def n(api: Api) -> None:
    assert len(api.ask(n=2).texts) == 2


def stream(api: Api) -> None:
    assert api.streamed() == api.ask().text != ""


def include_usage(api: Api) -> None:
    answer = api.ask()
    last = api.events(stream_options={"include_usage": True})[-1]
    usage = last["response"]["usage"] if api.path == RESPONSES else last["usage"]
    assert usage["total_tokens"] == answer.prompt_tokens + answer.completion_tokens
    if api.path != RESPONSES:  # its last event has the usage always
        assert not any("usage" in event for event in api.events())


def continuous_usage(api: Api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = api.events(stream_options=options, ignore_eos=True)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert (counts[0] < 8, counts[-1]) == (True, 8)


def stop(api: Api) -> None:
    whole = api.ask(tokens=12).text
    word = whole.split()[1]
    answer = api.ask(tokens=12, stop=[word])
    assert (answer.text, answer.finishes) == (whole[: whole.index(word)], ["stop"])


def seed(api: Api) -> None:
    texts = [api.ask(tokens=16, temperature=1.5, seed=seed).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def temperature(api: Api) -> None:
    greedy = api.ask(tokens=16).text
    assert greedy == api.ask(tokens=16).text
    assert api.ask(tokens=16, temperature=2.0, seed=1).text != greedy


def nucleus(**narrow: Any) -> Callable[[Api], None]:
    """Return a check that a nucleus of one token is greedy with every seed.

    Eight tokens: among more, some CPUs compute two equal largest logits in bfloat16, and a nucleus has both.
    """

    def check(api: Api) -> None:
        greedy, wide = api.ask(tokens=8).text, api.ask(tokens=8, **SAMPLED).text
        assert api.ask(tokens=8, **SAMPLED, **narrow).text == greedy != wide

    return check


def ignore_eos(api: Api) -> None:
    assert api.ask(logit_bias=ONLY_EOS).finishes == ["stop"]
    answer = api.ask(logit_bias=ONLY_EOS, ignore_eos=True)
    assert (answer.finishes, answer.completion_tokens) == (["length"], 8)


def stop_token_ids(api: Api) -> None:
    answer = api.ask(logit_bias=ONLY_WORD, stop_token_ids=[WORD])
    assert (answer.text, answer.finishes, answer.completion_tokens) == ("", ["stop"], 1)


def cache_salt(api: Api) -> None:
    mine = {"prompt": LONG, "cache_salt": f"salt of {api.path}"}
    api.ask(**mine)
    assert api.ask(**mine).cached >= 128  # a block of vLLM on a CPU
    assert api.ask(prompt=LONG, cache_salt=f"another of {api.path}").cached == 0


def request_id(api: Api) -> None:
    response = api.post(request_id="my-id-1")
    assert response.headers["x-request-id"] == "my-id-1"
    assert "my-id-1" in response.json()["id"]


def add_special_tokens(api: Api) -> None:
    """Check that the prompt's token count with ``add_special_tokens`` equals the tokenizer's count.

    The demo model's tokenizer adds no special tokens, so the text is equal with and without them.
    """
    for flag in (True, False):
        if api.path == COMPLETIONS:
            expected = api.tokens(prompt="hello", add_special_tokens=flag)
        else:
            messages = [{"role": "user", "content": "hello"}]
            expected = api.tokens(messages=messages, add_special_tokens=flag)
        assert api.ask(prompt="hello", add_special_tokens=flag).prompt_tokens == expected


def penalty(**flags: Any) -> Callable[[Api], None]:
    """Return a check that the given penalties change the output for a repetitive prompt."""

    def check(api: Api) -> None:
        given = {"prompt": "a b a b a b a b a b a b", "tokens": 32, "ignore_eos": True}
        before, after = (api.ask(**given, **more).text for more in ({}, flags))
        assert before != after

    return check


def logit_bias(api: Api) -> None:
    assert api.ask(logit_bias=ONLY_WORD).text.split() == ["fox"] * 8


def min_tokens(api: Api) -> None:
    assert api.ask(logit_bias=ONLY_EOS).completion_tokens == 1
    assert api.ask(logit_bias=ONLY_EOS, min_tokens=5).completion_tokens == 6


def response_format(api: Api) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    assert json.loads(api.ask(tokens=60, response_format=form).text) in ({"a": 1}, {"a": 2})
    assert api.ask(tokens=4, response_format={"type": "json_object"}).text.lstrip().startswith("{")


def text_format(api: Api) -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    answer = api.ask(tokens=60, text={"format": form})
    assert json.loads(answer.text) in ({"a": 1}, {"a": 2})
    assert answer.document["text"]["format"]["type"] == "json_schema"


def structured_outputs(api: Api) -> None:
    assert api.ask(tokens=20, structured_outputs={"choice": ["Berlin", "Oslo"]}).text in ("Berlin", "Oslo")
    assert api.ask(tokens=20, structured_outputs={"regex": "[0-9]{3}"}).text.isdigit()
    assert json.loads(api.ask(tokens=60, structured_outputs={"json": SCHEMA}).text)["a"] in (1, 2)
    assert api.ask(tokens=20, structured_outputs={"grammar": 'root ::= "yes" | "no"'}).text in ("yes", "no")


def priority(api: Api) -> None:
    """While requests fill the batch a late one with a lower number is let in before an earlier one."""
    assert any(in_line_together(api, 60 * longer) for longer in (1, 2, 4))
    assert api.post(priority=2000).json()["error"]["param"] == "priority"


def in_line_together(api: Api, tokens: int) -> bool:
    """Check the order of two queued requests; return whether both were seen waiting at once."""
    sequences = api.http.get("/memory").json()["plan"]["deployment"]["max_num_seqs"]
    ended: dict[str, float] = {}

    def one(name: str, tokens: int, by: Api = api, **more: Any) -> None:
        by.ask(prompt=f"{name} {LONG}", tokens=tokens, ignore_eos=True, **more)
        ended[name] = time.monotonic()

    with ThreadPoolExecutor(4) as pool:
        # One has all places but one, and they are free long after that one. (Greedy sequences of one prompt
        # are computed once.)
        many = pool.submit(
            one, "many", 2 * tokens, Api(api.http, COMPLETIONS), n=sequences - 1, priority=-5, **SAMPLED
        )
        single = pool.submit(one, "single", tokens, priority=-5)
        seen = seen_before(single, api, running=sequences)
        low = pool.submit(one, "low", 12, priority=9)
        seen = seen and seen_before(single, api, waiting=1)
        high = pool.submit(one, "high", 1, priority=-9)
        seen = seen and seen_before(single, api, waiting=2)
        for future in (many, single, low, high):
            future.result()
    assert not seen or ended["high"] < ended["low"] < ended["many"]
    return seen


def seen_before(end: Future[None], api: Api, **wanted: int) -> bool:
    """Return whether the wanted number of requests was seen in a state before ``end``."""
    ((state, count),) = wanted.items()
    while metric(api.http, "tonnage_engine_requests", f'state="{state}"') < count:
        if end.done():
            return False
        time.sleep(0.02)
    return True


def metric(http: httpx.Client, name: str, label: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    lines = [line for line in lines if line.startswith(f"{name}{{") and label in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def prompt(api: Api) -> None:
    ids = TOKENIZER.encode("The capital of France is").ids
    expected = api.ask().text
    for given in (ids, ["The capital of France is"], [ids]):
        assert api.ask(prompt=given).text == expected


def echo(api: Api) -> None:
    assert api.ask(echo=True).text == "The capital of France is" + api.ask().text


def suffix(api: Api) -> None:
    """Check that ``suffix`` uses the fill-in-the-middle tokens, or is rejected if the tokenizer has none."""
    response = api.post(suffix=" and so on.")
    if TOKENIZER.token_to_id("<fim_prefix>") is None:
        assert response.json()["error"]["param"] == "suffix"
    else:
        asked = "<fim_prefix>The capital of France is<fim_suffix> and so on.<fim_middle>"
        assert api.read(response.json()).text == api.ask(prompt=asked).text


def completion_logprobs(api: Api) -> None:
    lists = api.ask(logprobs=2, tokens=3, ignore_eos=True).document["choices"][0]["logprobs"]
    assert len(lists["tokens"]) == 3
    for chosen, top in zip(lists["token_logprobs"], lists["top_logprobs"], strict=True):
        assert len(top) == 2
        assert chosen == max(top.values()) <= 0  # greedy
    hot = api.ask(logprobs=1, tokens=24, temperature=2, seed=3, ignore_eos=True)  # seldom the likeliest
    lists = hot.document["choices"][0]["logprobs"]
    for token, chosen, top in zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True):
        assert top[token] == chosen
    assert max(len(top) for top in lists["top_logprobs"]) == 2


def best_of(api: Api) -> None:
    """Check that ``best_of`` returns the sequence with the highest mean log probability."""
    given = {"tokens": 6, "temperature": 1.5, "seed": 5, "ignore_eos": True}
    both = api.ask(**given, n=2, logprobs=0).document["choices"]
    means = {c["text"]: sum(c["logprobs"]["token_logprobs"]) / 6 for c in both}
    assert api.ask(**given, best_of=2).text == max(means, key=means.__getitem__)


def messages(api: Api) -> None:
    said = [{"role": "system", "content": "x"}, {"role": "user", "content": "hello"}]
    assert api.ask(messages=said).prompt_tokens == api.tokens(messages=said)


def add_generation_prompt(api: Api) -> None:
    said = [{"role": "user", "content": "hello"}]
    with_it, without = (
        api.ask(messages=said, add_generation_prompt=flag).prompt_tokens for flag in (True, False)
    )
    assert with_it - without == len(TOKENIZER.encode("<|im_start|>assistant\n").ids)


def continue_final_message(api: Api) -> None:
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "The capital of"}]
    answer = api.ask(messages=said, add_generation_prompt=False, continue_final_message=True)
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nThe capital of"
    assert answer.prompt_tokens == len(TOKENIZER.encode(text).ids)
    assert answer.text == Api(api.http, COMPLETIONS).ask(prompt=text).text


def chat_template_kwargs(api: Api) -> None:
    more = api.ask(chat_template_kwargs={"mark": "fox fox"}).prompt_tokens - api.ask().prompt_tokens
    assert more == len(TOKENIZER.encode("fox fox").ids)


def effort(field: str, of: Callable[[str], Any]) -> Callable[[Api], None]:
    def check(api: Api) -> None:
        more = api.ask(**{field: of("xhigh")}).prompt_tokens - api.ask().prompt_tokens
        assert more == len(TOKENIZER.encode("xhigh").ids)
        assert "banana" in api.post(**{field: of("banana")}).json()["error"]["message"]

    return check


def chat_logprobs(api: Api) -> None:
    choice = api.ask(logprobs=True, tokens=3, ignore_eos=True).document["choices"][0]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == choice["message"]["content"]


def top_logprobs(api: Api) -> None:
    choice = api.ask(logprobs=True, top_logprobs=3, tokens=3, ignore_eos=True).document["choices"][0]
    for token in choice["logprobs"]["content"]:
        assert [top["logprob"] for top in token["top_logprobs"]] == sorted(
            (top["logprob"] for top in token["top_logprobs"]), reverse=True
        )
        assert (len(token["top_logprobs"]), token["top_logprobs"][0]["token"]) == (3, token["token"])


def response_input(api: Api) -> None:
    said = [{"role": "user", "content": "The capital of France is"}]
    assert api.ask(input=said).text == api.ask().text == Api(api.http, CHAT).ask().text


def instructions(api: Api) -> None:
    said = [{"role": "system", "content": "Be x"}, {"role": "user", "content": "The capital of France is"}]
    answer = api.ask(instructions="Be x")
    assert answer.prompt_tokens == api.tokens(messages=said)
    assert answer.document["instructions"] == "Be x"


def metadata(api: Api) -> None:
    assert api.ask(metadata={"a": "b"}).document["metadata"] == {"a": "b"}


def skip_special_tokens(api: Api) -> None:
    special: dict[str, Any] = {"logit_bias": {str(TOKENIZER.token_to_id("<repo_name>")): 100}, "tokens": 2}
    assert api.ask(**special).text == ""
    assert api.ask(**special, skip_special_tokens=False).text == "<repo_name><repo_name>"


def include_stop_str_in_output(api: Api) -> None:
    stopped: dict[str, Any] = {"logit_bias": ONLY_WORD, "stop": ["x f"]}
    assert api.ask(**stopped).text == " fo"
    assert api.ask(**stopped, include_stop_str_in_output=True).text == " fox f"
    assert api.streamed(**stopped, include_stop_str_in_output=True) == " fox f"


def allowed_token_ids(api: Api) -> None:
    assert api.ask(allowed_token_ids=[WORD], tokens=3).text == " fox fox fox"
    assert "allowed_token_ids" in api.post(allowed_token_ids=[10**6]).json()["error"]["message"]


def bad_words(api: Api) -> None:
    """Check a word of one token, and words of several tokens whose beginning remains possible."""
    assert "fox" not in api.ask(logit_bias=ONLY_WORD, bad_words=["fox"], ignore_eos=True).text
    text = api.ask(tokens=16).text
    first, second = text.split()[:2]
    assert f"{first} {second}" not in api.ask(tokens=16, bad_words=[f"{first} {second}"]).text
    assert text == api.ask(tokens=16, bad_words=["unlikely words"]).text


def truncate_prompt_tokens(api: Api) -> None:
    assert api.ask(prompt=LONG, truncate_prompt_tokens=5).prompt_tokens == 5
    assert api.ask(prompt=LONG * 9, truncate_prompt_tokens=-1).finishes == ["length"]
    assert "no token" in api.post(truncate_prompt_tokens=0).json()["error"]["message"]


def return_token_ids(api: Api) -> None:
    """Check the ids of prompts and answers, whole and streamed, against the tokenizer and the usage."""
    given: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True, "n": 2, **SAMPLED}
    answer = api.ask(**given)
    holders = answer.document["choices"] if api.path == COMPLETIONS else [answer.document]
    for holder in holders:
        assert len(holder["prompt_token_ids"]) == answer.prompt_tokens
    if api.path == COMPLETIONS:
        assert holders[1]["prompt_token_ids"] == TOKENIZER.encode("The capital of France is").ids
    ids = {choice["index"]: choice["token_ids"] for choice in answer.document["choices"]}
    for index, text in enumerate(answer.texts):
        assert len(ids[index]) == 8
        assert TOKENIZER.decode(ids[index]) == text
    events = api.events(**given)
    streamed: dict[int, list[int]] = {0: [], 1: []}
    for choice in (choice for event in events for choice in event["choices"]):
        streamed[choice["index"]] += choice.get("token_ids", [])
    assert streamed == ids
    prompts = [
        holder["prompt_token_ids"]
        for event in events
        for holder in [event, *event["choices"]]
        if "prompt_token_ids" in holder
    ]
    assert prompts == [holder["prompt_token_ids"] for holder in holders]
    assert "token_ids" not in api.post().text


def prompt_logprobs(api: Api) -> None:
    """Check prompt log probabilities against the prompt's ids and, in completions, those of an echo."""
    answer = api.ask(prompt_logprobs=2, return_token_ids=True).document
    holder = answer["choices"][0] if api.path == COMPLETIONS else answer
    first, *scored = holder["prompt_logprobs"]
    ids = holder["prompt_token_ids"]
    assert (first, len(scored)) == (None, len(ids) - 1)
    for token, position in zip(ids[1:], scored, strict=True):
        chosen = position[str(token)]
        assert chosen["decoded_token"] == TOKENIZER.decode([token], skip_special_tokens=False)
        ranks = sorted(entry["rank"] for entry in position.values())
        assert ranks == ([1, 2] if chosen["rank"] <= 2 else [1, 2, chosen["rank"]])
        best = max(position.values(), key=lambda entry: entry["logprob"])
        assert best["rank"] == 1
    if api.path == COMPLETIONS:
        echoed = api.ask(echo=True, logprobs=0, prompt_logprobs=0).document["choices"][0]
        values = [position[str(token)]["logprob"] for token, position in zip(ids[1:], scored, strict=True)]
        assert echoed["logprobs"]["token_logprobs"][1 : len(ids)] == pytest.approx(values, abs=1e-3)
        assert all(len(position) == 1 for position in echoed["prompt_logprobs"][1:])
    error = api.post(prompt_logprobs=0, stream=True).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "prompt_logprobs")
    assert api.post(prompt_logprobs=21).json()["error"]["param"] == "prompt_logprobs"


GENERATION: dict[str, Callable[[Api], None]] = {
    "skip_special_tokens": skip_special_tokens,
    "include_stop_str_in_output": include_stop_str_in_output,
    "allowed_token_ids": allowed_token_ids,
    "bad_words": bad_words,
    "truncate_prompt_tokens": truncate_prompt_tokens,
    "model": model,
    "stream": stream,
    "stream_options": include_usage,
    "stream_options.include_usage": include_usage,
    "stop": stop,
    "seed": seed,
    "temperature": temperature,
    "top_p": nucleus(top_p=1e-6),
    "top_k": nucleus(top_k=1),
    "min_p": nucleus(min_p=1.0),
    "ignore_eos": ignore_eos,
    "stop_token_ids": stop_token_ids,
    "cache_salt": cache_salt,
    "request_id": request_id,
    "add_special_tokens": add_special_tokens,
    "presence_penalty": penalty(presence_penalty=2.0),
    "frequency_penalty": penalty(frequency_penalty=2.0),
    "repetition_penalty": penalty(repetition_penalty=1.5),
    "logit_bias": logit_bias,
    "min_tokens": min_tokens,
    "structured_outputs": structured_outputs,
    "priority": priority,
}
BOTH: dict[str, Callable[[Api], None]] = GENERATION | {
    "max_tokens": limit("max_tokens"),
    "n": n,
    "stream_options.continuous_usage_stats": continuous_usage,
    "response_format": response_format,
    "return_token_ids": return_token_ids,
    "prompt_logprobs": prompt_logprobs,
}
CHECKS: dict[str, dict[str, Callable[[Api], None]]] = {
    COMPLETIONS: BOTH
    | {
        "prompt": prompt,
        "echo": echo,
        "suffix": suffix,
        "logprobs": completion_logprobs,
        "best_of": best_of,
    },
    CHAT: BOTH
    | {
        "messages": messages,
        "max_completion_tokens": limit("max_completion_tokens"),
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "chat_template_kwargs": chat_template_kwargs,
        "reasoning_effort": effort("reasoning_effort", lambda value: value),
        "logprobs": chat_logprobs,
        "top_logprobs": top_logprobs,
    },
    RESPONSES: GENERATION
    | {
        "input": response_input,
        "instructions": instructions,
        "max_output_tokens": limit("max_output_tokens"),
        "metadata": metadata,
        "chat_template_kwargs": chat_template_kwargs,
        "reasoning": effort("reasoning", lambda value: {"effort": value}),
        "text": text_format,
    },
}
# Checked by forced_calls and free_calls, and in server/test_reasoning.
TOOLS = {"tools", "tool_choice", "parallel_tool_calls", "include_reasoning"}

ROWS = [(path, field) for path, checks in CHECKS.items() for field in checks]
ONCE = list({(field, check): (path, field) for path, field in reversed(ROWS)
             for check in [CHECKS[path][field]]}.values())[::-1]  # fmt: skip


# -- a request at fault in what only the engine can see ------------------------------------------------------

AT_FAULT: dict[str, dict[str, Any]] = {
    "regex": {"structured_outputs": {"regex": "((("}},
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "x"}}}
    },
    "impossible schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "string", "minLength": 5, "maxLength": 2}},
        },
    },
    # After yes only an end may come, which min_tokens forbids.
    "no token": {"structured_outputs": {"choice": ["yes"]}, "min_tokens": 10, "max_tokens": 20},
}


def refused(http: httpx.Client, fault: str) -> None:
    """Check for a 400 that is counted as rejected and leaves the engine healthy."""

    def rejected() -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith("tonnage_requests_total{") and 'outcome="rejected"' in line
        )

    before = rejected()
    for path in (COMPLETIONS, CHAT):
        response = Api(http, path).post(**AT_FAULT[fault])
        assert (response.status_code, response.headers["x-should-retry"]) == (400, "false"), response.text
        assert response.json()["error"]["code"] == "invalid_value"
        # Of a stream the first tokens may have gone out: then it is the last event.
        lines = Api(http, path).post(stream=True, **AT_FAULT[fault]).text.splitlines()
        (told,) = [line.removeprefix("data: ") for line in lines if '"error"' in line]
        assert json.loads(told)["error"]["code"] == "invalid_value"
    assert rejected() == before + 4
    assert Api(http, COMPLETIONS).ask().text


# -- the tests of both backends ------------------------------------------------------------------------------


def checked(rows: list[tuple[str, str]]) -> type:
    """Return a class with the tests of a server: the given ``rows``, grammars and tools.

    The tests reach the server through the fixtures ``http`` and ``client``.
    """

    class Tests:
        @pytest.mark.parametrize(("path", "field"), rows)
        def test_honoured_request_field_has_its_effect(self, http: httpx.Client, path: str, field: str) -> None:
            CHECKS[path][field](Api(http, path))

        @pytest.mark.parametrize("fault", AT_FAULT)
        def test_invalid_grammar_is_a_client_error(self, http: httpx.Client, fault: str) -> None:
            refused(http, fault)

        def test_demo_model_calls_a_tool_with_tool_choice_required_or_named(
            self, client: openai.OpenAI
        ) -> None:
            forced_calls(client)

        def test_demo_model_calls_a_tool_with_tool_choice_auto(self, client: openai.OpenAI) -> None:
            free_calls(client)

    return Tests
