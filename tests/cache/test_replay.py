"""Traces and their replay: first lines of the real traces, bad lines reported by number, laws at every step."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from invariants import check_invariants, check_step

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.cache.replay.page import page
from tonnage.cache.replay.search import search_engines, share_of
from tonnage.cache.replay.simulator import Setup, Simulator
from tonnage.cache.replay.step_time import StepTime
from tonnage.cache.replay.trace import Trace, TraceError, TraceRequest, log_line, read_trace
from tonnage.planner.devices.catalogue import find_gpu
from tonnage.planner.model.layout import KVGroup, KVLayout

AZURE = Path(__file__).parents[1] / "data" / "traces" / "azure_conversation_300.csv"
SETUP = Setup(
    layout=KVLayout((KVGroup("full", (0,)),), 16, 1, 8, 128, "bfloat16", 2),
    num_blocks=1025,
    max_num_seqs=64,
    max_model_len=16_384,
    budget=512,
    max_tokens=600,
    policy=Policy(),
    step_time=StepTime(16 * 10**9, 8 * 10**9, 131_072, 3350e9, 989e12),
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 3000, "input_length": 1536, "output_length": 4, "hash_ids": [0, 1, 7]}\n'
)


def test_azure_trace_is_read_with_arrivals_and_lengths() -> None:
    trace = read_trace(AZURE)
    assert (trace.format, len(trace.requests), trace.skipped) == ("azure", 300, 0)
    first, second = trace.requests[:2]
    assert (first.arrival, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.arrival == pytest.approx(50.995169 - 46.68059, abs=1e-6)
    assert not trace.has_prefixes
    assert all(a.arrival <= b.arrival for a, b in pairwise(trace.requests))


def test_mooncake_trace_and_its_copy_in_request_log_format_give_equal_requests(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(MOONCAKE)
    mooncake = read_trace(tmp_path / "m.jsonl")
    assert mooncake.requests[1] == TraceRequest(3.0, 1536, 4, hash_ids=(0, 1, 7))
    (tmp_path / "log.jsonl").write_text("\n".join(map(log_line, mooncake.requests)))
    log = read_trace(tmp_path / "log.jsonl")
    assert (log.format, log.requests) == ("log", mooncake.requests)
    more = TraceRequest(0.0, 5, 2, max_tokens=9, tenant="a", priority=-1)
    (tmp_path / "log.jsonl").write_text(log_line(more))
    assert read_trace(tmp_path / "log.jsonl").requests == (more,)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "invalid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "not a JSON object"),
        ('{"timestamp": 1, "input_length": 5, "hash_ids": [1]}', "output_length is missing"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1.5, "hash_ids": [1]}', "output_length is 1.5"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "time is nan"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}', "at least 1"),
        ('{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "1 hash_ids for 513"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [-1]}', "hash_ids is not"),
        ('{"timestamp": true, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "timestamp is True"),
    ],
)
def test_invalid_trace_line_is_rejected_with_its_number_or_skipped_and_counted(
    tmp_path: Path, line: str, says: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(MOONCAKE + line + "\n" + MOONCAKE)
    with pytest.raises(TraceError, match="line 3") as caught:
        read_trace(path)
    assert says in str(caught.value)
    assert "--skip-bad-lines" in str(caught.value)
    trace = read_trace(path, skip_bad_lines=True)
    assert (len(trace.requests), trace.skipped) == (4, 1)


def test_file_that_is_no_trace_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.csv")
    for text in ("", "hello\n", '{"a": 1}\n', "[" * 100_000):
        (tmp_path / "x").write_text(text)
        with pytest.raises(TraceError, match="line 1: neither"):
            read_trace(tmp_path / "x")
    (tmp_path / "x").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    with pytest.raises(TraceError, match="no request"):
        read_trace(tmp_path / "x")
    (tmp_path / "x").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n")
    with pytest.raises(TraceError, match="line 2"):
        read_trace(tmp_path / "x")


@pytest.mark.parametrize("mode", list(AdmissionMode))
def test_replay_serves_every_request_and_frees_every_block(mode: AdmissionMode) -> None:
    trace = read_trace(AZURE, limit=120)
    simulator = Simulator(trace, replace(SETUP, policy=Policy(mode), num_blocks=513, scale=20.0))
    result = simulator.run()
    assert (result.finished, result.rejected) == (120, 0)
    assert result.output_tokens == sum(request.output_tokens for request in trace.requests)
    prompts = sum(request.prompt_tokens for request in trace.requests)
    assert result.prompt_tokens - result.recomputed_tokens <= prompts <= result.prompt_tokens
    assert simulator.manager.stats().used == 0
    check_invariants(simulator.manager)
    if mode in (AdmissionMode.GUARANTEED, AdmissionMode.NO_EVICT):
        assert result.preemptions == 0
    if mode is AdmissionMode.GREEDY:
        assert result.preemptions > 0, "the pool was never tight"


@pytest.mark.parametrize(("chunk", "quantile"), [(16_384, 1.0), (64, 1.0), (64, 0.3)])
def test_guaranteed_mode_invariants_hold_at_every_replayed_step(chunk: int, quantile: float) -> None:
    """Replay with ``check``, which raises where the law of guaranteed mode or any invariant is broken."""
    trace = read_trace(AZURE, limit=40)
    policy = Policy(length_quantile=quantile)
    setup = replace(
        SETUP, policy=policy, num_blocks=401, budget=chunk, scale=None, check=check_step, lookahead=2
    )
    result = Simulator(trace, setup).run()
    assert (result.finished, result.preemptions) == (40, 0)


def test_replay_that_skips_uneventful_steps_equals_step_by_step_replay() -> None:
    trace = read_trace(AZURE, limit=60)
    setup = replace(SETUP, num_blocks=2049, scale=1.0)
    leaping, walking = (Simulator(trace, replace(setup, leap=leap)).run() for leap in (True, False))
    assert leaping.finished == walking.finished == 60
    assert leaping.output_tokens == walking.output_tokens
    assert leaping.steps == pytest.approx(walking.steps, rel=0.02)
    assert leaping.seconds == pytest.approx(walking.seconds, rel=0.02)


def test_replay_hits_shared_prefixes(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(MOONCAKE)
    result = Simulator(read_trace(tmp_path / "m.jsonl"), SETUP).run()
    assert (result.query_tokens, result.hit_tokens) == (1100 + 1536, 1024)
    off = Simulator(read_trace(tmp_path / "m.jsonl"), replace(SETUP, enable_prefix_caching=False)).run()
    assert off.hit_tokens == 0


def test_replay_uses_a_fixed_hash_key_so_that_its_results_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learned eviction samples blocks by their hashes, so two replays with random keys would differ."""
    keys = iter(range(100))
    monkeypatch.setattr("secrets.randbits", lambda bits: next(keys))
    trace = Trace("t", "made", (TraceRequest(0.0, 64, 2, hash_ids=(1,), hash_block=64),))
    first, second = (Simulator(trace, SETUP).manager.core for _ in range(2))
    assert first.seeds[0] == second.seeds[0]


