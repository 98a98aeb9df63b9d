"""Measured step costs, rehearsals, and the rule that ``auto`` chooses by them."""

from __future__ import annotations

import logging
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.cache.admission.auto import _LEVEL, START, Auto, Choice, best
from tonnage.cache.admission.cost import CostFit, StepCost
from tonnage.cache.admission.observed_lengths import Lengths
from tonnage.cache.admission.policy import VLLM, Rule
from tonnage.cache.admission.rehearsal import Engine, Load, Outcome, rehearse
from tonnage.cache.errors import CacheConfigError

# A CPU computes a token in a seventeenth of a step, a GPU in a seven-hundredth (issue of the mode: 17 ms + 1
# ms a token, 20 ms + 0.03 ms).
CPU = StepCost(0.017, 0.001, 0.001, 0.0)
GPU = StepCost(0.020, 0.00003, 0.00003, 0.0)
ENGINE = Engine(blocks=200, block_size=16, max_num_batched_tokens=2048, max_num_seqs=256)


def requests_of(seed: int, count: int) -> list[tuple[int, int, int]]:
    """Return chat-like requests as (prompt, output, max_tokens) in tokens."""
    draw = random.Random(seed)
    return [
        (1 + int(draw.lognormvariate(4.1, 0.8)), 1 + min(599, int(draw.expovariate(1 / 120))), 600)
        for _ in range(count)
    ]


def load_of(clients: int, count: int = 400, seed: int = 0) -> Load:
    rows = np.array(requests_of(seed, count), np.int64)
    prompt, output, max_tokens = (np.ascontiguousarray(column) for column in rows.T)
    return Load(prompt, output, max_tokens, clients)


# -- costs -----------------------------------------------------------------------------------------------------


def observe(fit: CostFit, cost: StepCost, steps: int, seed: int, noise: float = 0.0) -> None:
    draw = random.Random(seed)
    for _ in range(steps):
        sequences, prefill = draw.randrange(1, 40), draw.choice([0, 0, 0, draw.randrange(1, 500)])
        context = draw.randrange(100, 4000)
        seconds = cost.seconds(prefill, sequences, context) * (1 + draw.uniform(-noise, noise))
        fit.observe(prefill + sequences, sequences, context, seconds)


@pytest.mark.parametrize("cost", [CPU, GPU, StepCost(0.006, 2e-5, 1e-5, 3e-8)])
def test_step_cost_model_is_fitted_from_noisy_step_times(cost: StepCost) -> None:
    fit = CostFit()
    assert fit.cost is None
    observe(fit, cost, 1000, 0, noise=0.05)
    found = fit.cost
    assert found is not None
    assert found.fixed == pytest.approx(cost.fixed, rel=0.1)
    for shape in ((0, 10, 500), (300, 20, 2000), (0, 39, 4000)):
        assert found.seconds(*shape) == pytest.approx(cost.seconds(*shape), rel=0.05)


def test_fitted_step_costs_follow_an_engine_that_becomes_slower() -> None:
    fit = CostFit()
    observe(fit, GPU, 2000, 0)
    slower = StepCost(2 * GPU.fixed, 2 * GPU.prefill, 2 * GPU.sequence, 0.0)
    observe(fit, slower, 4000, 1)
    assert fit.cost is not None
    assert fit.cost.fixed == pytest.approx(slower.fixed, rel=0.1)


def test_single_long_pause_does_not_change_the_fitted_step_cost() -> None:
    fit = CostFit()
    observe(fit, CPU, 640, 0)
    for _ in range(10):
        fit.observe(20, 20, 500, 30.0)
        observe(fit, CPU, 63, 2)
    assert fit.cost is not None
    assert fit.cost.fixed == pytest.approx(CPU.fixed, rel=0.05)


def test_fitted_step_costs_are_unknown_before_the_first_prompt_step_and_never_negative() -> None:
    fit = CostFit()
    for _ in range(500):
        fit.observe(8, 8, 100, 0.01)
    assert fit.cost is None
    for step in range(500):
        fit.observe(8 + step % 2, 8, 100, 0.01 - 0.001 * (step % 2))  # steps with a prompt are faster
    found = fit.cost
    assert found is not None
    assert min(found.fixed, found.prefill, found.sequence, found.context) >= 0


