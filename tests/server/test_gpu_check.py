"""benchmarks/gpu_check.py: the whole check on the CPU, and a step that fails, hangs or kills its process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_check import hashes, processes
from gpu_check.hardware import entry_of
from gpu_check.processes import Check, Outcome
from gpu_check.rows import Row, exact, within
from serving import PATIENCE

from tonnage.planner.devices.catalogue import catalogue, find_gpu
from tonnage.server.engines.hf.model import profile

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


# Hides the installed project from importlib.metadata, as in an environment that has only the packages of
# NEEDED.
NOT_INSTALLED = """
import importlib.metadata
found = importlib.metadata.version
def version(name):
    if name == "tonnage":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.version = version
"""


def check(*flags: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run the program with the given flags, and with `path` as PYTHONPATH."""
    command = [sys.executable, str(SCRIPT), *flags]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def test_gpu_check_of_a_source_tree_runs_every_step_on_the_cpu_and_agrees_with_the_plan(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    (tmp_path / "sitecustomize.py").write_text(NOT_INSTALLED)
    done = check("--device", "cpu", "--json", "--html", str(page), path=str(tmp_path))
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["bad"]) == (0, []), done.stderr[-4000:]
    steps: dict[str, Any] = answer["steps"]
    assert list(steps) == [
        "device", "first-step", "attention", "memory", "host", "engine", "out-of-memory", "formats",
    ]  # fmt: skip
    assert all(step["rows"] for step in steps.values())
    kernels = [row for row in steps["attention"]["rows"] if row["verdict"] == "ok"]
    assert {row["name"].partition(",")[0] for row in kernels} == {"gather", "in place"}
    planned = [row for row in steps["memory"]["rows"] if row["verdict"] == "ok"]
    assert planned
    assert all(row["value"] == row["planned"] for row in planned)
    assert "--cost here=" in str(steps["engine"]["rows"])
    assert "refused" in [row["value"] for row in steps["out-of-memory"]["rows"]]
    assert "<h2>attention: ok" in page.read_text()


def test_gpu_check_prints_its_results_even_if_its_html_page_cannot_be_written(tmp_path: Path) -> None:
    done = check("--device", "cpu", "--steps", "device", "--html", str(tmp_path / "absent" / "page.html"))
    assert done.returncode == 2
    assert json.loads(done.stdout.splitlines()[-1])["steps"]["device"]["rows"]
    assert "absent" in done.stderr


def test_gpu_check_without_a_gpu_names_the_flag_for_a_run_on_the_cpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = check("--device", "cuda")
    assert done.returncode == 2
    assert "no CUDA device here; --device cpu" in done.stderr


CHILD = """
import json, os, signal, sys, time
def send(**message):
    print(json.dumps(message), flush=True)
if sys.argv[1] == "slow":
    time.sleep(4)
for name in sys.argv[1:]:
    send(begin=name)
    send(row={"name": name, "value": 1})
    if name == "raises":
        send(failed="RuntimeError: broken")
        sys.exit()
    if name == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hangs":
        time.sleep(1000)
    print("a line of a library")
    send(end=name)
"""