def test_replay_search_finds_the_smallest_pool_without_preemptions() -> None:
    trace = read_trace(AZURE, limit=150)
    setup = replace(SETUP, scale=30.0, num_blocks=513)
    found = search_engines(trace, setup, target=0.5)
    assert found.engines is not None
    assert found.waits[found.engines] <= 0.5
    assert found.engines > 1
    worse = Simulator(share_of(trace, found.engines - 1), setup).run()
    assert sorted(worse.waits)[int(0.99 * len(worse.waits))] > 0.5
    none = search_engines(trace, replace(setup, max_num_seqs=1), target=0.0, most=2)
    assert none.engines is None


def test_html_report_of_a_replay_loads_no_other_file() -> None:
    result = Simulator(read_trace(AZURE, limit=30), SETUP).run()
    text = page(result, "<trace> & model", [("a", "1 < 2")])
    assert "&lt;trace&gt; &amp; model" in text
    assert "1 &lt; 2" in text
    assert text.count("<svg") == 4
    assert "http" not in text
    json.dumps(result.to_dict())


def test_simulated_step_time_is_the_larger_of_memory_traffic_and_arithmetic_time() -> None:
    h100 = find_gpu("h100")
    step = StepTime(16 * 10**9, 8 * 10**9, 131_072, h100.bandwidth, h100.flops, overhead=0.0)
    assert step.seconds(1, 0) == pytest.approx(16e9 / 3350e9)
    assert step.seconds(1, 100_000) == pytest.approx((16e9 + 131_072 * 100_000) / 3350e9)
    assert step.seconds(8192, 0) == pytest.approx(2 * 8e9 * 8192 / 989e12)
    assert replace(step, devices=4).seconds(1, 0) == pytest.approx(16e9 / 3350e9 / 4)


