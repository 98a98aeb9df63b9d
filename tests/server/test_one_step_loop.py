"""Replay, fake engine and HF engine make equal decisions in every step, so a replay predicts a server.

The input is 300 requests of a real trace with shortened prompts and outputs, in every admission mode, in a pool
too small for them. The replay runs first, because it has the clock. The engines then get each request before
the same step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from invariants import check_invariants, check_step

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.cache.replay.simulator import Setup, Simulator
from tonnage.cache.replay.step_time import StepTime
from tonnage.cache.replay.trace import Trace, read_trace
from tonnage.cache.scheduler import Decisions, Scheduler
from tonnage.planner.deployment import Deployment
from tonnage.planner.planning.build import make_plan
from tonnage.planner.plans import Plan
from tonnage.server.engines.capacity import limits_of
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.engines.hf.child import EngineLoop
from tonnage.server.engines.hf.scheduler import HFScheduler
from tonnage.server.engines.request import GenerationRequest, SamplingParams
from tonnage.server.text.grammar import Grammar

TRACES = Path(__file__).parents[1] / "data" / "traces"
VOCABULARY = 512
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
BLOCKS, MAX_TOKENS = 97, 64
# The quantile of predictive mode is low enough that lengths surprise it, so requests are preempted.
# ``auto`` follows measured seconds, which a replay and an engine do not share; its two rules are in the others.
POLICIES = {mode: Policy(mode) for mode in AdmissionMode if mode is not AdmissionMode.AUTO}
POLICIES[AdmissionMode.PREDICTIVE] = Policy(AdmissionMode.PREDICTIVE, length_quantile=0.1, watermark=0.0)


@dataclass(frozen=True)
class Arrival:
    """A request that the replay queued before step ``step`` of its log; it ends after ``wanted`` tokens."""

    step: int
    request: GenerationRequest
    arrival: float
    wanted: int


def recorded(scheduler: Scheduler[Any]) -> list[Decisions]:
    """Record the scheduler's decisions of every later step in the returned list."""
    log: list[Decisions] = []
    decide = scheduler.step

    def step(leap: int | None = None) -> Any:
        decided = decide(leap)
        log.append(decided.decisions())
        return decided

    scheduler.step = step  # type: ignore[method-assign]
    return log


@pytest.fixture(scope="module")
def loop(folder: Path) -> Iterator[EngineLoop]:
    """Yield the engine loop of the child process, with its model and sampler."""
    ours, theirs = Pipe()
    with ours, theirs:
        yield EngineLoop(plan_of(folder, caching=True), theirs, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).save_pretrained(path)
    return path


def plan_of(folder: Path, *, caching: bool) -> Plan:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 320,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": caching,
    }
    size = make_plan(str(folder), Deployment(**settings)).kv_cache.layout.bytes_per_block
    plan = make_plan(str(folder), Deployment(**settings, kv_cache_memory_bytes=BLOCKS * size))
    assert plan.kv_cache.num_blocks == BLOCKS
    return plan


