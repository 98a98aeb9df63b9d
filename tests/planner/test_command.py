"""Tests of ``tonnage plan`` as a process: exit codes, one-line errors, piped and terminal output."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module

import pytest
from terminal import Terminal

from tonnage.planner.command import run
from tonnage.planner.deployment import Deployment
from tonnage.planner.devices import catalogue
from tonnage.planner.errors import DeploymentError
from tonnage.planner.output.terminal import print_plan
from tonnage.planner.planning.build import make_plan
from tonnage.planner.units import gib, parse_count, parse_size

CODE = "import sys; from tonnage.planner.command import run; sys.exit(run(sys.argv[1:]))"


@pytest.fixture
def plan(tmp_path):
    environment = {**os.environ, "TONNAGE_CACHE": str(tmp_path)}

    def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", CODE, *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, **options)

    return run


def test_plan_command_with_json_prints_the_plan_and_exits_0(plan):
    done = plan("demo", "--json", "--kv-cache-memory-bytes", "512MiB", "--device-memory", "16GiB")
    assert done.returncode == 0
    assert json.loads(done.stdout)["fits"] is True
    assert done.stderr == ""


def test_piped_plan_output_has_no_terminal_codes(plan):
    done = plan("demo", "--explain", "--device-memory", "16GiB")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "kv_cache.bytes_per_block = 368,640" in done.stdout


def test_plan_output_on_a_terminal_has_bars(tmp_path):
    """Rich draws the table on a real pseudo-terminal."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TONNAGE_CACHE": str(tmp_path), "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-c", CODE, "demo", "--device-memory", "16GiB"]
    process = subprocess.Popen(command, stdout=slave, env=environment)
    os.close(slave)
    output = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # Linux: EIO when the other side is closed
            break
        if not chunk:
            break
        output += chunk
    os.close(master)
    assert process.wait() == 0
    assert "█" in output.decode()
    assert "256.6 MiB" in output.decode()


def test_terminal_escapes_in_model_ids_are_removed_and_no_color_turns_colours_off(
    monkeypatch, tiny_llama, folder_with
):
    folder = folder_with(tiny_llama)
    plan = replace(
        made := make_plan(folder, Deployment()), model=replace(made.model, id="x\x1b[31m" + 99 * " y")
    )
    monkeypatch.setenv("COLUMNS", "100")
    for style, escapes in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", style)
        out = Terminal("utf-8")
        print_plan(plan, True, out)
        text = out.shown()
        assert "\x1b[31m y" not in text
        assert "x\\x1b[31m y" in text
        assert ("\x1b[" in text) is escapes
        assert all(term.formula.split()[0] in text for term in plan.terms)
        lines = re.sub(r"\x1b\[\d*m", "", text).splitlines()
        assert max(map(len, lines)) <= 100


def test_first_line_of_plan_output_names_the_device(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path))

    def first(*arguments: str) -> str:
        run(["demo", *arguments])
        return capsys.readouterr().out.partition("\n")[0]

    assert re.fullmatch(r"For this machine's CPU, [\d,.]+ GiB of memory, as no GPU was named; --gpu.*", first())
    assert first("--engine", "vllm", "--device-memory", "16GiB").startswith("For a CPU, 16.00 GiB of memory")
    for named in (["--gpu", "l4"], ["--gpu", "cpu"], ["--device", "cpu"]):
        assert first(*named).startswith("demo: LlamaForCausalLM")
    assert first("--compare", "0.31.0", "0.32.0").startswith("For this machine's CPU")
    run(["demo", "--serve-line"])
    shown = capsys.readouterr()
    assert shown.out.startswith("tonnage serve demo")
    assert shown.err.startswith("For this machine's CPU")