# -- rehearsals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [VLLM, Rule(0.7), Rule(0.6)])
def test_simulated_admission_serves_every_token_exactly_once(rule: Rule) -> None:
    load = load_of(64)
    outcome = rehearse(load, ENGINE, CPU, rule)
    tokens = int(load.output.sum())
    # Alone in the pool, each token would take a whole step: the least and the most that any schedule can take.
    assert outcome.tokens_per_second < 1 / CPU.sequence
    assert outcome.tokens_per_second > tokens / sum(
        CPU.seconds(int(prompt), 1, 0) + CPU.seconds(0, 1, 0) * int(output)
        for prompt, output in zip(load.prompt, load.output, strict=True)
    )


def test_simulated_admission_with_a_large_pool_has_no_preemptions() -> None:
    large = Engine(100_000, 16, 2048, 256)
    outcomes = [rehearse(load_of(64), large, CPU, rule) for rule in (VLLM, Rule(0.7))]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].preemptions == 0
    assert outcomes[0].recomputed == 0


def test_simulated_preemption_without_prefix_caching_recomputes_whole_requests() -> None:
    apart = replace(ENGINE, prefix_caching=False)
    cached, whole = (rehearse(load_of(64), engine, CPU, VLLM) for engine in (ENGINE, apart))
    assert whole.preemptions > 0
    assert whole.recomputed > cached.recomputed > 0


def test_delaying_admission_raises_simulated_throughput_only_if_recompute_is_costly() -> None:
    load = load_of(128)
    gain = {
        name: rehearse(load, ENGINE, cost, Rule(0.7)).tokens_per_second
        / rehearse(load, ENGINE, cost, VLLM).tokens_per_second
        for name, cost in (("cpu", CPU), ("gpu", GPU))
    }
    assert gain["cpu"] > 1.05
    assert gain["gpu"] < 0.99


# -- the choice ------------------------------------------------------------------------------------------------


def outcome(tokens: float, first: float = 1.0, between: float = 0.1) -> Outcome:
    return Outcome(tokens, first, first, between, 0.1, 10)


def test_chosen_admission_rule_worsens_neither_ttft_nor_inter_token_latency() -> None:
    own = outcome(100)
    choices = [
        Choice(VLLM, own, own),
        Choice(Rule(0.5), outcome(120, first=1.3), own),
        Choice(Rule(0.6), outcome(115, between=0.2), own),
        Choice(Rule(0.7), outcome(108, first=0.9, between=0.05), own),
        Choice(Rule(0.8), outcome(106, first=0.9, between=0.05), own),
        Choice(Rule(0.9), outcome(101, first=0.9, between=0.05), own),
    ]
    assert best(choices, None).rule == Rule(0.7)
    assert best([choices[0], choices[5]], None, START).rule == VLLM


@pytest.mark.parametrize(("tokens", "rule"), [(106, VLLM), (114, Rule(0.7))])
def test_admission_rule_with_equal_ttft_is_chosen_only_for_a_large_throughput_gain(
    tokens: float, rule: Rule
) -> None:
    own = outcome(100)
    held = Choice(Rule(0.7), outcome(tokens, first=1.0, between=0.05), own)
    assert best([Choice(VLLM, own, own), held], None).rule == rule


@pytest.mark.parametrize(("tokens", "rule"), [(106, VLLM), (114, Rule(0.7))])
def test_admission_rule_with_slightly_better_inter_token_latency_is_chosen_only_for_a_large_throughput_gain(
    tokens: float, rule: Rule
) -> None:
    own = outcome(100)
    held = Choice(Rule(0.7), outcome(tokens, first=0.9, between=0.098), own)
    assert best([Choice(VLLM, own, own), held], None).rule == rule


