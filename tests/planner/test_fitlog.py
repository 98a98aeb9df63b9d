"""``tonnage fit-log``: figures out of real start-up lines, the comparison, the refit, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tonnage.planner.errors import ConfigError
from tonnage.planner.fitlog.command import Comparison, refit_terms, run
from tonnage.planner.fitlog.read import parse_log, read_log

DATA = Path(__file__).parent.parent / "data"
GIB = 1 << 30
REPORTS = [json.loads(line) for line in (DATA / "field_reports.jsonl").read_text().splitlines()]


def quoted(predicate):
    return [report for report in REPORTS if report["quote"] and predicate(report)]


@pytest.mark.parametrize(
    ("figure", "observed", "unit"),
    [
        ("weights_bytes", "model_load_gib", GIB), ("kv_pool_bytes", "available_kv_gib", GIB),
        ("tokens", "kv_tokens", 1), ("max_concurrency", "max_concurrency", 1),
    ],
)  # fmt: skip
def test_every_quoted_vllm_log_is_read(figure, observed, unit):
    """Where the quote holds the line, the figure is the one the report's collector noted."""
    marks = {
        "weights_bytes": "Model loading took", "kv_pool_bytes": "Available KV cache memory",
        "tokens": "KV cache size:", "max_concurrency": "Maximum concurrency",
    }  # fmt: skip
    rows = quoted(
        lambda r: (
            r["engine"] == "vLLM" and marks[figure] in r["quote"] and r["source_kind"].startswith("server log")
        )
    )
    assert len(rows) > 20
    for row in rows:
        read = parse_log(row["quote"]).figures[figure]
        assert read / unit == pytest.approx(row["observed"][observed], abs=0.006), row["source"]


def test_sglang_and_llama_cpp_pools():
    sglang = quoted(lambda r: r["engine"] == "SGLang" and r["observed"].get("kv_pools"))[0]
    found = parse_log(sglang["quote"])
    assert found.engine == "sglang"
    assert found.figures["kv_pool_bytes"] / GIB == pytest.approx(
        sglang["observed"]["available_kv_gib"], abs=0.006
    )
    llama = quoted(lambda r: r["engine"] == "llama.cpp" and r["observed"].get("kv_pools_mib"))[0]
    found = parse_log(llama["quote"])
    assert found.engine == "llama.cpp"
    assert found.figures["kv_pool_bytes"] / (1 << 20) == pytest.approx(sum(llama["observed"]["kv_pools_mib"]))


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(DATA / "configs" / "Qwen__Qwen3-30B-A3B.json", folder / "config.json")
    return folder


def test_a_real_log_against_the_plan(tmp_path, model, capsys):
    """vLLM 0.10.2 on an H100: every term within the bounds the planner states."""
    report = next(r for r in REPORTS if r["source"].startswith("github.com/kolyangg/mlops-assignment"))
    log = tmp_path / "start.log"
    log.write_text(report["quote"] + "\n")
    arguments = [
        str(log),
        "--model",
        str(model),
        "--gpu",
        "h100-80g",
        "--engine-version",
        report["engine_version"],
    ]
    assert run([*arguments, "--json"]) == 0
    (out,) = json.loads(capsys.readouterr().out)["logs"]
    terms = out["terms"]
    assert set(terms) >= {"weights_bytes", "kv_pool_bytes", "tokens"}
    assert abs(terms["weights_bytes"]["planned"] / terms["weights_bytes"]["logged"] - 1) < 0.01
    pool = terms["kv_pool_bytes"]
    assert abs(pool["planned"] - pool["logged"]) < 0.04 * 79.18 * GIB
    assert run(arguments) == 0
    assert "difference" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("engine", "arguments", "term"),
    [("SGLang", ["--tensor-parallel-size", "2"], "tokens"), ("llama.cpp", [], "kv_pool_bytes")],
)
def test_logs_of_sliding_windows(engine, arguments, term, tmp_path, capsys):
    """Gemma 4 under SGLang (two pools, their ratio is in the log) and llama.cpp (two caches, two streams); the
    weights are of another format than the config's, which is said instead of compared."""
    report = next(r for r in REPORTS if r["engine"] == engine and r["config"] == "google__gemma-4-26B-A4B")
    shutil.copy(DATA / "configs" / "google__gemma-4-26B-A4B.json", tmp_path / "config.json")
    (tmp_path / "start.log").write_text(report["quote"])
    command = [str(tmp_path / "start.log"), "--model", str(tmp_path), *arguments]
    assert run([*command, "--json"]) == 0
    (out,) = json.loads(capsys.readouterr().out)["logs"]
    assert set(out["terms"]) == {term}
    assert abs(out["terms"][term]["planned"] / out["terms"][term]["logged"] - 1) < 0.001
    assert run(command) == 0
    assert "weights not compared" in capsys.readouterr().out


def test_refit_leaves_logs_out():
    logs = [Comparison(str(i), (("activation_bytes", 100.0, 150.0 + i),)) for i in range(4)]
    factor, before, after = refit_terms(logs)["activation_bytes"]
    assert factor == pytest.approx(1.515)
    assert after < 0.02 < before
    assert refit_terms(logs[:2]) == {}


def test_bad_logs_are_refused(tmp_path, capsys):
    empty = tmp_path / "empty.log"
    empty.write_text("hello\n")
    with pytest.raises(ConfigError, match="no start-up line"):
        read_log(empty)
    assert run([str(tmp_path / "missing.log")]) == 2
    assert "missing.log" in capsys.readouterr().err
    nameless = tmp_path / "nameless.log"
    nameless.write_text("Available KV cache memory: 8.68 GiB\n")
    assert run([str(nameless)]) == 2
    assert "--model" in capsys.readouterr().err