def test_requests_of_a_trace_are_ordered_by_arrival(tmp_path: Path) -> None:
    later, earlier = TraceRequest(5.0, 10, 1), TraceRequest(2.0, 20, 1)
    (tmp_path / "log.jsonl").write_text(log_line(later) + "\n" + log_line(earlier))
    trace: Trace = read_trace(tmp_path / "log.jsonl")
    assert [(r.arrival, r.prompt_tokens) for r in trace.requests] == [(0.0, 20), (3.0, 10)]


def _sharing(tmp_path: Path) -> Trace:
    """Return a trace of 24 requests that share their first 1,024 or 512 tokens; every third is sent again."""
    lines = []
    for number in range(24):
        own = 100 + number - (number % 3 == 2)
        ids = [0, 1, own] if number % 4 else [0, own, own + 200]
        lines.append(
            f'{{"timestamp": {400 * number}, "input_length": {1100 + 16 * (number % 3 > 0)}, '
            f'"output_length": {5 + number}, "hash_ids": {ids}}}\n'
        )
    (tmp_path / "m.jsonl").write_text("".join(lines))
    return read_trace(tmp_path / "m.jsonl")


HYBRID = replace(SETUP.layout, groups=(KVGroup("full", (0,)), KVGroup("state", (1,)), KVGroup("state", (2,))))


@pytest.mark.parametrize(
    ("mode", "blocks", "scale"),
    [
        (AdmissionMode.GUARANTEED, 1025, 1.0),
        (AdmissionMode.GUARANTEED, 170, 100.0),
        (AdmissionMode.PREDICTIVE, 170, 100.0),
    ],
)
def test_replayed_hybrid_model_hits_prefixes_whose_recurrent_states_are_cached(
    tmp_path: Path, mode: AdmissionMode, blocks: int, scale: float
) -> None:
    """Replay with ``check``; in the small pool all requests arrive at once, so that states are evicted."""
    checked = blocks < 200 and mode is AdmissionMode.GUARANTEED
    trace = share_of(_sharing(tmp_path), 2 if checked else 1)
    check = check_step if checked else None
    setup = replace(SETUP, layout=HYBRID, num_blocks=blocks, scale=scale, policy=Policy(mode), check=check)
    cached = Simulator(trace, setup).run()
    plain = Simulator(trace, replace(setup, enable_prefix_caching=False)).run()
    assert cached.finished == plain.finished == len(trace.requests)
    assert plain.hit_tokens == 0
    assert cached.hit_tokens % 16 == 0
    assert cached.prompt_tokens - cached.recomputed_tokens <= plain.prompt_tokens - cached.hit_tokens
    if blocks > 1000:
        assert cached.hit_rate > 0.5
    else:
        assert cached.evictions > 0


def test_replay_that_skips_steps_caches_the_same_recurrent_states(tmp_path: Path) -> None:
    trace, setup = _sharing(tmp_path), replace(SETUP, layout=HYBRID)
    leaping, walking = (Simulator(trace, replace(setup, leap=leap)).run() for leap in (True, False))
    for name in ("steps", "hit_tokens", "evictions", "prompt_tokens", "output_tokens", "most_running"):
        assert getattr(leaping, name) == getattr(walking, name), name


def test_caching_recurrent_states_needs_more_steps_if_no_prefix_repeats() -> None:
    trace = read_trace(AZURE, limit=20)
    assert not trace.has_prefixes
    on, off = (
        Simulator(trace, replace(SETUP, layout=HYBRID, enable_prefix_caching=caching))
        for caching in (True, False)
    )
    assert (on.manager.cached_states, off.manager.cached_states) == (True, False)
    assert on.run().steps > off.run().steps  # the rest of a prompt is a step of its own
