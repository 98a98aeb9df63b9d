"""What a new operator types: other tools' names, parts of model names, wrong units, on 80 columns."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path

import pytest

from tonnage.planner.command import run
from tonnage.planner.fitlog.command import run as fit_log
from tonnage.planner.screen import Screen
from tonnage.planner.training.command import run as train
from tonnage.server.cli import COMMANDS, main, usage

LOGS = Path(__file__).parents[1] / "data/startup_logs"


class Terminal(io.StringIO):
    """A text file that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def terminal():
    """Give stdout and stderr a terminal of 80 columns without colours, and yield both."""
    out, err = Terminal(), Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        patch.setenv("NO_COLOR", "1")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield out, err


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))


def said(capsys, call, *words):
    assert call(list(words)) == 2
    found = capsys.readouterr()
    assert found.out == ""
    return found.err


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--users", "--target-concurrency"), ("--tp", "--tensor-parallel-size"), ("--ctx", "--max-model-len"),
        ("--context-length", "--max-model-len"), ("--gpus", "--tensor-parallel-size"),
        ("--quant", "--quantization"), ("--vram", "--device-memory"), ("--seq_len", "--max-model-len"),
    ],
)  # fmt: skip
def test_option_names_of_other_tools_lead_to_ours(capsys, word, meant):
    assert f"did you mean {meant}?" in said(capsys, run, "demo", word, "8")


def test_lora_of_training_is_a_method(capsys):
    assert "did you mean --method?" in said(capsys, train, "demo", "--lora", "16")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("qwen3-32b", "did you mean Qwen/Qwen3-32B? Give"),
        ("Qwen3_32B", "did you mean Qwen/Qwen3-32B? Give"),
        ("Llama-3.1-8B-Instruct", "did you mean meta-llama/Meta-Llama-3.1-8B? Give"),
        ("gpt-oss", "did you mean openai/gpt-oss-120b or openai/gpt-oss-20b? Give"),
    ],
)
def test_name_of_a_model_without_organization_is_completed(capsys, name, found):
    assert found in said(capsys, run, name, "--gpu", "h100")


def test_path_that_is_missing_is_not_taken_for_a_name(capsys):
    assert "did you mean" not in said(capsys, run, "./Qwen3-32B")


def test_name_in_another_case_is_found_offline(capsys, offline):
    err = said(capsys, run, "qwen/qwen3-32b", "--gpu", "h100")
    assert "without the hub, these can be planned: Qwen/Qwen3-32B)" in err


@pytest.mark.parametrize("option", ["--device-memory", "--kv-cache-memory-bytes"])
def test_memory_of_a_few_bytes_is_a_missing_unit(capsys, option):
    assert f"{option}: '80' is 80 bytes (write 80GiB for gibibytes)" in said(capsys, run, "demo", option, "80")


def test_numbers_as_printed_are_corrected(capsys):
    assert "(write 32768)" in said(capsys, run, "demo", "--max-model-len", "32,768")
    assert "(90 % is 0.9)" in said(capsys, run, "demo", "--gpu", "h100", "--gpu-memory-utilization", "90")


def test_list_of_gpus_is_printed(capsys):
    err = said(capsys, run, "demo", "--gpu", "list")
    assert "h100-80g" in err
    assert "apple-m3-ultra-512g" in err


@pytest.mark.parametrize("word", ["devices", "gpus", "models", "estimate", "start", "health", "bench"])
def test_words_that_are_no_commands_lead_to_one(capsys, word):
    assert main([word]) == 2
    err = capsys.readouterr().err
    assert any(f"tonnage {command}" in err for command in COMMANDS)


def test_count_of_gpus_in_training_names_its_option(capsys):
    assert "'8xh100' names 8 GPUs; here --gpu names one" in said(capsys, train, "demo", "--gpu", "8xh100")


def test_log_of_another_model_names_both(capsys, offline, tmp_path):
    log = tmp_path / "vllm.log"
    shutil.copy(min(LOGS.glob("*8192-dtbf16-kvfp8.log")), log)
    assert fit_log([str(log), "--model", "Qwen/Qwen3-8B"]) == 0
    assert "meta-llama/Llama-3.1-8B-Instruct, planned as Qwen/Qwen3-8B" in capsys.readouterr().out
    err = said(capsys, fit_log, str(log))
    assert "--model names the log's model by another name or folder" in err
    assert "meta-llama/Meta-Llama-3.1-8B" in err


def test_target_without_lengths_says_how_to_give_them(capsys, offline):
    assert run(["Qwen/Qwen3-8B", "--target-concurrency", "20", "--gpu", "h100"]) == 0
    assert "--request 4000+500 plans for prompts of 4,000 tokens" in capsys.readouterr().out


def test_errors_are_wrapped_without_breaking_options():
    with terminal() as (_, err):
        assert run(["Qwen/Qwen3-8B", "--gpu", "h100", "-q", "awq4", "--max-model-len", "8192"]) == 2
        assert main(["plann"]) == 2
    lines = err.getvalue().splitlines()
    assert len(lines) > 3
    assert all(len(line) <= 80 for line in lines)
    assert not any(line.rstrip().endswith("-") for line in lines)


def test_paragraphs_keep_options_and_paths_whole():
    path = "/srv/models/" + "x" * 90
    with terminal() as (out, _):
        Screen(out).print(f"Would fit with {'word ' * 12}--max-model-len 33536 in {path}")
    lines = out.getvalue().splitlines()
    assert any("--max-model-len" in line for line in lines)
    assert f"  {path}" in lines
    assert lines[1].startswith("  ")


def test_usage_fits_80_columns():
    assert all(len(line) <= 80 for line in usage().splitlines())


def test_target_shows_on_a_terminal_that_it_works(offline):
    with terminal() as (out, err):
        assert run(["Qwen/Qwen3-8B", "--target-concurrency", "20", "--gpu", "h100"]) == 0
    assert err.getvalue().startswith("Planning ")
    assert err.getvalue().endswith("\x1b[K")
    wide = [line for line in out.getvalue().splitlines() if len(line) > 80]
    assert all(line.lstrip().startswith(("tonnage serve ", "vllm serve ")) for line in wide)  # to be copied
