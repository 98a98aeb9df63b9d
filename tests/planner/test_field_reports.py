"""Tests of the accuracy benchmark's engine sections on the data in tests/data, with minimum scores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from serving import PATIENCE
from shown import how_exact

ROOT = Path(__file__).parent.parent.parent
DATA = ROOT / "tests" / "data"
SECTIONS = ("vllm_blocks", "tokens_given_pool", "pool_from_flags", "model_load", "llama_cpp", "sglang")


@pytest.fixture(scope="module")
def scores():
    """Return the scores of one run of the benchmark in which transformers cannot be imported."""
    command = [
        sys.executable, str(ROOT / "benchmarks" / "planner_accuracy.py"), "--configs", str(DATA / "configs"),
        "--vllm", str(DATA / "configs" / "vllm_kv_truth.tsv"), "--reports", str(DATA / "field_reports.jsonl"),
        "--sections", *SECTIONS, "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_planned_kv_blocks_equal_vllms_own_planning_code(scores):
    section = scores["vllm_blocks"]
    assert section["rows"] >= 47
    assert section["exact"] == section["rows"], section["misses"] + section["refused"]


def test_planned_kv_blocks_equal_the_planning_code_of_13_vllm_versions(scores):
    """Each version's answer is from its own planning code (benchmarks/accuracy/vllm_versions.py)."""
    versions = scores["vllm_blocks"]["versions"]
    assert len(versions) == 13
    for version, row in versions.items():
        assert row["rows"] >= 33, version
        assert row["exact"] == row["rows"], (version, row["misses"])
    rows = sum(row["rows"] for row in versions.values())
    assert how_exact("KV cache, blocks")[1] == f"{rows} of {rows} equal"


@pytest.mark.parametrize(("name", "least_rows"), [("tokens_given_pool", 36), ("llama_cpp", 26)])
def test_planned_kv_cache_tokens_are_exact_for_95_percent_of_published_logs(scores, name, least_rows):
    section = scores[name]
    assert section["scored"] >= least_rows
    assert section["exact"] >= 0.95 * section["scored"], section["misses"]


def test_planned_sglang_pool_tokens_are_within_1_percent_of_logs(scores):
    section = scores["sglang"]
    assert section["scored"] >= 11
    assert section["within_1_percent"] >= 0.95 * section["scored"], section["misses"]


def test_planned_kv_pool_is_within_bounds_on_logs_not_used_for_fitting(scores):
    section = scores["pool_from_flags"]
    assert section["rows"] >= 10
    assert section["median_error"] <= 0.015
    assert how_exact("KV pool from flags alone") == (
        f"{section['rows']} sources",
        f"median {100 * section['median_error']:.2f} % of the GPU",
    )
    assert section["p90_error"] <= 0.04
    assert section["covered"] >= 0.9 * section["rows"]
    assert section["widest_interval"] <= 0.08


@pytest.mark.parametrize("left_out", ["shipped", "gpu_left_out"])
def test_planned_kv_pool_is_within_bounds_on_gpu_types_not_used_for_fitting(scores, left_out):
    found = scores["pool_from_flags"][left_out]
    assert found["sources"] >= 8
    assert found["median_error"] <= 0.01
    assert found["covered"] >= 0.85 * found["sources"]
    assert found["widest_interval"] <= 0.08


def test_planned_weights_are_within_1_percent_of_logged_model_sizes(scores):
    section = scores["model_load"]
    assert section["scored"] >= 32
    assert section["median_error"] <= 0.005
    assert section["within_1_percent"] >= 0.95 * section["scored"], section["misses"]


def test_shipped_coefficients_equal_a_fit_of_the_recorded_logs(tmp_path):
    """planner/engines/runtime/fitted.json equals what benchmarks/fit_runtime.py writes from tests/data."""
    script = str(ROOT / "benchmarks" / "fit_runtime.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])["coefficients"]
    shipped = json.loads((ROOT / "planner" / "engines" / "runtime" / "fitted.json").read_text())["coefficients"]
    assert shipped == pytest.approx(found)