@pytest.mark.parametrize("fresh", [False, True])
def test_gpu_check_continues_with_the_next_step_after_a_failed_one(
    monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    monkeypatch.setattr(processes, "OTHER_LIMIT", 3)
    monkeypatch.setattr(processes, "FRESH", ("dies", "last"))
    told: list[tuple[str, Row | Outcome]] = []
    names = ["first", "raises", "dies", "hangs", "last"]
    run = Check(
        [sys.executable, "-c", CHILD], names, time.monotonic() + PATIENCE,
        fresh=fresh, tell=lambda name, found: told.append((name, found)),
    )  # fmt: skip
    outcomes = run.run()
    assert {name: found.status for name, found in outcomes.items()} == {
        "first": "ok", "raises": "failed", "dies": "failed", "hangs": "failed", "last": "ok",
    }  # fmt: skip
    assert outcomes["raises"].why == "RuntimeError: broken"
    assert "status -11" in outcomes["dies"].why
    assert "no end after 3 s" in outcomes["hangs"].why
    # the row of each step was reported before the step ended
    assert [name for name, found in told if isinstance(found, Row)] == names


def test_start_of_the_gpu_check_process_does_not_count_towards_a_steps_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "OTHER_LIMIT", 3)
    command = [sys.executable, "-c", CHILD]
    run = Check(command, ["slow"], time.monotonic() + PATIENCE, fresh=False, tell=lambda *_: None)
    assert run.run()["slow"].status == "ok"
    monkeypatch.setattr(processes, "START_LIMIT", 1)
    run = Check(command, ["slow"], time.monotonic() + PATIENCE, fresh=False, tell=lambda *_: None)
    assert "no end after 1 s" in run.run()["slow"].why


def test_gpu_check_steps_beyond_the_time_limit_are_skipped() -> None:
    run = Check([sys.executable, "-c", CHILD], ["first"], time.monotonic(), fresh=False, tell=lambda *_: None)
    assert run.run()["first"].status == "skipped"


def test_gpu_check_gives_a_measurement_outside_the_planned_bounds_the_verdict_off() -> None:
    assert [exact("pool", 5, 5).verdict, exact("pool", 6, 5).verdict] == ["ok", "off"]
    assert [within("activations", size, 5, (4, 8)).verdict for size in (3, 4, 8, 9)] == [
        "off",
        "ok",
        "ok",
        "off",
    ]
    assert "4 to 8" in within("activations", 9, 5, (4, 8)).text()


@pytest.mark.parametrize(
    ("name", "gib", "entry"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "h100-80g"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80g"),
        ("NVIDIA L40S", 44.4, "l40s-48g"),
        ("NVIDIA L4", 22.0, "l4-24g"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090-24g"),
    ],
)
def test_gpu_name_from_the_driver_finds_the_catalogue_entry(name: str, gib: float, entry: str) -> None:
    assert find_gpu(entry) in catalogue()
    assert entry_of(name, int(gib * 2**30)) == find_gpu(entry)


def test_unknown_gpu_name_from_the_driver_finds_no_catalogue_entry() -> None:
    assert entry_of("NVIDIA Quadro of 2031", 2**34) is None


def test_replacement_for_the_xxhash_package_depends_on_data_and_seed() -> None:
    found = {hashes.xxh3_64_intdigest(data, seed) for data in (b"", b"a") for seed in (0, 1, 2**64 - 1)}
    assert len(found) == 6
    assert all(0 <= value < 2**64 for value in found)
    digest = hashes.xxh3_64(b"a")
    digest.update(b"b")
    assert digest.hexdigest() == hashes.xxh3_64(b"ab").hexdigest()


@dataclass
class RecordedMemory:
    """A device's memory that records the order of calls."""

    calls: list[str] = field(default_factory=list)

    def wait(self) -> None:
        """Record that the device was waited for."""
        self.calls.append("wait")

    def reset_peak(self) -> None:
        """Record the start of a measurement."""
        self.calls.append("reset")

    def peak(self) -> int:
        """Record the end of a measurement; return a peak of 1,000 bytes."""
        self.calls.append("peak")
        return 1000


def test_memory_profile_on_a_gpu_synchronizes_before_and_after_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = RecordedMemory()

    class Runner:
        device, weights_bytes = torch.device("cuda"), 600
        pool = type("Pool", (), {"nbytes": 300})

    monkeypatch.setattr(profile, "memory_of", lambda device: memory)
    monkeypatch.setattr(profile, "_step", lambda runner: memory.calls.append("step"))
    assert profile.profile(Runner()) == 100  # type: ignore[arg-type]
    assert memory.calls == ["wait", "reset", "step", "wait", "peak"]
