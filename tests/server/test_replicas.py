"""``tonnage plan --replicas auto``: more load needs more replicas, and invalid flags are rejected by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TRACE = next((Path(__file__).resolve().parents[1] / "data" / "traces").glob("azure*.csv"))
SPEED = ("--memory-bandwidth", "20", "--flops", "1", "--kv-cache-memory-bytes", "512MiB")


def ask(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tonnage.server.cli", "plan", "demo", *flags]
    return subprocess.run(command, capture_output=True, text=True)


def test_higher_request_rate_needs_more_replicas_of_the_same_plan() -> None:
    answers = []
    for rate in ("0.2", "4"):
        done = ask(
            "--replicas", "auto", "--rate", rate, "--trace", str(TRACE), "--limit", "150", "--json", *SPEED
        )
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    few, many = answers
    assert few["plan_id"] == many["plan_id"]
    assert 1 <= few["replicas"] < many["replicas"]
    for answer in answers:
        waits = {int(number): wait for number, wait in answer["waits_p99"].items()}
        assert waits[answer["replicas"]] <= 1.0
        assert all(wait > 1.0 for number, wait in waits.items() if number == answer["replicas"] - 1)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--replicas", "3", "--rate", "1", "--trace", str(TRACE)), "--replicas"),
        (("--replicas", "auto", "--rate", "-1", "--trace", str(TRACE)), "--rate"),
        (("--replicas", "auto", "--rate", "1", "--trace", "no/such/file.csv"), "trace"),
        (("--replicas", "auto", "--trace", str(TRACE)), "--rate"),
        (("--replicas", "auto", "--rate", "1", "--trace", str(TRACE), "--max-loras", "2"), "--max-loras"),
        (("--replicas", "auto", "--rate", "1", "--trace", str(TRACE), "--max-num-seqs", "0"), "--max-num-seqs"),
        (("--replicas", "auto", "--rate", "1", "--trace", str(TRACE), "--limit", "1", *SPEED), "--trace"),
        (("--replicas", "auto", "--rate", "1", "--trace", str(TRACE)), "--memory-bandwidth"),
    ],
)
def test_invalid_replica_flags_are_rejected(flags: tuple[str, ...], named: str) -> None:
    done = ask(*flags)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr
