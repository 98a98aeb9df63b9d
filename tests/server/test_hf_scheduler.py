"""The scheduler with the real block manager and no model: waiting, priorities, preemption."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.planner.build import make_plan
from tonnage.planner.plan import Deployment, Plan
from tonnage.server.demo_model import ensure_demo
from tonnage.server.engines.base import Chunk, GenerationRequest, SamplingParams
from tonnage.server.engines.hf.scheduler import Scheduler, Sequence
from tonnage.server.engines.pool_stats import LAWS_EVERY, sample_laws


def plan_for(blocks: int, **changes: int) -> Plan:
    ensure_demo()
    settings = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64, **changes}
    size = make_plan("demo", Deployment(dtype="float32", **settings)).kv_cache.layout.bytes_per_block
    return make_plan("demo", Deployment(dtype="float32", kv_cache_memory_bytes=(blocks + 1) * size, **settings))


def following(sequence: Sequence) -> int:
    """A next token that only the tokens so far decide, and that would differ after any mistake in them."""
    return 3 + (sum(i * token for i, token in enumerate(sequence.tokens, 1)) + sequence.index) % 40000


def step(scheduler: Scheduler) -> list[Chunk]:
    batch, picked, chunks = scheduler.schedule()
    if batch is not None:
        for at, sequence in enumerate(picked):  # what the model would be given is what the sequence is
            span = slice(int(batch.query_start[at]), int(batch.query_start[at + 1]))
            assert batch.token_ids[span].tolist() == np.asarray(sequence.tokens)[batch.positions[span]].tolist()
        drawing = scheduler.fork(picked)
        chunks += scheduler.finish(drawing, [following(sequence) for sequence in drawing])
    scheduler.manager.check_invariants()
    return chunks


def run(scheduler: Scheduler, requests: list[GenerationRequest]) -> dict[tuple[str, int], list[int]]:
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
def test_every_mode_says_the_same_in_a_pool_that_is_too_small(mode: AdmissionMode) -> None:
    roomy = Scheduler(plan_for(400))
    wanted = run(roomy, requests(24))
    assert {key[0] for key in wanted} == {str(i) for i in range(24)}
    scheduler = Scheduler(plan_for(24), policy=Policy(mode))
    assert run(scheduler, requests(24)) == wanted
    if mode is AdmissionMode.GUARANTEED:
        assert scheduler.counters.preemptions == 0
    if mode is AdmissionMode.GREEDY:
        assert scheduler.counters.preemptions > 0
    assert scheduler.stats().preemptions == scheduler.counters.preemptions


def test_a_lower_priority_number_starts_first() -> None:
    scheduler = Scheduler(plan_for(40, max_num_seqs=1, max_num_batched_tokens=32))
    params = SamplingParams(max_tokens=4, temperature=0.0)
    for name, priority in (("a", 0), ("late", 5), ("early", -5)):
        scheduler.add(GenerationRequest(name, (5, 6, 7), params, priority=priority))
    order: list[str] = []
    while not scheduler.idle:
        order += [chunk.request_id for chunk in step(scheduler) if chunk.finish_reason]
    assert order == ["early", "a", "late"]


def test_abort_frees_what_waits_runs_or_was_preempted() -> None:
    scheduler = Scheduler(plan_for(24), policy=Policy(AdmissionMode.GREEDY))
    todo = requests(24)
    for request in todo:
        scheduler.add(request)
    while not scheduler.counters.preemptions:
        step(scheduler)
    for request in todo:
        reasons = [chunk.finish_reason for chunk in scheduler.abort(request.request_id)]
        assert set(reasons) <= {"abort"}
        scheduler.manager.check_invariants()
    assert scheduler.idle
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.pool.used, stats.pool.promised) == (0, 0, 0, 0)


def test_requests_wait_where_every_layer_is_sliding(tmp_path: Path) -> None:
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
    scheduler = Scheduler(plan)
    said = run(scheduler, requests(24))
    assert said == run(Scheduler(plan_for(400)), requests(24))
    assert scheduler.counters.admissions["wait", "blocks"] > 0


def test_a_broken_law_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = Scheduler(plan_for(40))
    for request in requests(2):
        scheduler.add(request)
    for _ in range(4):
        step(scheduler)
    assert scheduler.stats().invariant_violations == 0
    refs = scheduler.manager.state.pool.refs
    block = int(scheduler.manager.tables[0][0, 0])
    refs[block] += 1
    sample_laws(scheduler.manager, LAWS_EVERY - 1)
    assert scheduler.stats().invariant_violations == 0
    scheduler._steps = LAWS_EVERY - 1
    scheduler.schedule()
    assert scheduler.stats().invariant_violations == 1
    assert "reference counts" in caplog.text