@pytest.mark.parametrize("cost", [CPU, StepCost(0.040, 0.003, 0.0002, 5e-7)])
def test_gain_required_to_leave_vllms_admission_rule_exceeds_the_random_variation_of_its_results(
    cost: StepCost,
) -> None:
    ratios = []
    for seed in range(24):
        load, more = load_of(64, 300, seed), load_of(64, 300, seed)
        more.prompt[seed] += ENGINE.block_size
        one, other = (rehearse(each, ENGINE, cost, VLLM) for each in (load, more))
        ratios.append(
            [
                getattr(other, name) / getattr(one, name)
                for name in ("tokens_per_second", "first_p50", "first_p99", "between_p99")
            ]
        )
    tokens, first_p50, first_p99, between = np.std(ratios, axis=0)
    assert 0 < 4 * tokens < START[0].tokens - 1
    assert 0 < max(first_p50, first_p99) < 1 - START[0].first
    assert 0 < 2 * between < 1 - START[0].between


def test_target_inter_token_latency_is_met_at_the_cost_of_throughput() -> None:
    own = outcome(100)
    choices = [
        Choice(VLLM, own, own),
        Choice(Rule(0.6), outcome(80, first=3.0, between=0.03), own),
        Choice(Rule(0.7), outcome(90, first=2.0, between=0.05), own),
    ]
    assert best(choices, 0.06).rule == Rule(0.7)
    assert best(choices, 0.01).rule == Rule(0.6)
    assert best(choices, 0.2).rule == VLLM


def taught(cost: StepCost, in_system: int, target: float | None = None) -> Auto:
    """Return an `Auto` that has seen 300 requests and spent a tenth of its time on recomputed tokens."""
    auto = Auto(ENGINE, target, background=False)
    draw = random.Random(0)
    for at, request in enumerate(requests_of(1, 300)):
        for _ in range(4):
            sequences, prefill = draw.randrange(5, 25), draw.choice([0, 60])
            seconds = cost.seconds(prefill, sequences, 1000)
            auto.stepped(prefill + sequences, sequences, 1000, seconds, in_system)
            auto.recomputed(int(0.1 * seconds / cost.prefill) if at % 2 == 0 else 0)
        auto.ended(*request)
    return auto


def test_auto_admission_mode_starts_with_vllms_admission_rule() -> None:
    auto = Auto(ENGINE, background=False)
    assert auto.rule(100) == VLLM
    auto.ended(10, 10, 100)
    assert auto.rule(100) == VLLM
    assert auto.choice is None


def test_auto_admission_mode_delays_admission_when_recompute_is_costly_and_requests_wait() -> None:
    auto = taught(CPU, 128)
    assert auto.rule(128).share is not None
    assert auto.choice is not None
    assert auto.choice.outcome.tokens_per_second > 1.03 * auto.choice.own.tokens_per_second
    assert auto.rule(14) == VLLM  # a queue that is nearly empty


def test_auto_admission_mode_uses_vllms_rule_in_a_short_burst_unless_target_itl_is_set() -> None:
    auto = taught(CPU, 128)
    assert auto.rule(128).share is not None
    assert auto.rule(220) == VLLM
    for _ in range(128):  # the burst stays
        auto.stepped(25, 25, 1000, CPU.seconds(0, 25, 1000), 220)
    assert auto.rule(220).share is not None
    assert taught(CPU, 128, target=0.03).rule(220).share is not None


@pytest.mark.parametrize(("count", "known"), [(200, False), (60, True)])
def test_auto_admission_mode_chooses_no_rule_while_many_running_requests_exceed_all_known_lengths(
    count: int, known: bool
) -> None:
    auto = taught(CPU, 128)
    longest = max(output for _, output, _, _ in auto._requests)
    running = np.array([(60, longest + 1, 600)] * count, np.int64)
    auto.rule(128, lambda: running)
    assert (auto.choice is not None) == known


