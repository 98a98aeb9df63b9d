"""Compose variables or unit settings that contradict the plan stop the server's start with a reason.

Compose and systemd only insert text and compare nothing. The server plans with the values that they pass, and
exits with 2 before it loads anything. The unit does not restart after this status. deploy/check.py tests the
chart, which fails at render time.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from compose import filled

from tonnage.server.cli import main

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def compose(variables: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment of the Compose service, with variables filled in as Compose does."""
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["tonnage"]

    return [filled(word, variables) for word in service["command"]], {
        k: filled(v, variables) for k, v in service["environment"].items()
    }


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"MEMORY": "300MiB"}, ["300.0 MiB", "nothing is left for the KV cache"]),
        ({"POOL": "4GiB"}, ["more than 2.00 GiB", "the largest --kv-cache-memory-bytes that fits"]),
        ({"MEMORY": "100TiB"}, ["device_memory", "this machine, or its container, has"]),
        ({"CONTEXT": "1000000"}, ["--max-model-len", "at most 8192"]),
        ({"SEQUENCES": "many"}, ["max_num_seqs", "many"]),
        ({"UTILIZATION": "1.5"}, ["gpu_memory_utilization", "1.5"]),
        ({"BACKEND": "sglang"}, ["backend", "sglang"]),
    ],
)
def test_compose_variable_that_contradicts_the_plan_stops_the_start_with_the_reason(
    variables, words, monkeypatch, capsys
) -> None:
    command, environment = compose(variables)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(command) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0, error
    assert all(word.lower() in error.lower() for word in words), error


def test_compose_variables_are_passed_to_the_server() -> None:
    """The output of `tonnage plan --emit compose-env` reaches the server."""
    text = (DEPLOY / "compose.yaml").read_text()
    names = set(re.findall(r"\$\{(\w+):-", text))
    _, environment = compose(dict.fromkeys(names, "7"))
    assert {"TONNAGE_DEVICE_MEMORY", "TONNAGE_KV_CACHE_MEMORY_BYTES", "TONNAGE_MAX_MODEL_LEN"} <= {
        name for name, value in environment.items() if value == "7"
    }


def test_systemd_unit_does_not_restart_after_a_plan_that_does_not_fit(monkeypatch, capsys) -> None:
    unit = (DEPLOY / "systemd" / "tonnage.service").read_text()
    assert "RestartPreventExitStatus=2\n" in unit
    assert "ExecStart=/opt/tonnage/bin/tonnage serve\n" in unit
    for line in ("TONNAGE_MODEL=demo", "TONNAGE_DEVICE_MEMORY=300MiB", "TONNAGE_KV_CACHE_MEMORY_BYTES=512MiB"):
        monkeypatch.setenv(*line.split("="))
    assert main(["serve"]) == 2
    assert "nothing is left for the KV cache" in capsys.readouterr().err
