"""Tests of ``tonnage fit-log``: reading real start-up lines, the comparison, the refit and rejections."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tonnage.planner.command import run as plan_command
from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import find_gpu
from tonnage.planner.errors import ConfigError, DeploymentError
from tonnage.planner.fitlog.command import refit_terms, run
from tonnage.planner.fitlog.comparison import Comparison, Row
from tonnage.planner.fitlog.log_flags import infer_gpu
from tonnage.planner.fitlog.read import parse_log, read_log
from tonnage.planner.planning.build import make_plan
from tonnage.planner.source.resolve import resolve_model
from tonnage.planner.sweep.grid import Grid, sweep

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
def test_memory_figures_parsed_from_vllm_logs_equal_recorded_values(figure, observed, unit):
    """Where the quote holds the line, the figure equals the value recorded with the report."""
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


def test_kv_pool_sizes_are_read_from_sglang_and_llama_cpp_logs():
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


def test_figures_of_a_real_vllm_log_are_within_the_plans_bounds(tmp_path, model, capsys):
    """The log is of vLLM 0.10.2 on an H100; every term lies within the plan's bounds."""
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
    assert "differs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("engine", "arguments", "term"),
    [("SGLang", ["--tensor-parallel-size", "2"], "tokens"), ("llama.cpp", [], "kv_pool_bytes")],
)
def test_sglang_and_llama_cpp_logs_of_a_sliding_window_model_agree_with_the_plan(
    engine, arguments, term, tmp_path, capsys
):
    """Gemma 4 has two pools under SGLang, and two caches with two streams under llama.cpp.

    The weights have another format than the config's, so that the output says "weights not compared".
    """
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


def test_refitted_coefficients_report_their_error_on_held_out_logs():
    logs = [Comparison(str(i), (Row("activation_bytes", 100.0, 150.0 + i),)) for i in range(4)]
    factor, before, after = refit_terms(logs)["activation_bytes"]
    assert factor == pytest.approx(1.515)
    assert after < 0.02 < before
    assert refit_terms(logs[:2]) == {}


def test_file_that_is_no_engine_log_is_rejected_with_the_reason(tmp_path, capsys):
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


LOGS = DATA / "startup_logs"
PP4 = LOGS / "meta-llama-llama-3-1-8b---h100-80gb--tp1pp4dp1--8192.log"
FP8_KV = LOGS / "meta-llama---h100-80gb--tp1pp1dp1--8192-dtbf16-kvfp8.log"
FP8_WEIGHTS = LOGS / "meta-llama-llama-3---h100-80gb--tp1pp1dp1--8192-qfp8.log"
FLOAT32 = LOGS / "meta-llama-llama-3--h100-80gb--tp1pp1dp1--8192-dtf32.log"


