"""The dashboards match their source, explain each panel, are provisioned, and pass Grafana's lint rules."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tonnage.server.observe.metrics.headroom import FOREVER_SECONDS

ROOT = Path(__file__).resolve().parents[2]
GRAFANA = ROOT / "deploy" / "grafana"
UNITS = {"bytes", "reqps", "s", "short", "percentunit"}

Dashboards = dict[str, dict[str, Any]]


def panels(dashboards: Dashboards) -> list[tuple[str, dict[str, Any]]]:
    """Return (dashboard title, panel) of every panel."""
    return [(built["title"], panel) for built in dashboards.values() for panel in built["panels"]]


def test_committed_dashboards_equal_generated_ones(dashboards: Dashboards) -> None:
    done = subprocess.run([sys.executable, GRAFANA / "build.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (GRAFANA / "dashboards").glob("*.json")} == set(dashboards)


def test_dashboard_folder_has_six_dashboards(dashboards: Dashboards) -> None:
    assert {built["title"].removeprefix("Tonnage / ") for built in dashboards.values()} == {
        "Overview",
        "Memory",
        "Admission and queue",
        "Latency and throughput",
        "Prefix cache and evictions",
        "Fleet",
    }
    assert len({built["uid"] for built in dashboards.values()}) == 6


def test_every_grafana_panel_describes_its_metrics(
    dashboards: Dashboards, selectors_of: Callable[[str], list[Any]]
) -> None:
    for title, panel in panels(dashboards):
        assert panel["title"], title
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            for selector in selectors_of(re.sub(r"\$__rate_interval", "5m", target["expr"])):
                metric = re.sub(r"_bucket$", "", selector.name)
                named = metric in panel["description"]
                assert named or metric == "up", f"{title}, {panel['title']}: {metric} is not in its description"


def test_grafana_queries_use_dashboard_variables_and_the_rate_interval(
    dashboards: Dashboards, selectors_of: Callable[[str], list[Any]]
) -> None:
    for built in dashboards.values():
        names = [variable["name"] for variable in built["templating"]["list"]]
        assert names == ["datasource", "job", "model", "instance"]
    for title, panel in panels(dashboards):
        for target in panel["targets"]:
            for window in re.findall(r"\[([^\]]+)\]", target["expr"]):
                assert window in ("$__rate_interval", "1h"), (title, panel["title"], window)
            assert "1h" not in target["expr"] or "one hour" in panel["title"]
            for selector in selectors_of(target["expr"].replace("$__rate_interval", "5m")):
                if ":" in selector.name:  # a threshold, which is the same for all servers
                    continue
                of_prometheus = selector.name in ("up", "ALERTS")
                wanted = {"job", "instance"} if of_prometheus else {"job", "model", "instance"}
                matched = {
                    matcher.name
                    for matcher in selector.matchers.matchers
                    if matcher.value == f"${matcher.name}"
                }
                assert matched == wanted, (title, panel["title"], str(selector))


def test_dashboard_shows_counters_as_rates_and_never_sums_ratios(dashboards: Dashboards) -> None:
    for title, panel in panels(dashboards):
        for target in panel["targets"]:
            text = target["expr"]
            assert not re.search(r"sum[^(]*\((?:avg|max|min)?\(?tonnage_\w+_ratio", text), (
                title,
                panel["title"],
            )
            for counter in re.finditer(r"(?:(\w+)\()?(tonnage_\w+_total)\b", text):
                raw = counter[1] not in ("rate", "increase")
                # Only counters whose sole good value is 0 may be shown as lifetime counts.
                assert not raw or counter[2] in (
                    "tonnage_preemptions_total",
                    "tonnage_invariant_violations_total",
                ), (title, panel["title"], counter[0])


# Metrics with a special value for "never" (tonnage.server.observe.metrics.headroom).
WITH_A_SENTINEL = ("tonnage_time_to_full_seconds", "tonnage_drain_seconds")


def test_dashboard_panel_shows_a_text_where_a_time_metric_has_its_value_for_never(
    dashboards: Dashboards,
) -> None:
    for title, panel in panels(dashboards):
        for target in panel["targets"]:
            if not any(name in target["expr"] for name in WITH_A_SENTINEL):
                continue
            if panel["type"] == "timeseries":
                limit = re.search(r"< (\d+)$", target["expr"])
                assert limit, (title, panel["title"])
                assert int(limit[1]) <= FOREVER_SECONDS
                assert "not within" in panel["fieldConfig"]["defaults"]["noValue"]
                continue
            (mapped,) = (
                mapping["options"]
                for mapping in panel["fieldConfig"]["defaults"]["mappings"]
                if mapping["type"] == "range"
            )
            assert (mapped["from"], mapped["to"]) == (FOREVER_SECONDS, None), (title, panel["title"])
            assert mapped["result"]["text"].startswith("not ")


def test_every_single_value_dashboard_panel_has_thresholds_and_a_text_for_the_value_zero(
    dashboards: Dashboards,
) -> None:
    """A figure that may be 0 has a text for 0; thresholds are ordered and each changes the colour."""
    figures = [(title, panel) for title, panel in panels(dashboards) if panel["type"] in ("stat", "bargauge")]
    assert len(figures) > 30
    for title, panel in figures:
        defaults = panel["fieldConfig"]["defaults"]
        steps = defaults["thresholds"]["steps"]
        borders = [step["value"] for step in steps[1:]]
        assert len({step["color"] for step in steps}) == len(steps) >= 2, (title, panel["title"])
        assert steps[0]["value"] is None
        assert borders == sorted(borders)
        exact = [mapping for mapping in defaults.get("mappings", []) if mapping["type"] == "value"]
        never_zero = panel["title"] in ("KV pool reserved", "Different plans")
        assert panel["type"] == "bargauge" or never_zero or "0" in exact[0]["options"], (title, panel["title"])


def test_dashboards_and_recording_rule_define_plan_drift_equally(
    dashboards: Dashboards, rules: list[dict[str, Any]]
) -> None:
    (rule,) = (rule["expr"] for rule in rules if rule.get("record") == "instance:tonnage_plan_drift:ratio")
    shown = [
        re.sub(r'job=~"\$job", model=~"\$model", instance=~"\$instance", ', "", target["expr"])
        for _, panel in panels(dashboards)
        if "drift" in panel["title"].lower()
        for target in panel["targets"]
    ]
    assert len(shown) == 3
    for expression in shown:
        match = re.fullmatch(r"max(?: by \(model, instance\) )?\((.*)\)", expression)
        assert match is not None
        assert match[1] == " ".join(rule.split())


def test_panel_links_lead_to_existing_dashboards(dashboards: Dashboards) -> None:
    uids = {built["uid"] for built in dashboards.values()}
    links = [link for _, panel in panels(dashboards) for link in panel.get("links", [])]
    assert len(links) > 8
    for link in links:
        uid, values = re.fullmatch(r"/d/([\w-]+)\?(.*)", link["url"]).groups()  # type: ignore[union-attr]
        assert uid in uids
        assert values == "${__url_time_range}&${__all_variables}"


def test_every_latency_metric_has_a_heatmap_panel(dashboards: Dashboards) -> None:
    buckets = {
        match[0]
        for _, panel in panels(dashboards)
        for target in panel["targets"]
        if (match := re.search(r"tonnage_\w+_seconds(?=_bucket)", target["expr"]))
    }
    heat = {
        re.search(r"tonnage_\w+_seconds(?=_bucket)", target["expr"])[0]  # type: ignore[index]
        for _, panel in panels(dashboards)
        if panel["type"] == "heatmap"
        for target in panel["targets"]
        if target["format"] == "heatmap"
    }
    assert heat == buckets


def test_paths_and_services_in_the_grafana_provisioning_exist() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    volumes = dict(volume.split(":")[:2] for volume in compose["services"]["grafana"]["volumes"])
    assert all((ROOT / "deploy" / folder).is_dir() for folder in volumes)
    mounted = {inside: ROOT / "deploy" / outside for outside, inside in volumes.items()}
    provider = yaml.safe_load((GRAFANA / "provisioning/dashboards/tonnage.yaml").read_text())["providers"][0]
    assert mounted[provider["options"]["path"]] == ROOT / "deploy/./grafana/dashboards"
    home = Path(compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (mounted[str(home.parent)] / home.name).is_file()
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())
    _points_at_a_service(compose, sources["datasources"][0]["url"].removeprefix("http://"))
    prometheus = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    (target,) = prometheus["scrape_configs"][0]["static_configs"][0]["targets"]
    _points_at_a_service(compose, target)
    (manager,) = prometheus["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"]
    _points_at_a_service(compose, manager)
    for mount in compose["services"]["prometheus"]["volumes"]:
        if mount.startswith("."):
            assert (ROOT / "deploy" / mount.split(":")[0]).exists(), mount


def _points_at_a_service(compose: dict[str, Any], target: str) -> None:
    service, port = target.split(":")
    assert any(str(mapping).endswith(f":{port}") for mapping in compose["services"][service]["ports"]), target


@pytest.mark.parametrize("broken", ["tonnage_no_such_metric", 'tonnage_pool_blocks{nolabel="x"}'])
def test_promql_parser_of_the_tests_finds_metric_names_and_labels(
    broken: str, selectors_of: Callable[[str], list[Any]]
) -> None:
    """The parser finds a wrong name or label, on which test_queries_live.py depends."""
    (selector,) = selectors_of(f"sum(rate({broken}[5m]))" if "{" not in broken else broken)
    names = {matcher.name for matcher in selector.matchers.matchers}
    assert selector.name == "tonnage_no_such_metric" or names == {"nolabel"}
