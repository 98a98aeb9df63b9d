"""Request options that use or change the logits: penalties, bias, log probabilities and grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
import torch
from invariants import check_invariants
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tonnage.planner.deployment import Deployment
from tonnage.planner.planning.build import make_plan
from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines.chunk import Chunk
from tonnage.server.engines.hf.child import EngineLoop
from tonnage.server.engines.request import GenerationRequest, SamplingParams
from tonnage.server.text.grammar import Grammar

PROMPT = tuple(range(200, 240))
EOS = (2,)


@pytest.fixture(scope="module")
def loop() -> Iterator[EngineLoop]:
    ensure_demo()
    plan = make_plan(
        "demo",
        Deployment(
            dtype="float32",
            kv_cache_memory_bytes=64 << 20,
            max_model_len=512,
            max_num_seqs=8,
            max_num_batched_tokens=64,
        ),
    )
    ours, theirs = Pipe()
    with ours, theirs:
        yield EngineLoop(plan, theirs, 1)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(ensure_demo(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ensure_demo() / "tokenizer.json"))


def ask(loop: EngineLoop, n: int = 1, prompt: tuple[int, ...] = PROMPT, **params: Any) -> list[list[Chunk]]:
    """Run one request of ``n`` sequences; return the chunks of each sequence.

    The block manager's invariants are checked after every step.
    """
    settings: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, **params}
    chunks = loop.add(GenerationRequest("x", prompt, SamplingParams(**settings), n=n))
    while not loop.idle:
        chunks += loop.step()
        check_invariants(loop.scheduler.manager)
    return [[chunk for chunk in chunks if chunk.index == index] for index in range(n)]


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def greedy(model: Any, steps: int, change: Any) -> list[int]:
    """Return the tokens of plain greedy decoding that calls ``change(logits, output)`` before each choice."""
    output: list[int] = []
    with torch.inference_mode():
        for _ in range(steps):
            ids = torch.tensor([[*PROMPT, *output]])
            logits = model(input_ids=ids).logits[0, -1].double()
            change(logits, output)
            output.append(int(logits.argmax()))
    return output


def test_sampling_penalties_change_logits_by_their_formulas(loop: EngineLoop, model: Any) -> None:
    def change(logits: torch.Tensor, output: list[int]) -> None:
        for token in {*PROMPT, *output}:
            logits[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
        for token in set(output):
            logits[token] -= 0.4 * output.count(token) + 0.7

    (said,) = ask(loop, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.7)
    assert tokens_of(said) == greedy(model, 12, change)
    (plain,) = ask(loop)
    assert tokens_of(plain) != tokens_of(said)


def test_logit_bias_can_force_and_forbid_tokens(loop: EngineLoop) -> None:
    (plain,) = ask(loop)
    first = tokens_of(plain)[0]
    (without,) = ask(loop, logit_bias=((first, -100.0),))
    assert first not in tokens_of(without)
    (only,) = ask(loop, logit_bias=((777, 1000.0),))
    assert set(tokens_of(only)) == {777}


def test_min_tokens_forbids_stop_tokens_before_its_limit(loop: EngineLoop) -> None:
    (plain,) = ask(loop)
    stop = (tokens_of(plain)[3],)
    (early,) = ask(loop, stop_token_ids=stop)
    assert len(tokens_of(early)) == tokens_of(plain).index(stop[0])
    (late,) = ask(loop, stop_token_ids=stop, min_tokens=8)
    assert len(tokens_of(late)) >= 8
    assert stop[0] not in tokens_of(late)


def test_logprobs_equal_log_softmax_of_model_logits(loop: EngineLoop, model: Any) -> None:
    """Compare the log probabilities of a request with temperature and penalties, which must not change them."""
    (said,) = ask(loop, logprobs=3, temperature=0.9, seed=4, presence_penalty=0.5)
    output = tokens_of(said)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*PROMPT, *output]])).logits[0]
    wanted = torch.log_softmax(logits.double(), dim=-1)[len(PROMPT) - 1 : -1]
    found = [one for chunk in said for one in chunk.logprobs]
    assert [one.token_id for one in found] == output
    for one, row in zip(found, wanted, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
        top = row.topk(3)
        assert [token for token, _ in one.top] == top.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_prompt_logprobs_of_cached_prompt_in_chunks_equal_model_logprobs(loop: EngineLoop, model: Any) -> None:
    prompt = tuple(np.random.default_rng(2).integers(3, 49000, 150).tolist())
    ask(loop, prompt=prompt)  # its blocks are in the prefix cache now
    said, other = ask(loop, n=2, prompt=prompt, prompt_logprobs=2, max_tokens=3)
    assert not any(chunk.prompt_logprobs for chunk in [*said[1:], *other])
    first, *rest = said[0].prompt_logprobs
    assert first is None
    assert [one.token_id for one in rest if one] == list(prompt[1:])
    with torch.inference_mode():
        wanted = torch.log_softmax(model(input_ids=torch.tensor([prompt])).logits[0].double(), dim=-1)
    for one, row in zip(rest, wanted[:-1], strict=True):
        assert one is not None
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
        assert [value for _, value in one.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_hf_engine_output_matches_a_json_schema(
    loop: EngineLoop, tokenizer: Tokenizer, temperature: float
) -> None:
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    for said in ask(
        loop, n=3, max_tokens=120, temperature=temperature, seed=1, grammar=grammar, stop_token_ids=EOS
    ):
        assert said[-1].finish_reason == "stop"
        answer = json.loads(tokenizer.decode(tokens_of(said)))
        assert set(answer) == {"name", "age"}
        assert isinstance(answer["age"], int)
        assert answer["age"] <= 99


def test_hf_engine_output_matches_a_regex_choice_or_grammar(loop: EngineLoop, tokenizer: Tokenizer) -> None:
    wishes = {
        r"[A-Z]{3}-[0-9]{4}": Grammar("regex", r"[A-Z]{3}-[0-9]{4}"),
        r"yes\.|no \(never\)": Grammar("choice", json.dumps(["yes.", "no (never)"])),
        r"(ab)+c": Grammar("grammar", 'root ::= "ab" root | "abc"'),
    }
    for pattern, grammar in wishes.items():
        for stop in (EOS, ()):  # without a stop token the end of the grammar ends the answer
            (said,) = ask(loop, max_tokens=60, temperature=1.0, seed=3, grammar=grammar, stop_token_ids=stop)
            text = tokenizer.decode(tokens_of(said))
            if said[-1].finish_reason == "stop":
                assert re.fullmatch(pattern, text), text
            else:  # (ab)+ may go on for long
                assert pattern == r"(ab)+c"


def test_custom_stop_token_may_end_grammar_constrained_output_early(
    loop: EngineLoop, tokenizer: Tokenizer
) -> None:
    """A stop token that the grammar permits may end the output before the grammar is complete; EOS may not."""
    comma = tokenizer.token_to_id(",")
    grammar = Grammar("regex", "[0-9]{2},[0-9]{2}")
    for stops in ((*EOS, comma), (comma,)):
        (said,) = ask(loop, grammar=grammar, stop_token_ids=stops, seed=5, temperature=1.0)
        assert said[-1].finish_reason == "stop"
        assert re.fullmatch("[0-9]{2}", tokenizer.decode(tokens_of(said)))
    (whole,) = ask(loop, grammar=grammar, stop_token_ids=EOS, seed=5, temperature=1.0)
    assert re.fullmatch("[0-9]{2},[0-9]{2}", tokenizer.decode(tokens_of(whole)))


def test_invalid_grammar_fails_only_its_own_request(loop: EngineLoop) -> None:
    for grammar in (Grammar("json_schema", '{"type": "nothing"}'), Grammar("regex", "(")):
        ((chunk,),) = ask(loop, grammar=grammar)
        assert chunk.finish_reason == "error"
        assert grammar.kind in (chunk.error or "")
    assert len(tokens_of(ask(loop)[0])) == 12


def test_constraints_that_allow_no_token_fail_the_request(loop: EngineLoop) -> None:
    grammar = Grammar("choice", json.dumps(["yes"]))
    (said,) = ask(loop, grammar=grammar, stop_token_ids=EOS, min_tokens=10)
    assert said[-1].finish_reason == "error"
    assert "allow no token" in (said[-1].error or "")


def test_bad_word_of_several_tokens_forbids_its_last_token_only_after_the_others(loop: EngineLoop) -> None:
    (plain,) = ask(loop)
    first, second, third = tokens_of(plain)[:3]
    (other,) = ask(loop, bad_token_ids=((first, second),))
    assert tokens_of(other)[0] == first
    assert tokens_of(other)[1] != second
    # Only the output counts, not the prompt before it.
    (same,) = ask(loop, bad_token_ids=((PROMPT[-1], first), (second, second, third)))
    assert tokens_of(same) == tokens_of(plain)


def test_allowed_token_ids_exclude_all_other_tokens(loop: EngineLoop) -> None:
    for temperature in (0.0, 1.0):
        (chunks,) = ask(loop, allowed_token_ids=(300, 400), temperature=temperature, seed=3)
        assert set(tokens_of(chunks)) <= {300, 400}
