"""Tests of benchmarks' admission matrix: one small cell over vLLM's real scheduler, and the aims."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("admission_matrix")


@pytest.fixture
def aims(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("admission_aims")


def cell(mode: str, **ratios: float) -> dict[str, Any]:
    """Return a made-up cell that meets every aim, save for ``ratios``."""
    met = {"tokens_per_second": 1.1, "ttft_p50_s": 1.0, "ttft_p99_s": 1.0, "between_tokens_p99_s": 1.0}
    figures = {"preemptions": 0, "lost": 0, "recompute_share": 0.1}
    return {
        "cell": "gpu/bimodal/200/closed-64/warm",
        "figures": {mode: dict(figures), "default": dict(figures)},
        "ratios": {mode: met | ratios},
    }


def test_result_of_the_admission_benchmark_for_one_load_has_all_figures_and_recomputed_tokens(
    matrix: Any, aims: Any
) -> None:
    cost = matrix.named()["cpu"]
    ground = matrix.Ground(
        "cpu", cost, "exponential", 200, ("closed-64", "open-0.95"), ("cold",), ("guaranteed",), 1, 90
    )
    cells = matrix.run_ground(ground)
    assert [each["cell"] for each in cells] == [
        "cpu/exponential/200/closed-64/cold",
        "cpu/exponential/200/open-0.95/cold",
    ]
    assert cells[0]["rate"] == 0 < cells[1]["rate"]
    for each in cells:
        for figures in each["figures"].values():
            assert set(figures) == {
                "tokens_per_second", "ttft_p50_s", "ttft_p99_s", "between_tokens_p99_s", "preemptions",
                "computed", "recomputed", "recompute_share", "lost", "steps",
            }  # fmt: skip
            assert figures["lost"] == 0
            assert figures["ttft_p99_s"] >= figures["ttft_p50_s"] > 0
        assert set(each["ratios"]["guaranteed"]) == set(aims.RATIO_AIMS)
    peer = cells[0]["figures"]["default"]
    load = matrix.load("exponential", 90, 0)
    once = sum(map(len, load.prompts)) + sum(load.outputs) - 90  # the last token of each is never computed
    assert peer["preemptions"] > 0
    assert peer["recomputed"] == peer["computed"] - once > 0


def test_admission_benchmark_leaves_out_the_time_of_the_warm_up_load(matrix: Any) -> None:
    server = matrix.Server("predictive", 200, matrix.named()["gpu"])
    server.serve(matrix.load("equal-below-max", 20, 1), "closed-8", 0.0, "warm")
    before = server.now
    figures = server.serve(matrix.load("equal-below-max", 20, 0), "closed-8", 0.0, "counted")
    assert figures.seconds == pytest.approx(server.now - before)
    assert figures.tokens == 20 * 80
    assert server.scheduler.clock() == server.now


def test_admission_benchmark_draws_equal_loads_from_equal_seeds_and_bursts_of_simultaneous_requests(
    matrix: Any,
) -> None:
    for kind in matrix.KINDS:
        drawn = matrix.load(kind, 64, 3)
        matrix.load.cache_clear()
        assert matrix.load(kind, 64, 3) == drawn
        assert all(len(p) + drawn.max_tokens <= 2400 for p in drawn.prompts)
        assert min(drawn.outputs) >= 1
    times = matrix.load("bursts", 64, 3).arrivals(10.0)
    assert [times.count(at) for at in sorted(set(times))] == [16] * 4


@pytest.mark.parametrize(
    ("mode", "ratios", "aim"),
    [
        ("auto", {"tokens_per_second": 0.98}, "tokens_per_second >= 0.99"),
        ("auto", {"ttft_p50_s": 1.06}, "ttft_p50_s <= 1.05"),
        ("auto", {"ttft_p99_s": 1.06}, "ttft_p99_s <= 1.05"),
        ("auto", {"between_tokens_p99_s": 1.001}, "between_tokens_p99_s <= 1.0"),
        ("auto", {"tokens_per_second": 1.0}, "mean tokens_per_second where recomputing is dear >= 1.05"),
        ("guaranteed", {"tokens_per_second": 0.8}, "median tokens_per_second >= 0.9"),
    ],
)
def test_check_of_the_admission_benchmark_names_a_missed_aim_and_exits_with_1(
    aims: Any, capsys: pytest.CaptureFixture[str], mode: str, ratios: dict[str, float], aim: str
) -> None:
    result = aims.summarized([cell(mode, **ratios)], [mode])
    assert aim in result["missed"][mode]
    assert aims.check(result) == 1
    assert aim in capsys.readouterr().err


def test_check_of_the_admission_benchmark_exits_with_0_when_every_aim_is_met(aims: Any) -> None:
    for mode in ("auto", "guaranteed"):
        result = aims.summarized([cell(mode, between_tokens_p99_s=1.0000005)], [mode])
        assert result["missed"] == {mode: {}}
        assert aims.check(result) == 0


def test_admission_benchmark_fails_guaranteed_mode_after_one_preemption(aims: Any) -> None:
    made = cell("guaranteed")
    made["figures"]["guaranteed"]["preemptions"] = 1
    assert "preemptions = 0" in aims.summarized([made], ["guaranteed"])["missed"]["guaranteed"]


def test_fitted_step_costs_are_within_ten_percent_of_published_70b_measurements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    costs = import_module("step_costs")
    fit = costs.named()["h100-70b-tp4"]
    for row in costs.published_rows():
        clients, prompt, output = row["concurrency"], row["input_tokens"], row["output_tokens"]
        context = clients * (prompt + output / 2)
        ms = 1000 * fit.seconds(clients * prompt / output, clients, context)
        assert ms == pytest.approx(row["tpot_ms"], rel=0.1)


def test_cost_option_of_the_admission_benchmark_needs_a_name_and_three_or_four_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    costs = import_module("step_costs")
    assert costs.parsed("mine=20,0.1,0.2,0.3") == ("mine", costs.StepCost(20, 0.1, 0.2, 0.3))
    for text in ("mine", "=1,2,3", "mine=1,2", "mine=1,2,-3"):
        with pytest.raises(ValueError, match=r"."):
            costs.parsed(text)
