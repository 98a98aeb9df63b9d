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
def test_option_name_of_another_tool_gets_a_suggestion(capsys, word, meant):
    assert f"did you mean {meant}?" in said(capsys, run, "demo", word, "8")


def test_train_option_lora_gets_a_hint_to_use_the_option_method(capsys):
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
def test_model_name_without_organization_gets_a_suggestion(capsys, name, found):
    assert found in said(capsys, run, name, "--gpu", "h100")


def test_missing_path_gets_no_suggested_model_name(capsys):
    assert "did you mean" not in said(capsys, run, "./Qwen3-32B")


def test_model_name_in_another_case_is_found_offline(capsys, offline):
    err = said(capsys, run, "qwen/qwen3-32b", "--gpu", "h100")
    assert "without the hub, these can be planned: Qwen/Qwen3-32B)" in err


@pytest.mark.parametrize("option", ["--device-memory", "--kv-cache-memory-bytes"])
def test_memory_size_without_a_unit_gets_a_hint_to_add_one(capsys, option):
    assert f"{option}: '80' is 80 bytes (write 80GiB for gibibytes)" in said(capsys, run, "demo", option, "80")


def test_number_with_commas_or_a_percent_sign_gets_a_hint_how_to_write_it(capsys):
    assert "(write 32768)" in said(capsys, run, "demo", "--max-model-len", "32,768")
    assert "(90 % is 0.9)" in said(capsys, run, "demo", "--gpu", "h100", "--gpu-memory-utilization", "90")


def test_gpu_list_prints_the_names_of_all_gpus(capsys):
    err = said(capsys, run, "demo", "--gpu", "list")
    assert "h100-80g" in err
    assert "apple-m3-ultra-512g" in err


@pytest.mark.parametrize("word", ["devices", "gpus", "models", "estimate", "start", "health", "bench"])
def test_common_word_that_is_no_command_gets_a_suggested_command(capsys, word):
    assert main([word]) == 2
    err = capsys.readouterr().err
    assert any(f"tonnage {command}" in err for command in COMMANDS)


def test_gpu_count_in_the_gpu_flag_of_train_gets_a_hint_for_the_right_option(capsys):
    assert "'8xh100' names 8 GPUs; here --gpu names one" in said(capsys, train, "demo", "--gpu", "8xh100")


def test_fit_log_of_another_model_names_the_logged_and_the_planned_model(capsys, offline, tmp_path):
    log = tmp_path / "vllm.log"
    shutil.copy(min(LOGS.glob("*8192-dtbf16-kvfp8.log")), log)
    assert fit_log([str(log), "--model", "Qwen/Qwen3-8B"]) == 0
    assert "meta-llama/Llama-3.1-8B-Instruct, planned as Qwen/Qwen3-8B" in capsys.readouterr().out
    err = said(capsys, fit_log, str(log))
    assert "--model names the log's model by another name or folder" in err
    assert "meta-llama/Meta-Llama-3.1-8B" in err


def test_concurrency_target_without_request_lengths_says_how_to_give_them(capsys, offline):
    assert run(["Qwen/Qwen3-8B", "--target-concurrency", "20", "--gpu", "h100"]) == 0
    assert "--request 4000+500 plans for prompts of 4,000 tokens" in capsys.readouterr().out


def test_wrapped_error_text_never_breaks_inside_an_option():
    with terminal() as (_, err):
        assert run(["Qwen/Qwen3-8B", "--gpu", "h100", "-q", "awq4", "--max-model-len", "8192"]) == 2
        assert main(["plann"]) == 2
    lines = err.getvalue().splitlines()
    assert len(lines) > 3
    assert all(len(line) <= 80 for line in lines)
    assert not any(line.rstrip().endswith("-") for line in lines)


def test_wrapped_paragraph_never_breaks_inside_an_option_or_path():
    path = "/srv/models/" + "x" * 90
    with terminal() as (out, _):
        Screen(out).print(f"Would fit with {'word ' * 12}--max-model-len 33536 in {path}")
    lines = out.getvalue().splitlines()
    assert any("--max-model-len" in line for line in lines)
    assert f"  {path}" in lines
    assert lines[1].startswith("  ")


def test_usage_text_fits_80_columns():
    assert all(len(line) <= 80 for line in usage().splitlines())


def test_search_for_a_concurrency_target_shows_progress_on_a_terminal(offline):
    with terminal() as (out, err):
        assert run(["Qwen/Qwen3-8B", "--target-concurrency", "20", "--gpu", "h100"]) == 0
    assert err.getvalue().startswith("Planning ")
    assert err.getvalue().endswith("\x1b[K")
    wide = [line for line in out.getvalue().splitlines() if len(line) > 80]
    assert all(line.lstrip().startswith(("tonnage serve ", "vllm serve ")) for line in wide)  # to be copied