def test_admission_rule_does_not_alternate_when_the_load_is_between_two_levels() -> None:
    auto = taught(CPU, 128)
    between = round(_LEVEL ** (math.log(128, _LEVEL) // 1 - 0.5))  # half-way between two levels
    auto.rule(128)
    levels = set()
    for number in (128, between, between + 1, between - 1, between + 1):
        auto.rule(number)
        levels.add(auto._level)
    assert len(levels) <= 2
    assert auto.rule(between - 1) == auto.rule(between + 1)


def test_auto_admission_mode_uses_vllms_rule_when_recompute_is_cheap() -> None:
    assert taught(GPU, 128).rule(128) == VLLM


def test_target_itl_delays_admission_even_where_vllms_rule_has_higher_throughput() -> None:
    auto = taught(GPU, 128, target=0.025)
    assert auto.rule(128).share is not None
    assert auto.choice is not None
    assert auto.choice.outcome.tokens_per_second < auto.choice.own.tokens_per_second


def test_previous_admission_rule_applies_until_a_background_simulation_has_ended() -> None:
    auto = taught(CPU, 128)
    auto.background = True
    assert auto.rule(128) == VLLM
    assert auto._pending is not None
    auto._pending.result()
    assert auto.rule(128).share is not None


def test_step_of_zero_seconds_is_ignored_in_the_fit_of_step_costs() -> None:
    auto = Auto(ENGINE, background=False)
    auto.stepped(8, 8, 100, 0.0, 8)
    assert auto.cost is None
    assert auto.rule(8) == VLLM


def test_outputs_too_long_to_simulate_are_left_out_of_the_simulation() -> None:
    auto = Auto(Engine(10_000_000, 16, 2048, 256), background=False)
    for output, simulated in ((100_000, 0), (100, 200 + 1536)):
        lengths = Lengths(np.array([(100, output, 2 * output)] * 100), np.full(100, 0.01), 0.0)
        assert len(auto._load(100, lengths).output) == simulated


def test_auto_admission_mode_uses_vllms_rule_after_an_exception_in_a_simulation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    auto = taught(CPU, 128)
    auto.background = True
    monkeypatch.setattr("tonnage.cache.admission.auto.rehearse", lambda *_: 1 / 0)
    assert auto.rule(128) == VLLM
    assert auto._pending is not None
    auto._pending.result()
    assert auto.rule(128) == VLLM
    assert auto.fallbacks == 1
    assert "a rehearsal failed" in caplog.text


def test_auto_admission_mode_returns_to_vllms_rule_when_throughput_is_below_the_forecast(
    caplog: pytest.LogCaptureFixture,
) -> None:
    auto = taught(CPU, 128)
    assert auto.rule(128) != VLLM
    with caplog.at_level(logging.WARNING, logger="tonnage.cache"):
        for request in requests_of(2, 400):
            for _ in range(request[1]):  # one sequence at a time, in steps that cost what they did
                auto.rule(128)
                auto.stepped(1, 1, 100, CPU.seconds(0, 1, 100), 128)
            auto.ended(*request)
    assert auto.fallbacks == 1
    assert auto.rule(128) == VLLM
    assert [record.message for record in caplog.records if "vLLM's rule holds" in record.message] != []
    assert len([record for record in caplog.records if "vLLM's rule holds" in record.message]) == 1


def test_growing_outputs_of_running_requests_do_not_count_as_low_throughput() -> None:
    auto = taught(CPU, 128)
    produced = 0

    def running() -> np.ndarray:
        return np.array([(60, produced, 10**9)], np.int64)

    for request in requests_of(2, 400):
        for _ in range(request[1]):
            auto.rule(128, running)
            auto.stepped(1, 1, 100, CPU.seconds(0, 1, 100), 128)
        auto.ended(*request)
        produced += request[1]  # as many tokens as the requests that finish
    assert auto.fallbacks == 0


def test_target_itl_is_rejected_in_other_admission_modes_than_auto() -> None:
    with pytest.raises(CacheConfigError, match="target_itl"):
        Policy(AdmissionMode.PREDICTIVE, target_itl=0.1)
    with pytest.raises(CacheConfigError, match="target_itl"):
        Policy(AdmissionMode.AUTO, target_itl=0.0)
    with pytest.raises(CacheConfigError, match="watermark"):
        Policy(AdmissionMode.AUTO, watermark=0.01)
