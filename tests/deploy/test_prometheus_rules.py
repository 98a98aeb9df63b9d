"""promtool and amtool on the configuration, and unit tests for every rule and alert."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
RULES = sorted(f"rules/{path.name}" for path in (PROMETHEUS / "rules").iterdir())


def promtool(*arguments: str, cwd: Path = PROMETHEUS) -> str:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (apt-get install prometheus): NOTHING was checked")
    done = subprocess.run(["promtool", *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_configuration_and_rules() -> None:
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")
    output = promtool("check", "rules", "--lint=all", "--lint-fatal", *RULES)
    assert output.count("SUCCESS") == len(RULES) == 3


def test_rules_do_what_they_say() -> None:
    output = promtool("test", "rules", "alerts_test.yml", "recording_test.yml", cwd=PROMETHEUS / "tests")
    assert output.count("SUCCESS") == 2


def test_every_alert_is_tested_firing_and_silent_and_has_a_runbook(rules: list[dict[str, Any]]) -> None:
    tests = yaml.safe_load((PROMETHEUS / "tests" / "alerts_test.yml").read_text())["tests"]
    cases = {(t["alertname"], bool(t["exp_alerts"])) for test in tests for t in test["alert_rule_test"]}
    alerts = [rule for rule in rules if "alert" in rule]
    assert cases == {(rule["alert"], fires) for rule in alerts for fires in (True, False)}
    for rule in alerts:
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        assert len(rule["annotations"]["runbook"].split()) >= 15, rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_every_recording_rule_is_tested(rules: list[dict[str, Any]]) -> None:
    text = (PROMETHEUS / "tests" / "recording_test.yml").read_text()
    assert all(rule["record"] in text for rule in rules if "record" in rule)


def test_alertmanager() -> None:
    if shutil.which("amtool") is None:
        pytest.skip("amtool is not installed (apt-get install prometheus-alertmanager): NOT checked")
    command = ["amtool", "check-config", DEPLOY / "alertmanager" / "alertmanager.yml"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