def test_gpu_auto_plans_for_the_cpu_without_an_nvidia_driver(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr(catalogue, "_DRIVER", (str(driver),))
    run(["demo", "--gpu", "auto"])
    assert re.match(r"For this machine's CPU, .* as no NVIDIA GPU was found here", capsys.readouterr().out)
    driver.touch()
    assert run(["demo", "--gpu", "auto"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "nvidia-ml-py" in shown.err
    assert "pip install 'tonnage[gpu]'" in shown.err


def test_plan_command_exits_with_1_if_the_plan_does_not_fit(plan):
    done = plan("demo", "--device-memory", "100MiB", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["reasons"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing-here"], ["model", "nothing-here", "demo"]),
        (["demo", "--max-model-len", "9000"], ["--max-model-len", "9000", "8192"]),
        (["demo", "--device-memory", "12 parsecs"], ["--device-memory", "12 parsecs"]),
        (["demo", "--device-memory", "2G"], ["--device-memory", "2GiB"]),
        (["demo", "--block-size", "1.5"], ["--block-size", "1.5"]),
        (["demo", "--frobnicate"], ["--frobnicate", "--help"]),
        ([], ["MODEL", "--help"]),
        (["demo", "--gpu-memory-utilization", "lots"], ["--gpu-memory-utilization", "lots"]),
        (["demo", "--gpu", "cpu", "--device", "cuda"], ["--device", "cuda", "--gpu cpu"]),
        (["demo", "--dtype", "fp61"], ["--dtype: 'fp61'", "did you mean fp16?"]),
        (
            ["demo", "--sweep", "--price", "l40x=2"],
            ["--price: 'l40x'", "did you mean l40-48g, l40s-48g", "--device-memory"],
        ),
        (["demo", "--rate", "fast"], ["tonnage: --rate: invalid float value: 'fast'"]),
        ([], ["tonnage: the following arguments are required: MODEL ("]),
        (["demo", "--gpu", "t4", "--dtype", "bfloat16"], ["--dtype", "t4-16g", "float16"]),
        (["demo", "--gpu", "l4", "--max-loras", "2"], ["--max-loras", "--enable-lora"]),
        (["demo", "--gpu", "l4", "--mem-fraction-static", "0.8"], ["--mem-fraction-static", "sglang", "vllm"]),
        (["demo", "--gpu", "l4", "--sweep", "--explain"], ["--explain", "--sweep"]),
        (["demo", "--gpu", "l4", "--target-concurrency", "0"], ["--target-concurrency", "0"]),
    ],
)
def test_plan_command_reports_bad_input_in_one_line_and_exits_2(plan, arguments, words):
    done = plan(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in words)


def test_plan_help_lists_main_flags_and_exit_codes(plan):
    done = plan("--help")
    assert done.returncode == 0
    for flag in ("--device-memory", "--quantization", "--kv-cache-memory-bytes", "exit codes"):
        assert flag in done.stdout


def test_plan_command_with_json_imports_no_large_library(tmp_path):
    """A plan in JSON imports no torch, transformers, numpy or rich, and no slow standard-library module."""
    code = (
        "import sys; from tonnage.planner.command import run\n"
        "code = run(['demo', '--json', '--explain', '--device-memory', '16GiB'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'huggingface_hub', 'importlib.metadata',"
        "'urllib.request'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    environment = {**os.environ, "TONNAGE_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 << 20),
        ("2GB", 2 * 10**9),
        ("1.5GiB", 3 << 29),
        ("80 GiB", 80 << 30),
        ("123", 123),
        ("1kb", 1000),
        ("1TiB", 1 << 40),
    ],
)
def test_parse_size_reads_units(text, size):
    assert parse_size(text, "--x") == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "2G", "1e9", "0", "0.1", "9" * 40, "1,5GiB", "１GiB", "nan"]
)
def test_parse_size_rejects_invalid_text(text):
    with pytest.raises(DeploymentError) as caught:
        parse_size(text, "--x")
    assert caught.value.field == "--x"


def test_parse_count_reads_k_and_m_suffixes():
    assert [parse_count(t, "--x") for t in ("7", "8k", "8K", "1m")] == [7, 8000, 8192, 10**6]
    for text in ("", "-1", "1.5", "8kk", "x"):
        with pytest.raises(DeploymentError):
            parse_count(text, "--x")


def test_gib_formats_bytes_with_unit():
    assert gib(3 << 29) == "1.50 GiB"
    assert gib(512 << 20) == "512.0 MiB"
    assert gib(-(3 << 29)) == "-1.50 GiB"


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("tonnage.planner.command", ["demo", "--device-memory", "16GiB", "--explain"]),
        ("tonnage.planner.training.command", ["demo", "--device-memory", "8GiB"]),
    ],
    ids=["plan", "train"],
)
def test_terminal_without_utf_8_gets_bars_of_ascii_characters(monkeypatch, command, arguments, encoding):
    terminal = Terminal(encoding)
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "150")
    assert import_module(command).run(arguments) == 0
    shown = terminal.shown()
    assert ("█" in shown, "####" in shown) == ((True, False) if encoding == "utf-8" else (False, True))


@pytest.mark.parametrize("name", ["gpu", "quantization", "kv-cache-dtype"])
def test_help_text_names_the_flags_that_accept_comma_separated_lists(name, capsys):
    assert run([f"--help={name}"]) == 0
    assert "several, with commas" in " ".join(capsys.readouterr().out.split())