@pytest.fixture
def llama(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    shutil.copy(DATA / "configs" / "meta-llama__Meta-Llama-3.1-8B.json", folder / "config.json")
    return str(folder)


def fit_log_json(capsys, *arguments):
    assert run([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_log_with_several_pipeline_ranks_agrees_with_the_plan(llama, capsys):
    """One of four stages logs its pool: 2,257,264 tokens of the smallest pool, and each stage's weights."""
    (log,) = fit_log_json(capsys, PP4, "--model", llama, "--gpu", "h100-80g")["logs"]
    assert [*log["ranks"]] == ["PP0", "PP1", "PP2", "PP3"]
    for rank in log["ranks"].values():
        assert rank["weights_bytes"]["verdict"] == "agrees"
        assert rank["weights_bytes"]["interval"] is None
    assert log["terms"]["weights_bytes"]["logged"] == pytest.approx(4.26 * GIB)  # PP3 is the largest
    tokens = log["terms"]["tokens_of_logged_pool"]
    low, high = tokens["interval"]
    assert low <= tokens["logged"] == 2_257_264 <= high
    assert high - low < 0.001 * tokens["logged"]
    assert tokens["verdict"] == "agrees"
    assert log["not_in_the_log"] == []
    assert run([str(PP4), "--model", llama, "--gpu", "h100-80g"]) == 0
    shown = capsys.readouterr().out
    assert "PP1-PP2" in shown
    table = [line for line in shown.splitlines() if line.endswith((" plan", "agrees"))]
    assert len({len(line.removesuffix("plan").removesuffix("agrees")) for line in table}) == 1  # aligned
    # The rows have one "too high", of ranks that do not decide, and the verdict counts it.
    assert sum(line.endswith("too high") for line in shown.splitlines()) == 1
    assert log["verdict"].startswith(
        "the plan holds for the rank with the smallest pool, not for others: 16 of 17 terms agree; worst: "
        "activations of PP1-PP2, "
    )
    assert all(len(line) <= 80 for line in table)


TP2 = LOGS / "qwen-qwen2-5-7b-instruct--h100-80gb--tp2pp1dp1--8192.log"


def test_gpu_is_inferred_from_the_total_memory_in_the_log(folder_with, config_of, capsys):
    folder = folder_with(config_of("Qwen/Qwen2.5-7B"))
    (log,) = fit_log_json(capsys, TP2, "--model", folder)["logs"]
    (given,) = fit_log_json(capsys, TP2, "--model", folder, "--gpu", "h100-80g")["logs"]
    assert log["terms"]["non_torch_bytes"]["verdict"] == "agrees"
    assert log["terms"]["non_torch_bytes"]["planned"] == given["terms"]["non_torch_bytes"]["planned"]
    assert log["assumed"] == ["--gpu h100-80g (the log's total is 79.19 GiB)"]
    assert given["assumed"] == []
    assert run([str(TP2), "--model", folder]) == 0
    assert "Assumed: --gpu h100-80g" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("total", "words"),
    [("23.59", "rtx3090ti-24g"), ("60.00", "of no GPU in the cat")],
)
def test_gpu_flag_is_requested_if_the_logs_memory_total_fits_several_gpus(
    folder_with, config_of, tmp_path, capsys, total, words
):
    folder = folder_with(config_of("Qwen/Qwen2.5-7B"))
    log = tmp_path / "start.log"
    log.write_text(TP2.read_text().replace("79.19", total))
    (found,) = fit_log_json(capsys, log, "--model", folder)["logs"]
    assert "non_torch_bytes" not in found["terms"]
    assert "kv_pool_bytes" not in found["terms"]
    (note,) = (note for note in found["notes"] if note.startswith("not compared, as they depend on the GPU: "))
    assert f"(--gpu; the log's total of {total} GiB " in note
    assert words in note


@pytest.mark.parametrize(
    ("total", "gpu"),
    [
        (79.19, "h100-80g"),
        (79.22, "a100-80g"),
        (39.56, "a100-40g"),
        (139.81, "h200-141g"),
        (23.52, "rtx4090-24g"),
    ],
)
def test_gpu_of_a_log_is_inferred_from_published_memory_totals(total, gpu):
    found, _ = infer_gpu(total * GIB)
    assert found[0].name == gpu


def test_log_of_a_start_that_quantizes_to_fp8_while_loading_agrees_with_the_plan(llama, capsys):
    (log,) = fit_log_json(capsys, FP8_WEIGHTS, "--model", llama, "--gpu", "h100-80g")["logs"]
    assert log["terms"]["weights_bytes"]["verdict"] == "agrees"
    assert "its weights were quantized to fp8 while loading" in json.dumps(log)


def test_disagreement_of_log_and_plan_names_the_memory_terms_and_the_direction(llama, tmp_path, capsys):
    """A log with weights and pool of another model names the terms and the direction of each miss."""
    other = tmp_path / "other.log"
    other.write_text(FP8_KV.read_text().replace("14.99 GiB", "19.99 GiB").replace("58.11 GiB", "40.11 GiB"))
    (log,) = fit_log_json(capsys, other, "--model", llama, "--gpu", "h100-80g")["logs"]
    assert log["terms"]["weights_bytes"]["verdict"] == "planned too low"
    assert log["terms"]["kv_pool_bytes"]["verdict"] == "planned too high"
    assert log["terms"]["tokens_of_logged_pool"]["verdict"] == "planned too low"  # 952,032 do not fit into it
    assert "does not hold" in log["verdict"]
    assert "% too high" in log["verdict"]


def test_log_without_logged_settings_is_planned_from_the_flags_with_notes(llama, tmp_path, capsys):
    short = tmp_path / "short.log"
    short.write_text(
        "INFO 05-18 22:45:07 [gpu_model_runner.py:4364] Model loading took 14.99 GiB memory and 3.5 seconds\n"
        "INFO 05-18 22:45:15 [gpu_worker.py:424] Available KV cache memory: 50.0 GiB\n"
    )
    arguments = [short, "--model", llama, "--gpu", "h100-80g", "--engine-version", "0.19.0"]
    (log,) = fit_log_json(capsys, *arguments, "--max-num-seqs", "64")["logs"]
    missing = " ".join(log["not_in_the_log"])
    assert "activation_bytes" in missing
    assert "DEBUG" in missing
    assert "tokens" in missing
    assert "version" in missing
    assumed = " ".join(log["assumed"])
    assert "--max-num-batched-tokens 8,192" in assumed
    assert "--max-num-seqs" not in assumed


def test_flag_that_contradicts_the_log_adds_a_note(llama, capsys):
    """The log takes precedence, and a note names each flag that is not used."""
    base = [FP8_KV, "--model", llama, "--gpu", "h100-80g"]
    (plain,) = fit_log_json(capsys, *base)["logs"]
    (agrees,) = fit_log_json(capsys, *base, "--kv-cache-dtype", "fp8")["logs"]
    assert agrees["notes"] == plain["notes"]
    (log,) = fit_log_json(capsys, *base, "--kv-cache-dtype", "bfloat16", "--engine-version", "0.10.0")["logs"]
    said = "\n".join(log["notes"])
    assert "--kv-cache-dtype bfloat16 is not used: the log says fp8" in said
    assert "planned for version 0.10.0 (--engine-version); the log is of 0.19.0" in said
    assert log["terms"]["tokens_of_logged_pool"] == plain["terms"]["tokens_of_logged_pool"]


def test_log_of_a_differently_quantized_checkpoint_adds_a_note(llama, tmp_path, capsys):
    """The log has only weights, of a model in 4 bits; the comparison needs no GPU."""
    short = tmp_path / "short.log"
    short.write_text(
        "INFO 05-18 22:45:07 [gpu_model_runner.py:4364] Model loading took 5.5976 GiB and 3.5 seconds\n"
    )
    (log,) = fit_log_json(capsys, short, "--model", llama, "--engine-version", "0.19.0")["logs"]
    assert [*log["terms"]] == ["weights_bytes"]
    assert any("0.37 times" in note for note in log["notes"])
    assert any("the log prints no pool" in note for note in log["notes"])
    short.write_text(
        "INFO 05-18 22:45:07 [gpu_model_runner.py:4364] Model loading took 14.9889 GiB and 3.5 seconds\n"
    )
    (log,) = fit_log_json(capsys, short, "--model", llama, "--engine-version", "0.19.0")["logs"]
    assert log["terms"]["weights_bytes"]["verdict"] == "agrees"  # to a few KiB in 15 GiB


def test_log_of_failed_start_reports_failure_reason(llama, capsys):
    failed = next(LOGS.glob("*FAILED*"))
    (log,) = fit_log_json(capsys, failed, "--model", llama, "--gpu", "h100-80g")["logs"]
    assert log["failure"] == "AssertionError: DP adjusted local rank 1 is out of bounds."
    assert log["verdict"].startswith("the start failed")
    assert "the plan expects these flags to start; the failure has another reason" in log["notes"]
    (log,) = fit_log_json(capsys, failed, "--model", llama, "--gpu", "h100-80g", "--num-gpus", "1")["logs"]
    assert f"the plan expects this error: {log['failure']}" in log["notes"]


def test_calibration_from_one_log_corrects_the_plan_of_another_start(llama, tmp_path, capsys):
    """A start with an fp8 cache corrects the plan of a start with fp8 weights on the same GPU."""
    file = tmp_path / "h100.json"
    for _ in range(2):  # the same log twice is one start
        out = fit_log_json(capsys, FP8_KV, "--model", llama, "--gpu", "h100-80g", "--calibrate", file)
        assert out["calibration"]["starts"] == 1
    flags = Deployment(
        engine="vllm", engine_version="0.19.0", gpu="h100-80g", gpu_memory_utilization=0.95, max_model_len=8192,
        quantization="fp8",
    )  # fmt: skip
    before, after = make_plan(llama, flags), make_plan(llama, replace(flags, calibration=str(file)))
    assert after.rank.framework_bytes == int(0.25 * GIB)
    assert after.rank.activation_bytes == pytest.approx(1.89 * GIB, rel=1e-6)
    pool = parse_log(FP8_WEIGHTS.read_text()).figures["kv_pool_bytes"]
    assert abs(after.rank.kv_pool_bytes - pool) < 0.001 * pool
    width = [high - low for low, high in (plan.intervals["used_bytes"] for plan in (before, after))]
    assert width[1] < width[0]
    assert any("calibrated by 1 start of vllm 0.19 on h100-80g" in note for note in after.notes)
    assert before.plan_id != after.plan_id
    # and so is each row of a table
    source, learnt = resolve_model(llama), replace(flags, calibration=str(file))
    gpus = (find_gpu("h100-80g"), find_gpu("l40s-48g"))
    measured, other = sweep(source, learnt, Grid(gpus, ("fp8",), ("auto",), (1,)), [(2000, 300)])
    assert (measured.kv_pool_bytes, measured.runtime_bytes) == (
        after.rank.kv_pool_bytes, after.rank.framework_bytes + after.rank.activation_bytes
        + after.rank.cuda_graph_bytes,
    )  # fmt: skip
    assert {*measured.notes} <= {*after.notes}
    assert any("no start of vllm 0.19 on l40s-48g" in note for note in other.notes)
    # the calibration does not apply to another version
    newer = replace(flags, engine_version="0.20.0")
    same = make_plan(llama, replace(newer, calibration=str(file)))
    assert same.ranks == make_plan(llama, newer).ranks
    assert any("no start of vllm 0.20" in note for note in same.notes)


@pytest.mark.parametrize(
    "content", ["{}", "[1]", '{"tonnage_calibration": 1, "starts": [{"engine": "vllm"}]}', "x"]
)
def test_invalid_calibration_file_is_rejected(content, llama, tmp_path, capsys):
    file = tmp_path / "c.json"
    file.write_text(content)
    with pytest.raises(DeploymentError, match="is not a calibration file"):
        make_plan(llama, Deployment(engine="vllm", gpu="h100-80g", calibration=str(file)))
    assert run([str(FLOAT32), "--model", llama, "--gpu", "h100-80g", "--calibrate", str(file)]) == 2
    assert "is not a calibration file" in capsys.readouterr().err
    assert file.read_text() == content
    with pytest.raises(DeploymentError, match="No such file"):
        make_plan(llama, Deployment(engine="vllm", gpu="h100-80g", calibration=str(tmp_path / "none.json")))
    assert plan_command([llama, "--gpu", "h100-80g,l40s", "--calibration", str(file)]) == 2
    assert "is not a calibration file" in capsys.readouterr().err


def test_log_without_activation_bytes_is_rejected_for_calibration(llama, tmp_path, capsys):
    short = tmp_path / "short.log"
    short.write_text(
        "Model loading took 14.99 GiB memory and 3.5 seconds\nAvailable KV cache memory: 50.0 GiB\n"
    )
    file = tmp_path / "c.json"
    assert run([str(short), "--model", llama, "--gpu", "h100-80g", "--calibrate", str(file)]) == 2
    assert "no log states the bytes of activations" in capsys.readouterr().err
    assert not file.exists()
