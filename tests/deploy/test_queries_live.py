"""Every query of every panel and rule runs on a real Prometheus that scrapes a real server under load."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from queries import (
    every_panel_answers,
    every_rule_is_evaluated,
    every_rule_sees_its_series,
    filled,
    panel_queries,
    recorded,
)
from serving import PATIENCE

# Labels that Prometheus itself adds to every sample.
TARGET_LABELS = {"instance", "job"}
# Series that Prometheus creates, not the server.
OWN = {"up": [{}], "ALERTS": [{"alertname": "TonnageErrors", "alertstate": "firing"}]}
Series = dict[str, list[dict[str, str]]]


@pytest.fixture(scope="module")
def series(server: str) -> Series:
    """Return the label sets of each sample name on the live server."""
    found: Series = {name: list(labels) for name, labels in OWN.items()}
    page = httpx.get(f"{server}/metrics", trust_env=False, timeout=PATIENCE).text
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def check_names(where: str, expression: str, series: Series, selectors: list[Any]) -> None:
    assert selectors, where
    for selector in selectors:
        assert selector.name in series, f"{where}: no metric {selector.name}"
        labels = set().union(*series[selector.name]) | TARGET_LABELS
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels, f"{where}: {selector.name} has no label {matcher.name}"
            if matcher.name in TARGET_LABELS or matcher.value == ".*":
                continue
            values = {sample.get(matcher.name, "") for sample in series[selector.name]}
            for value in matcher.value.split("|"):  # a value without samples would match nothing or everything
                found = any(re.fullmatch(value, known) for known in values)
                assert found, f"{where}: no {selector.name} with {matcher.name}={value}"
    known = {key for selector in selectors for sample in series[selector.name] for key in sample}
    for grouping in re.findall(r"\b(?:by|on|without|ignoring) ?\(([^)]*)\)", expression):
        for name in grouping.split(","):
            assert name.strip() in known | TARGET_LABELS, f"{where}: grouped by unknown {name}"


def test_grafana_panel_queries_use_existing_metrics_and_labels(
    dashboards: dict[str, dict[str, Any]],
    rules: list[dict[str, Any]],
    series: Series,
    selectors_of: Callable[[str], list[Any]],
) -> None:
    series = series | {name: [{}] for name in recorded(rules)}
    for where, _, expression in panel_queries(dashboards):
        check_names(where, expression, series, selectors_of(expression))
    for built in dashboards.values():
        for panel in built["panels"]:
            for target in panel["targets"]:
                for name in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                    known = set(TARGET_LABELS)
                    for selector in selectors_of(filled(target["expr"])):
                        known |= set().union(*series[selector.name])
                    assert name in known, (panel["title"], name)
        for variable in built["templating"]["list"]:
            if variable["type"] == "query":
                metric, label = re.fullmatch(
                    r"label_values\((\w+)(?:{.*})?, (\w+)\)", variable["query"]
                ).groups()  # type: ignore[union-attr]
                assert label in set().union(*series[metric]) | TARGET_LABELS


def test_prometheus_rules_use_existing_metrics_and_labels(
    rules: list[dict[str, Any]], series: Series, selectors_of: Callable[[str], list[Any]]
) -> None:
    # The next rule can read the series of a recording rule, which has the labels of its inputs.
    known: Series = dict(series)
    for rule in (rule for rule in rules if "record" in rule):
        made_from = selectors_of(rule["expr"])
        if not made_from:  # a threshold
            known[rule["record"]] = [{}]
            continue
        check_names(rule["record"], rule["expr"], known, made_from)
        known[rule["record"]] = [labels for selector in made_from for labels in known[selector.name]]
    for rule in (rule for rule in rules if "alert" in rule):
        check_names(rule["alert"], rule["expr"], known, selectors_of(rule["expr"]))


def test_no_dashboard_panel_is_empty_under_load(dashboards: dict[str, dict[str, Any]], prometheus: Any) -> None:
    every_panel_answers(prometheus, dashboards)


def test_every_prometheus_rule_finds_its_series_on_a_running_server(
    rules: list[dict[str, Any]], prometheus: Any
) -> None:
    every_rule_sees_its_series(prometheus, rules)


def test_prometheus_evaluates_all_shipped_rules_without_an_error(
    rules: list[dict[str, Any]], prometheus: Any
) -> None:
    every_rule_is_evaluated(prometheus, rules)
    assert all(prometheus.instant(name) for name in recorded(rules))
    firing = {alert["labels"]["alertname"] for alert in prometheus.get("alerts")["alerts"]}
    assert not firing & {"TonnageInvariantBroken", "TonnagePreemptionInGuaranteedMode", "TonnageScrapeMissing"}
