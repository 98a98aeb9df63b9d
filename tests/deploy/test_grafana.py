"""The dashboard: generated as committed, every query true of a live server, none of them empty."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
GRAFANA = ROOT / "deploy" / "grafana"
# Labels that Prometheus itself puts on every sample.
TARGET_LABELS = {"instance", "job"}
SUFFIXES = re.compile(r"_(bucket|sum|count)$")


def load_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grafana_build", GRAFANA / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DASHBOARDS: dict[str, dict[str, Any]] = {
    name: json.loads(text) for name, text in load_build().rendered().items()
}


def expressions() -> list[tuple[str, str]]:
    """(panel title, PromQL with the dashboard's variables filled in) of every query."""
    found = []
    for built in DASHBOARDS.values():
        for panel in built["panels"]:
            for target in panel["targets"]:
                text = target["expr"].replace("$__rate_interval", "5s")
                found.append((panel["title"], re.sub(r"\$(model|instance)", ".*", text)))
    return found


def selectors(expression: str) -> list[Any]:
    """All vector selectors of a query."""
    found: list[Any] = []

    def walk(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        for name in ("expr", "lhs", "rhs", "vector_selector", "vs"):
            child = getattr(node, name, None)
            if child is not None and not isinstance(child, str):
                walk(child)
        for child in getattr(node, "args", None) or ():
            walk(child)

    walk(promql_parser.parse(expression))
    return found


def test_committed_dashboards_are_the_generated_ones() -> None:
    done = subprocess.run([sys.executable, GRAFANA / "build.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (GRAFANA / "dashboards").glob("*.json")} == set(DASHBOARDS)


def test_every_panel_explains_itself() -> None:
    (built,) = DASHBOARDS.values()
    assert [panel["title"] for panel in built["panels"]] == [
        "Plan against reality",
        "KV pool by state",
        "Admission decisions",
        "Latency",
    ]
    for panel in built["panels"]:
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"] in ("bytes", "reqps", "s")
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    assert {variable["name"] for variable in built["templating"]["list"]} == {"datasource", "model", "instance"}


def test_provisioning_points_at_what_is_there() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    volumes = dict(volume.split(":")[:2] for volume in compose["services"]["grafana"]["volumes"])
    assert all((ROOT / "deploy" / folder).is_dir() for folder in volumes)
    mounted = {inside: ROOT / "deploy" / outside for outside, inside in volumes.items()}
    provider = yaml.safe_load((GRAFANA / "provisioning/dashboards/tonnage.yaml").read_text())["providers"][0]
    assert mounted[provider["options"]["path"]] == ROOT / "deploy/./grafana/dashboards"
    home = Path(compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (mounted[str(home.parent)] / home.name).is_file()
    source = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"][
        0
    ]
    host, port = re.fullmatch(r"http://(\w+):(\d+)", source["url"]).groups()  # type: ignore[union-attr]
    assert host in compose["services"]
    assert any(str(mapping).endswith(f":{port}") for mapping in compose["services"][host]["ports"])
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    (target,) = scraped["scrape_configs"][0]["static_configs"][0]["targets"]
    service, service_port = target.split(":")
    assert any(str(mapping).endswith(f":{service_port}") for mapping in compose["services"][service]["ports"])


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A real server of the demo model that has admitted, refused and answered."""
    command = [sys.executable, "-m", "tonnage.server.cli", "serve", "demo", "--port", "0"]
    command += ["--kv-cache-memory-bytes", "64MiB", "--max-model-len", "1024"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = None
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready on "):
                url = line.split()[-1]
                break
        assert url is not None, "the server ended before it was ready"
        traffic(url)
        yield url
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == 0


def traffic(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        body = {"model": "demo", "prompt": "One two three", "max_tokens": 8, "temperature": 0}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert client.post("/v1/completions", json=body | {"max_tokens": 5000}).status_code == 400


@pytest.fixture(scope="module")
def series(server: str) -> dict[str, list[dict[str, str]]]:
    """Sample name -> the label sets it has on the live server."""
    text = httpx.get(f"{server}/metrics", trust_env=False).text
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


@pytest.mark.parametrize(("title", "expression"), expressions())
def test_every_name_in_a_query_exists(
    series: dict[str, list[dict[str, str]]], title: str, expression: str
) -> None:
    used = selectors(expression)
    assert used
    for selector in used:
        assert selector.name in series, f"{title}: no metric {selector.name}"
        labels = set().union(*series[selector.name]) | TARGET_LABELS
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels, f"{title}: {selector.name} has no label {matcher.name}"
            values = {sample.get(matcher.name) for sample in series[selector.name]}
            if matcher.value != ".*":  # a value that no sample has would hide or show everything
                assert matcher.value in values, (
                    f"{title}: no {selector.name} with {matcher.name}={matcher.value}"
                )
    for label in re.findall(r" by \(([^)]*)\)", expression):
        for name in label.split(","):
            known = {key for selector in used for sample in series[selector.name] for key in sample}
            assert name.strip() in known | TARGET_LABELS, f"{title}: grouped by unknown {name}"


def test_legends_and_variables_use_existing_labels(series: dict[str, list[dict[str, str]]]) -> None:
    for built in DASHBOARDS.values():
        for panel in built["panels"]:
            for target in panel["targets"]:
                for name in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                    for selector in selectors(re.sub(r"\$\w+", "5s", target["expr"])):
                        assert name in set().union(*series[selector.name]), (panel["title"], name)
        for variable in built["templating"]["list"]:
            if variable["type"] == "query":
                metric, label = re.fullmatch(
                    r"label_values\((\w+)(?:{.*})?, (\w+)\)", variable["query"]
                ).groups()  # type: ignore[union-attr]
                assert label in set().union(*series[metric]) | TARGET_LABELS


@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (apt-get install prometheus)"
)
def test_no_panel_is_empty_on_a_real_prometheus(server: str, tmp_path: Path, free_port: int) -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.removeprefix("http://")]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
             f"--web.listen-address=127.0.0.1:{free_port}"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{free_port}", trust_env=False) as client:
            empty = expressions()
            deadline = time.monotonic() + 60
            while empty:
                assert time.monotonic() < deadline, (empty, (tmp_path / "log").read_text()[-2000:])
                traffic(server)
                time.sleep(0.5)
                empty = [query for query in empty if not answered(client, query[1])]
    finally:
        process.terminate()
        process.wait(timeout=30)


def answered(client: httpx.Client, expression: str) -> bool:
    """Whether an instant query gives at least one finite number."""
    try:
        answer = client.get("/api/v1/query", params={"query": expression}).json()
    except httpx.TransportError:  # not up yet
        return False
    assert answer.get("status") == "success", answer
    values = [float(sample["value"][1]) for sample in answer["data"]["result"]]
    return any(0 <= value < float("inf") for value in values)


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
