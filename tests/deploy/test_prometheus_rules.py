"""Checks of the Prometheus and Alertmanager configuration by promtool and amtool, with unit tests per rule."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from queries import filled

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
RULES = sorted(f"rules/{path.name}" for path in (PROMETHEUS / "rules").iterdir())


def promtool(*arguments: str, cwd: Path = PROMETHEUS) -> str:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (apt-get install prometheus): NOTHING was checked")
    done = subprocess.run(["promtool", *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_documentation_page_of_alerts_is_generated_from_the_rules() -> None:
    """`make alerts` writes the page."""
    module = runpy.run_path(str(PROMETHEUS / "alerts_page.py"))
    text = module["PAGE"].read_text()
    assert text == module["page"]()
    alerts = [
        rule["alert"]
        for group in yaml.safe_load((PROMETHEUS / "rules/alerts.yml").read_text())["groups"]
        for rule in group["rules"]
    ]
    assert len(alerts) == 15
    assert all(f"\n### {alert}\n" in text for alert in alerts)
    assert text.count("**What to do.**") == len(alerts)
    assert "{{" not in text


def test_prometheus_configuration_and_rules_are_valid() -> None:
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")
    output = promtool("check", "rules", "--lint=all", "--lint-fatal", *RULES)
    assert output.count("SUCCESS") == len(RULES) == 3


def test_prometheus_rules_pass_promtool_unit_tests() -> None:
    output = promtool("test", "rules", "alerts_test.yml", "recording_test.yml", cwd=PROMETHEUS / "tests")
    assert output.count("SUCCESS") == 2


def test_every_alert_has_runbook_and_tests_for_firing_and_silence(rules: list[dict[str, Any]]) -> None:
    tests = yaml.safe_load((PROMETHEUS / "tests" / "alerts_test.yml").read_text())["tests"]
    cases = {(t["alertname"], bool(t["exp_alerts"])) for test in tests for t in test["alert_rule_test"]}
    alerts = [rule for rule in rules if "alert" in rule]
    assert cases == {(rule["alert"], fires) for rule in alerts for fires in (True, False)}
    for rule in alerts:
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        assert len(rule["annotations"]["runbook"].split()) >= 15, rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_every_recording_rule_has_a_unit_test(rules: list[dict[str, Any]]) -> None:
    text = (PROMETHEUS / "tests" / "recording_test.yml").read_text()
    assert all(rule["record"] in text for rule in rules if "record" in rule)


def test_alertmanager_configuration_is_valid() -> None:
    if shutil.which("amtool") is None:
        pytest.skip("amtool is not installed (apt-get install prometheus-alertmanager): NOT checked")
    command = ["amtool", "check-config", DEPLOY / "alertmanager" / "alertmanager.yml"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# All first tokens come within half a second, and two of a hundred requests end with an error.
TRAFFIC = {
    "tonnage_time_to_first_token_seconds_bucket": {'le="0.5"': "0+5x60", 'le="+Inf"': "0+5x60"},
    "tonnage_requests_total": {'outcome="stop"': "0+98x60", 'outcome="error"': "0+2x60"},
}
SHARES = {
    "First token, share of limit": ("first_token_limit_seconds", 0.495),
    "Errors, share of limit": ("error_limit_ratio", 0.02),
}


@pytest.mark.parametrize("title", SHARES)
@pytest.mark.parametrize("limits", [(2,), (2, 1), ()], ids=["one limit", "two", "none"])
@pytest.mark.parametrize("servers", [1, 2, 0])
def test_dashboard_panel_of_limit_usage_uses_the_lowest_of_several_configured_limits(
    title: str, limits: tuple[int, ...], servers: int, dashboards: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """With several limits, the panel uses the strictest, as the alerts do.

    Without a limit the result is NaN; without traffic it is empty. The panel distinguishes the two.
    """
    (panel,) = (found for found in dashboards["overview.json"]["panels"] if found["title"] == title)
    (target,) = panel["targets"]
    name, figure = SHARES[title]
    series = [
        {"series": f'{metric}{{job="tonnage", model="m", instance="{server}", {labels}}}', "values": values}
        for metric, kinds in TRAFFIC.items()
        for labels, values in kinds.items()
        for server in range(servers)
    ]
    series += [
        {"series": f'tonnage:{name}{{region="{at}"}}', "values": f"{limit}x60"}
        for at, limit in enumerate(limits)
    ]
    asked = filled(target["expr"])
    number = [{"labels": "{}", "value": 1}] if limits and servers else []
    expected = {
        f"count({asked})": [{"labels": "{}", "value": 1}] if servers else [],
        f"count({asked} >= 0)": number,
        f"count(abs({asked} - {figure / min(limits, default=1)}) < 1e-6)": number,
    }
    cases = [{"expr": one, "eval_time": "60s", "exp_samples": samples} for one, samples in expected.items()]
    (tmp_path / "shares.yml").write_text(
        yaml.safe_dump({"tests": [{"interval": "1s", "input_series": series, "promql_expr_test": cases}]})
    )
    promtool("test", "rules", "shares.yml", cwd=tmp_path)
