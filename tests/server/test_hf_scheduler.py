"""The scheduler with the real block manager and no model: queueing, priorities and preemption."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hf_steps import finish, publish_and_fork
from invariants import check_invariants

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.planner.deployment import Deployment
from tonnage.planner.planning.build import make_plan
from tonnage.planner.plans import Plan
from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines.chunk import Chunk
from tonnage.server.engines.grammars.library import GrammarError
from tonnage.server.engines.hf.scheduler import HFScheduler
from tonnage.server.engines.hf.sequence import HFSequence
from tonnage.server.engines.pool_stats import LAWS_EVERY, sample_laws
from tonnage.server.engines.request import GenerationRequest, SamplingParams
from tonnage.server.engines.stats import AutoStats
from tonnage.server.engines.step_pace import LEAST_TOKENS
from tonnage.server.text.grammar import Grammar


def plan_for(blocks: int, **changes: int) -> Plan:
    ensure_demo()
    settings = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64, **changes}
    size = make_plan("demo", Deployment(dtype="float32", **settings)).kv_cache.layout.bytes_per_block
    return make_plan("demo", Deployment(dtype="float32", kv_cache_memory_bytes=(blocks + 1) * size, **settings))


def following(sequence: HFSequence) -> int:
    """Return a next token that depends on every token so far, so that any mistake in them changes it."""
    return 3 + (sum(i * token for i, token in enumerate(sequence.tokens, 1)) + sequence.index) % 40000


def following_of(tokens: tuple[int, ...]) -> int:
    return 3 + sum(i * token for i, token in enumerate(tokens, 1)) % 40000


def step(scheduler: HFScheduler) -> list[Chunk]:
    batch, picked, chunks = scheduler.schedule()
    if batch is not None:
        for at, sequence in enumerate(picked):  # what the model would be given is what the sequence is
            span = slice(int(batch.query_start[at]), int(batch.query_start[at + 1]))
            assert batch.token_ids[span].tolist() == np.asarray(sequence.tokens)[batch.positions[span]].tolist()
        draws = publish_and_fork(scheduler, picked)
        chunks += finish(scheduler, draws, [following(draw.sequence) for draw in draws])
    check_invariants(scheduler.manager)
    return chunks


def run(scheduler: HFScheduler, requests: list[GenerationRequest]) -> dict[tuple[str, int], list[int]]:
    said: dict[tuple[str, int], list[int]] = {}
    for request in requests:
        scheduler.add(request)
    while not scheduler.idle:
        for chunk in step(scheduler):
            assert chunk.error is None
            said.setdefault((chunk.request_id, chunk.index), []).extend(chunk.token_ids)
    assert scheduler.manager.stats().used == 0
    return said


def requests(count: int) -> list[GenerationRequest]:
    rng = np.random.default_rng(0)
    return [
        GenerationRequest(
            str(i),
            tuple(rng.integers(3, 40000, 5 + 17 * (i % 6)).tolist()),
            SamplingParams(max_tokens=20 + 30 * (i % 3), temperature=0.0),
            n=1 + (i % 4 == 3),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("mode", [AdmissionMode.GUARANTEED, AdmissionMode.GREEDY, AdmissionMode.PREDICTIVE])
def test_all_admission_modes_generate_equal_tokens_in_a_small_pool(mode: AdmissionMode) -> None:
    roomy = HFScheduler(plan_for(400))
    wanted = run(roomy, requests(24))
    assert {key[0] for key in wanted} == {str(i) for i in range(24)}
    scheduler = HFScheduler(plan_for(24), policy=Policy(mode))
    assert run(scheduler, requests(24)) == wanted
    assert scheduler.counters.prompt_tokens == sum(len(r.prompt_token_ids) for r in requests(24))
    if mode is AdmissionMode.GUARANTEED:
        assert scheduler.counters.preemptions == 0
    if mode is AdmissionMode.GREEDY:
        assert scheduler.counters.preemptions > 0
    assert scheduler.stats().preemptions == scheduler.counters.preemptions


def test_request_with_the_lower_priority_number_starts_first() -> None:
    scheduler = HFScheduler(plan_for(40, max_num_seqs=1, max_num_batched_tokens=32))
    params = SamplingParams(max_tokens=4, temperature=0.0)
    for name, priority in (("a", 0), ("late", 5), ("early", -5)):
        scheduler.add(GenerationRequest(name, (5, 6, 7), params, priority=priority))
    order: list[str] = []
    while not scheduler.idle:
        order += [chunk.request_id for chunk in step(scheduler) if chunk.finish_reason]
    assert order == ["early", "a", "late"]


def test_abort_frees_waiting_running_and_preempted_requests() -> None:
    scheduler = HFScheduler(plan_for(24), policy=Policy(AdmissionMode.GREEDY))
    todo = requests(24)
    for request in todo:
        scheduler.add(request)
    while not scheduler.counters.preemptions:
        step(scheduler)
    for request in todo:
        reasons = [chunk.finish_reason for chunk in scheduler.abort(request.request_id)]
        assert set(reasons) <= {"abort"}
        check_invariants(scheduler.manager)
    assert scheduler.idle
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.pool.used, stats.pool.reserved) == (0, 0, 0, 0)


def test_requests_wait_for_blocks_when_every_layer_has_a_sliding_window(tmp_path: Path) -> None:
    config = {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 50000,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "sliding_window": 64,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    size = make_plan(str(tmp_path), Deployment(**settings)).kv_cache.layout.bytes_per_block
    plan = make_plan(str(tmp_path), Deployment(kv_cache_memory_bytes=25 * size, **settings))
    scheduler = HFScheduler(plan)
    said = run(scheduler, requests(24))
    assert said == run(HFScheduler(plan_for(400)), requests(24))
    assert scheduler.counters.admissions["wait", "blocks"] > 0


def test_auto_mode_stats_include_step_costs() -> None:
    scheduler = HFScheduler(plan_for(40), policy=Policy(AdmissionMode.AUTO))
    assert scheduler.stats().auto == AutoStats()
    assert HFScheduler(plan_for(40)).stats().auto is None
    run(scheduler, requests(48))
    told = scheduler.stats().auto
    assert told is not None
    assert told.cost is not None
    assert sum(told.parts.values()) > 0
    assert (told.share, told.fallbacks) == (None, 0)


def test_violated_block_manager_invariant_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = HFScheduler(plan_for(40))
    for request in requests(2):
        scheduler.add(request)
    for _ in range(4):
        step(scheduler)
    assert scheduler.stats().invariant_violations == 0
    refs = scheduler.manager.pool.refs
    block = int(scheduler.manager.tables[0][0, 0])
    refs[block] += 1
    sample_laws(scheduler.manager, LAWS_EVERY - 1)
    assert scheduler.stats().invariant_violations == 0
    scheduler.core.steps = LAWS_EVERY - 1
    scheduler.schedule()
    assert scheduler.stats().invariant_violations == 1
    assert "reference counts" in caplog.text


def test_each_finished_output_of_n_frees_its_blocks_immediately() -> None:
    scheduler = HFScheduler(plan_for(40, max_num_batched_tokens=32))
    prompt = tuple(range(100, 120))
    params = SamplingParams(max_tokens=60, temperature=0.0)
    scheduler.add(GenerationRequest("x", prompt, params, n=3))
    assert scheduler.abort("x", 1) == []  # there are no forks yet: it stands for all
    said: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for _ in range(30):
        for chunk in step(scheduler):
            said[chunk.index] += chunk.token_ids
    before = scheduler.manager.stats()
    assert [(c.index, c.finish_reason) for c in scheduler.abort("x", 1)] == [(1, "abort")]
    assert scheduler.abort("x", 1) == []
    check_invariants(scheduler.manager)
    after = scheduler.manager.stats()
    assert after.used < before.used
    assert after.reserved < before.reserved
    while not scheduler.idle:
        for chunk in step(scheduler):
            said[chunk.index] += chunk.token_ids
    assert [len(said[index]) for index in range(3)] == [60, 30, 60]
    assert scheduler.manager.stats().used == 0
    alone = run(HFScheduler(plan_for(40)), [GenerationRequest("x", prompt, params, n=3)])
    assert (said[0], said[2]) == (alone["x", 0], alone["x", 2])


def test_single_preempted_output_of_n_can_be_aborted() -> None:
    scheduler = HFScheduler(plan_for(24), policy=Policy(AdmissionMode.GREEDY, watermark=0.0))
    params = SamplingParams(max_tokens=100, temperature=0.0)
    for name in "ab":
        scheduler.add(GenerationRequest(name, tuple(range(50, 80)), params, n=2, cache_salt=name))
    while not scheduler.counters.preemptions:
        step(scheduler)
    waiting = next(entry for entry in scheduler.entries.values() if entry.generated)
    name, index = waiting.request.request_id, waiting.index
    assert [(c.request_id, c.index) for c in scheduler.abort(name, index)] == [(name, index)]
    ended = {(name, index)}
    while not scheduler.idle:
        ended |= {(c.request_id, c.index) for c in step(scheduler) if c.finish_reason == "length"}
    assert ended == {(name, index) for name in "ab" for index in range(2)}


def test_prompts_with_prompt_logprobs_take_as_many_steps_as_other_prompts() -> None:
    """Several prompts request the log probabilities of every token at once."""
    scheduler = HFScheduler(plan_for(100, max_num_seqs=8, max_num_batched_tokens=64))
    params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=0)
    for number in range(6):
        plain = SamplingParams(max_tokens=9, temperature=0.0)
        prompt = tuple(range(10 * number + 3, 10 * number + 40))
        scheduler.add(GenerationRequest(str(number), prompt, plain if number % 3 == 2 else params))
    steps = rows = 0
    while not scheduler.idle:
        batch, picked, _ = scheduler.schedule()
        assert batch is not None
        steps += any(s.length == s.prompt for s in picked)
        rows += sum(len(s.logits_at) for s in picked if s.scores)
        assert len(batch.logits_at) == sum(len(s.logits_at) for s in picked)
        draws = publish_and_fork(scheduler, picked)
        finish(scheduler, draws, [following(draw.sequence) for draw in draws])
    assert rows == 4 * 37
    assert steps == 4  # 6 prompts of 37 tokens, at most 64 tokens a step


def test_failed_request_with_n_outputs_ends_each_output_exactly_once() -> None:
    scheduler = HFScheduler(plan_for(40))
    params = SamplingParams(max_tokens=60, temperature=0.0)
    for forked in (False, True):
        scheduler.add(GenerationRequest("x", tuple(range(100, 120)), params, n=3))
        _, picked, _ = scheduler.schedule()
        failing = [draw.sequence for draw in publish_and_fork(scheduler, picked)] if forked else picked
        assert sorted(chunk.index for chunk in scheduler.fail(failing, "no")) == [0, 1, 2]
        assert scheduler.idle
        check_invariants(scheduler.manager)


def test_grammar_rejecting_a_sampled_token_fails_only_its_own_request() -> None:
    class Refuses:
        def mask(self, logits: object) -> None:
            """Do nothing: no model runs in this test."""

        def accept(self, token: int) -> bool:
            raise GrammarError(f"token {token} does not match", field="grammar")

    scheduler = HFScheduler(plan_for(40), lambda grammar, stops: Refuses())
    params = SamplingParams(max_tokens=5, temperature=0.0)
    scheduler.add(GenerationRequest("x", (5, 6, 7), replace(params, grammar=Grammar("json_object"))))
    scheduler.add(GenerationRequest("y", (5, 6, 7), params))
    chunks = [chunk for _ in range(6) for chunk in step(scheduler)]
    assert [(c.finish_reason, c.error) for c in chunks if c.request_id == "x"] == [
        ("error", f"grammar: token {following_of((5, 6, 7))} does not match")
    ]
    assert sum(len(c.token_ids) for c in chunks if c.request_id == "y") == 5


def test_steps_are_shortened_when_slow_prompts_of_one_api_key_delay_the_stream_of_another() -> None:
    scheduler = HFScheduler(plan_for(100, max_num_batched_tokens=256), policy=Policy(keys=2))
    stream, long = requests(1)[0], tuple(range(3, 403))
    scheduler.add(replace(stream, tenant="stream"))
    step(scheduler)
    scheduler._pace.took(256, 25.6)  # 0.1 s a token
    scheduler.add(replace(stream, request_id="long", prompt_token_ids=long, tenant="long"))
    batch, picked, _ = scheduler.schedule()
    assert batch is not None
    assert [sequence.chunk for sequence in picked] == [1, LEAST_TOKENS]
    scheduler.publish(picked)
    scheduler._pace.took(256, 0.01)
    # The stream has no token to compute before its last one is appended, so the prompt has the whole step.
    assert [sequence.chunk for sequence in scheduler.schedule()[1]] == [256]


def test_steps_are_not_shortened_when_one_api_key_has_all_requests() -> None:
    scheduler = HFScheduler(plan_for(100, max_num_batched_tokens=256), policy=Policy(keys=2))
    stream, long = requests(1)[0], tuple(range(3, 403))
    scheduler.add(stream)
    step(scheduler)
    scheduler._pace.took(256, 25.6)
    scheduler.add(replace(stream, request_id="long", prompt_token_ids=long))
    assert [sequence.chunk for sequence in scheduler.schedule()[1]] == [1, 255]
