"""Tests of ``tonnage train``: output formats, search, tricks, sweep and emitted configuration."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml
from html_pages import Document

from tonnage.planner.devices.catalogue import find_gpu
from tonnage.planner.training import emit
from tonnage.planner.training.combinations import MOST_TRIED, combinations
from tonnage.planner.training.command import run
from tonnage.planner.training.html import plan_page
from tonnage.planner.training.links import parse_speed
from tonnage.planner.training.search import largest
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.sweep import parse_axis, sweep
from tonnage.planner.training.tricks import tricks

A100 = find_gpu("a100-80g").memory_bytes


def test_totals_in_the_json_of_train_equal_the_sums_of_their_lines(folder, capsys):
    assert run([folder, "--json", "--explain", "--strategy", "zero3", "--gpus", "8", "--gpu", "a100-80g"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["parameters"] == 8_030_261_248
    assert found["fits"] is True
    assert found["gpu_bytes"] == sum(x["bytes"] for x in found["lines"] if x["place"] == "gpu")
    assert found["gpu_bounds"][0] <= found["gpu_bytes"] <= found["gpu_bounds"][1]
    assert found["effective_batch"] == 8
    assert found["convention"]["name"] == "zero"
    assert all(x["formula"] and x["source"] for x in found["lines"])


def test_train_output_states_bytes_per_parameter_and_the_effective_batch(folder, capsys):
    assert run([folder, "--convention", "huggingface", "--gradient-accumulation", "4"]) == 0
    out = capsys.readouterr().out
    assert "18 bytes a parameter" in out
    assert "= 4 sequences" in out
    assert "\x1b" not in out


def test_training_that_does_not_fit_exits_1_with_reason(folder, capsys):
    assert run([folder, "--gpu", "rtx-4090"]) == 1
    out = capsys.readouterr().out
    assert "Does not fit: gpu:" in out
    assert out.endswith("--tricks ranks what would make it fit.\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "h9000"], ["--gpu", "h9000"]),
        (["--micro-batch", "1.5"], ["--micro-batch", "1.5"]),
        (["--intra-node", "fast"], ["--intra-node", "nvlink4"]),
        (["--network-share", "lots"], ["--network-share", "lots"]),
        (["--sweep", "colour=red"], ["--sweep", "colour"]),
        (["--sweep", "micro-batch=x"], ["--sweep", "'x'"]),
        (["--find", "everything", "--gpu", "a100-80g"], ["--find", "everything"]),
        (["--emit", "deepspeed"], ["--emit", "zero3"]),
        (["--emit", "peft"], ["--emit", "lora"]),
        (["--attention", "flash", "--gpu", "t4"], ["--attention", "Ampere", "7.5"]),
        (["--compute-capability", "ampere"], ["--compute-capability", "8.0"]),
        (["--frobnicate"], ["--frobnicate"]),
        (["--gpu", "a100-80g", "--device-memory", "80GiB"], ["--gpu", "--device-memory"]),
        (["--html", "/nowhere/at/all.html"], ["--html", "/nowhere"]),
    ],
)
def test_train_command_reports_bad_input_in_one_line_and_exits_2(folder, capsys, arguments, words):
    assert run([folder, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words)


def test_train_prints_deepspeed_estimates(folder, capsys):
    """The tables are 0.19.8's for 8,030,261,248 parameters (tests/data/training/deepspeed_estimates.json)."""
    assert run([folder, "--gpus", "8", "--nodes", "2", "--emit", "deepspeed-estimate"]) == 0
    out = capsys.readouterr().out
    assert "SW: Model with 8030M total params, 525M largest layer params." in out
    assert "  717.96GB |  14.96GB | offload_optimizer=cpu " in out
    assert "   23.48GB |  10.37GB | offload_param=none, offload_optimizer=none, zero_init=1" in out