def azure() -> Trace:
    """Return a shortened trace without common prefixes; its longest prompts can never fit."""
    trace = read_trace(TRACES / "azure_conversation_300.csv")
    cut = [
        replace(r, prompt_tokens=1 + r.prompt_tokens // 12, output_tokens=1 + r.output_tokens // 8)
        for r in trace.requests
    ]
    return replace(trace, requests=tuple(cut))


def mooncake() -> Trace:
    """Return a shortened trace with common prefixes, in hash blocks of 16 tokens instead of 512."""
    trace = read_trace(TRACES / "mooncake_conversation_120.jsonl")
    cut = [
        replace(
            r,
            prompt_tokens=min(r.prompt_tokens // 32 + 1, 16 * len(r.hash_ids or ()), 300),
            output_tokens=1 + r.output_tokens // 10,
            hash_block=16,
        )
        for r in trace.requests
    ]
    return replace(trace, requests=tuple(cut))


def replayed(plan: Plan, trace: Trace, policy: Policy, scale: float) -> tuple[list[Decisions], list[Arrival]]:
    """Return the decisions of a replay, and the requests with their arrival steps."""
    limits = limits_of(plan)
    setup = Setup(
        layout=limits.layout,
        num_blocks=plan.kv_cache.num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        budget=limits.max_num_batched_tokens,
        max_tokens=MAX_TOKENS,
        policy=policy,
        step_time=StepTime(1, 1, 0.0, 1.0, 1e30, overhead=0.0),  # one second a step
        scale=scale,
        enable_prefix_caching=plan.deployment.enable_prefix_caching,
        leap=False,
        check=check_step,
    )
    simulator = Simulator(trace, setup)
    log, given = recorded(simulator.scheduler), []
    add = simulator.scheduler.add

    def adding(sequence: Any) -> None:
        add(sequence)
        # A piece of the trace is a number, the same in all 16 tokens of a block; here it takes two of them.
        pieces, odd = sequence.token_ids(), np.arange(sequence.length) % 2
        prompt = 3 + np.where(odd, pieces // 500, pieces) % 500
        params = SamplingParams(
            max_tokens=sequence.max_tokens, seed=sequence.id, grammar=Grammar("regex", str(sequence.wanted))
        )
        request = GenerationRequest(str(sequence.id), tuple(prompt.tolist()), params)
        given.append(Arrival(len(log), request, sequence.arrival, sequence.wanted))

    simulator.scheduler.add = adding  # type: ignore[method-assign]
    simulator.run()
    return log, given


def faked(plan: Plan, given: list[Arrival], policy: Policy) -> list[Decisions]:
    wanted = {each.request.request_id: each.wanted for each in given}

    def reply(request: GenerationRequest, index: int) -> Iterator[int]:
        """Return one token fewer than wanted, because the stop token follows."""
        tokens = np.random.default_rng(int(request.request_id)).integers(3, VOCABULARY, MAX_TOKENS)
        return itertools.islice(iter(tokens.tolist()), wanted[request.request_id] - 1)

    engine = FakeEngine(plan, policy=policy, reply=reply)
    log, todo = recorded(engine.scheduler), list(given)
    while todo or not engine.scheduler.idle:
        while todo and todo[0].step <= len(log):
            each = todo.pop(0)
            engine.add(each.request, each.arrival)
        engine.step()
        check_invariants(engine.manager)
    return log


class Counted:
    """A grammar that is complete after ``wanted`` tokens."""

    def __init__(self, wanted: int) -> None:
        self.left = wanted

    def mask(self, logits: torch.Tensor) -> None:
        """Do nothing: every token may follow."""

    def accept(self, token: int) -> bool:
        self.left -= 1
        return self.left == 0


def served(loop: EngineLoop, plan: Plan, given: list[Arrival], policy: Policy) -> list[Decisions]:
    """Return the decisions of a server's engine loop, as its child process runs it."""
    loop.scheduler = HFScheduler(plan, lambda grammar, stops: Counted(int(grammar.text)), policy)
    log, todo = recorded(loop.scheduler.core), list(given)
    while todo or not loop.scheduler.idle:
        while todo and todo[0].step <= len(log):
            each = todo.pop(0)
            loop.scheduler.add(each.request, each.arrival)
        assert all(chunk.finish_reason != "error" or "fit" in str(chunk.error) for chunk in loop.step())
    check_invariants(loop.scheduler.manager)
    return log


def assert_same(log: list[Decisions], other: list[Decisions]) -> None:
    """Check that two logs are equal; the error names the first different step."""
    for step, (one, two) in enumerate(zip(log, other, strict=False)):
        assert one == two, f"step {step}"
    assert len(log) == len(other)


@pytest.mark.parametrize("mode", list(POLICIES))
def test_fake_engine_and_hf_engine_and_trace_replay_make_equal_scheduling_decisions_in_every_step(
    folder: Path, loop: EngineLoop, mode: AdmissionMode
) -> None:
    plan, policy = plan_of(folder, caching=False), POLICIES[mode]
    log, given = replayed(plan, azure(), policy, scale=4.0)
    assert len(given) == 300
    assert {id for step in log for id in step.admitted + step.refused} == set(range(300))
    assert any(step.refused for step in log)
    assert any(len(step.chunks) > 8 for step in log)
    preempted = sum(len(step.preempted) for step in log)
    assert (preempted > 0) == (mode in (AdmissionMode.GREEDY, AdmissionMode.PREDICTIVE))
    assert_same(log, faked(plan, given, policy))
    assert_same(log, served(loop, plan, given, policy))


def test_fake_engine_and_hf_engine_and_trace_replay_decide_alike_with_shared_prefixes(
    folder: Path, loop: EngineLoop
) -> None:
    plan, policy = plan_of(folder, caching=True), Policy(AdmissionMode.GREEDY)
    log, given = replayed(plan, mooncake(), policy, scale=0.005)
    assert any(step.preempted for step in log)
    assert_same(log, faked(plan, given, policy))
    assert_same(log, served(loop, plan, given, policy))


def test_comparison_of_engines_detects_a_differing_admission_rule(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, policy = plan_of(folder, caching=False), POLICIES[AdmissionMode.PREDICTIVE]
    log, given = replayed(plan, azure(), policy, scale=4.0)
    with pytest.raises(AssertionError):
        assert_same(log, faked(plan, given, Policy(AdmissionMode.GREEDY)))
    monkeypatch.setattr(Scheduler, "_victims", lambda self: [next(iter(self.running.values()))])
    with pytest.raises(AssertionError, match="step"):
        assert_same(log, faked(plan, given, policy))