def test_train_command_imports_no_heavy_module(folder):
    code = (
        "import sys; from tonnage.server.cli import main\n"
        f"code = main(['train', {folder!r}, '--json', '--tricks', '--gpu', 'a100-80g'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'peft', 'importlib.metadata'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (1, "[]")


def test_largest_micro_batch_fits_and_one_more_does_not(planner):
    setup = TrainingSetup(method="lora", device_memory=A100)
    found = largest(planner, setup, "micro_batch")
    assert planner.plan(replace(setup, micro_batch=found.value)).fits is True
    assert planner.plan(replace(setup, micro_batch=found.value + 1)).fits is False
    assert found.aligned is None or found.aligned % 8 == 0


def test_longest_training_sequence_fits_and_a_longer_one_does_not(planner):
    setup = TrainingSetup(method="qlora", device_memory=A100)
    found = largest(planner, setup, "sequence_length")
    assert planner.plan(replace(setup, sequence_length=found.value)).fits is True
    assert planner.plan(replace(setup, sequence_length=found.value + 1)).fits is False


def test_memory_saving_techniques_are_ranked_for_the_model(planner):
    setup = TrainingSetup(device_memory=A100, micro_batch=2, attention="eager", gpus=8)
    rows = tricks(planner, setup)
    base = planner.plan(setup)
    names = {t.name for t in rows}
    for word in ("gradient accumulation", "gradient checkpointing", "pure bf16", "optimizer adamw-8bit", "LoRA",
                 "QLoRA", "FlashAttention", "ZeRO stage 3", "ZeRO-Offload (optimizer to CPU)",
                 "data loader (pinned, 4 workers)"):  # fmt: skip
        assert word in names
    assert any(name.startswith("micro-batch 8") for name in names)
    for t in rows:
        assert t.saved == base.total() - t.gpu_bytes
        if t.changes and not t.name.startswith("together"):
            assert planner.plan(replace(setup, **dict(t.changes))).total() == t.gpu_bytes
    fitting = [t for t in rows if t.fits]
    assert rows[: len(fitting)] == tuple(fitting)  # what fits comes first
    assert [t.relative_time for t in fitting] == sorted(t.relative_time for t in fitting) or len(fitting) < 2
    by = {t.name: t for t in rows}
    assert 1.2 < by["gradient checkpointing"].relative_time < 1.4
    assert by["LoRA"].relative_time < 1


def test_memory_saving_techniques_are_combined_if_no_single_one_is_enough(planner):
    setup = TrainingSetup(device_memory=24 << 30, micro_batch=64)
    rows = tricks(planner, setup)
    assert rows[0].name.startswith("together: ")
    assert planner.plan(replace(setup, **dict(rows[0].changes))).fits is True
    assert not any(t.fits for t in rows[1:])


def test_row_of_a_training_sweep_equals_the_plan_or_states_the_rejection(planner):
    axes = [parse_axis("micro-batch=1,2"), parse_axis("strategy=ddp,zero3"), parse_axis("tensor-parallel=1,3")]
    rows = list(sweep(planner, TrainingSetup(gpus=3, device_memory=A100), axes))
    assert [r.values for r in rows][:3] == [(1, "ddp", 1), (1, "ddp", 3), (1, "zero3", 1)]
    assert len(rows) == 8
    for row in rows:
        if row.values[2] == 3:
            assert "attention heads" in row.refused
        else:
            names = ("micro_batch", "strategy", "tensor_parallel")
            setup = TrainingSetup(gpus=3, device_memory=A100, **dict(zip(names, row.values, strict=True)))
            assert row.gpu_bytes == planner.plan(setup).total()


def test_train_command_with_sweep_flags_prints_one_row_per_combination(folder, capsys):
    assert run([folder, "--sweep", "micro-batch=1,2", "--sweep", "checkpointing=none,full", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fields"] == ["micro_batch", "checkpointing"]
    assert len(found["rows"]) == 4
    assert run([folder, "--sweep", "micro-batch=1,2"]) == 0
    titles, *rows = capsys.readouterr().out.splitlines()
    assert titles.split() == ["micro_batch", "GPU", "GiB", "fits"]
    figures = [float(row.split()[1].replace(",", "")) for row in rows]
    assert figures == [round(row["gpu_bytes"] / (1 << 30), 2) for row in found["rows"][::2]]
    assert run([folder, "--gpus", "3", "--sweep", "strategy=ddp,zero3", "--sweep", "tensor-parallel=1,3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("2 rows refused: ") for line in lines)


def test_train_html_is_complete_and_escaped(planner, tmp_path, folder):
    plan = planner.plan(TrainingSetup(device_memory=A100))
    text = plan_page(replace(plan, model="<script>alert(1)</script>"), tricks(planner, plan.setup))
    assert "&lt;script&gt;alert(1)" in text
    assert Document(text).scripts == 1  # the page's own
    for line in plan.lines:
        assert f"{line.bytes:,}" in text
    assert run([folder, "--html", str(tmp_path / "plan.html")]) == 0
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    assert Document((tmp_path / "plan.html").read_text()).facts["device"] == "1 x GPU"
    asked = [folder, "--gpu", "a100-80g", "--gpus", "8", "--sweep", "micro-batch=1,2", "--html"]
    assert run([*asked, str(tmp_path / "sweep.html")]) == 0
    swept = Document((tmp_path / "sweep.html").read_text())
    assert swept.rows == 3  # and the head's
    assert swept.facts["device"].startswith("8 x a100-80g of ")
    assert run([*asked[:5], "--sweep", "gpus=1,8", "--html", str(tmp_path / "gpus.html")]) == 0
    assert Document((tmp_path / "gpus.html").read_text()).facts["device"].startswith("a100-80g of ")
    assert swept.command == shlex.join(["tonnage", "train", *asked, str(tmp_path / "sweep.html")])


def test_emitted_deepspeed_json_has_plan_settings(planner):
    setup = TrainingSetup(strategy="zero3", gpus=8, micro_batch=2, gradient_accumulation=4,
                          offload_optimizer="cpu", offload_param="nvme", hpz_partition_size=8)  # fmt: skip
    found = json.loads(emit.emit("deepspeed", planner.plan(setup), planner.model.architecture))
    assert found["train_batch_size"] == 2 * 4 * 8
    assert found["bf16"] == {"enabled": True}
    zero = found["zero_optimization"]
    assert (zero["stage"], zero["zero_hpz_partition_size"]) == (3, 8)
    assert zero["offload_optimizer"]["device"] == "cpu"
    assert zero["offload_param"] == {"device": "nvme", "pin_memory": True, "nvme_path": "/local_nvme"}


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp", "fsdp-grad-op", "fsdp-hybrid"])
@pytest.mark.parametrize("version", [1, 2])
def test_accelerate_loads_emitted_yaml(planner, tmp_path, strategy, version):
    """The loader is accelerate's own."""
    accelerate = pytest.importorskip(
        "accelerate.commands.config.config_args", reason="accelerate reads the file"
    )
    setup = TrainingSetup(strategy=strategy, gpus=8, fsdp_version=version)
    path = tmp_path / "accelerate.yaml"
    path.write_text(emit.emit("accelerate", planner.plan(setup), planner.model.architecture))
    found = accelerate.load_config_from_file(str(path))
    kind = {"d": "MULTI_GPU", "z": "DEEPSPEED", "f": "FSDP"}[strategy[0]]
    assert found.distributed_type == kind
    assert found.num_processes == 8
    assert yaml.safe_load(path.read_text())["mixed_precision"] == "bf16"
    if kind == "FSDP":
        assert found.fsdp_config["fsdp_version"] == version


@pytest.mark.parametrize(("strategy", "backend"), [("ddp", "TE"), ("zero2", "TE"), ("fsdp", "AO")])
def test_accelerate_loads_planned_fp8_backend(planner, tmp_path, strategy, backend):
    accelerate = pytest.importorskip(
        "accelerate.commands.config.config_args", reason="accelerate reads the file"
    )
    plan = planner.plan(TrainingSetup(precision="fp8", strategy=strategy, gpus=8))
    path = tmp_path / "accelerate.yaml"
    path.write_text(emit.emit("accelerate", plan, planner.model.architecture))
    found = accelerate.load_config_from_file(str(path))
    assert (found.mixed_precision, found.fp8_config) == ("fp8", {"backend": backend})


def test_train_notes_upper_bound_above_device_memory(folder, capsys):
    arguments = [folder, "--method", "lora", "--gpus", "2", "--json"]
    assert run(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    low, high = found["gpu_bounds"]
    assert low < found["gpu_bytes"] < high
    assert run([*arguments[:-1], "--device-memory", str(found["gpu_bytes"] + 1)]) == 0
    assert "Fits, but the upper end" in capsys.readouterr().out
    assert run([*arguments[:-1], "--device-memory", str(high)]) == 0
    assert capsys.readouterr().out.rstrip().endswith("Fits.")


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"optimizer": "galore-adamw", "compile": True},
        {"optimizer": "adamw-8bit"},
        {"optimizer": "adafactor", "checkpointing": "full"},
        {"loss": "fused"},
    ],
)
def test_transformers_accepts_emitted_training_arguments(planner, tmp_path, extra):
    """The class is transformers' own; flags that a CPU cannot run are checked by value and left out."""
    transformers = pytest.importorskip("transformers", reason="TrainingArguments is its")
    found = json.loads(
        emit.emit("trainer", planner.plan(TrainingSetup(micro_batch=3, **extra)), planner.model.architecture)
    )
    assert found.pop("bf16") is True
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **found)
    assert arguments.per_device_train_batch_size == 3


@pytest.mark.parametrize("method", ["lora", "qlora", "ia3"])
def test_peft_accepts_emitted_config(planner, method):
    peft = pytest.importorskip("peft", reason="the configs are PEFT's")
    found = json.loads(
        emit.emit("peft", planner.plan(TrainingSetup(method=method)), planner.model.architecture)
    )
    quantization = found.pop("quantization_config", None)
    assert (quantization is not None) == (method == "qlora")
    kind = found.pop("peft_type")
    config = (peft.IA3Config if kind == "IA3" else peft.LoraConfig)(**found)
    assert set(config.target_modules) == (
        {"k_proj", "v_proj", "down_proj"} if method == "ia3" else {"q_proj", "v_proj"}
    )


@pytest.mark.parametrize(
    ("text", "speed"),
    [("nvlink4", 450 * 10**9), ("ndr", 50 * 10**9), ("400Gbps", 50 * 10**9), ("12.5 GB/s", 12_500_000_000)],
)
def test_parse_speed_reads_names_and_units(text, speed):
    assert parse_speed(text, "--x") == speed


def test_combinations_of_memory_saving_techniques_that_fit_are_listed_in_order(planner, folder, capsys):
    """No single trick is enough: all pairs are tried, and each listed pair is a plan that fits."""
    setup = TrainingSetup(device_memory=24 << 30, micro_batch=8)
    rows = tricks(planner, setup)
    found = combinations(planner, setup, rows)
    alone = [t for t in rows if t.fits and t.changes and not t.name.startswith("together: ")]
    assert found.rows
    assert found.complete
    assert 0 < found.tried <= MOST_TRIED
    for row in found.rows[:5]:
        assert planner.plan(replace(setup, **dict(row.changes))).fits is True
        parts = row.name.split(" + ")
        assert not any(t.name in parts for t in alone)
        for t in rows:
            if t.name in parts:
                assert planner.plan(replace(setup, **dict(t.changes))).fits is False
    times = [round(t.relative_time, 3) for t in found.rows]
    assert times == sorted(times)
    assert found.smallest is not None
    assert found.smallest.name.count(" + ") == (0 if alone else 1)
    run([folder, "--tricks", "--device-memory", "24GiB", "--micro-batch", "8"])
    out = capsys.readouterr().out
    assert f"The smallest change that fits: {found.smallest.name} ({found.smallest.flags})" in out
    assert f"{found.tried} combinations were planned, all that exist." in out
    run([folder, "--tricks", "--device-memory", "24GiB", "--micro-batch", "8", "--json"])
    told = json.loads(capsys.readouterr().out)["combinations"]
    assert told["smallest"]["flags"] == found.smallest.flags
    assert [t["name"] for t in told["rows"]] == [t.name for t in found.rows]


def test_number_of_tried_technique_combinations_is_bounded(planner):
    setup = TrainingSetup(device_memory=24 << 30, micro_batch=8)
    rows = tricks(planner, setup)
    found = combinations(planner, setup, rows, most=3)
    assert (found.tried, found.complete) == (3, False)


def test_training_setup_that_fits_tries_no_memory_saving_combination(planner):
    setup = TrainingSetup(device_memory=A100, method="lora")
    assert combinations(planner, setup, tricks(planner, setup)).tried == 0
