"""Queries of our dashboards and rules on a real Prometheus that scrapes a server under load."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
import yaml
from serving import PATIENCE, free_port

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
# The largest value that makes sense in a unit of our panels.
LARGEST = {"bytes": 1e15, "s": 86_400.0, "percentunit": 2.0, "reqps": 1e4, "short": 1e9}
LATENCIES = 1000.0  # a slow machine may need many times the limit of one


def dashboards() -> dict[str, dict[str, Any]]:
    """File name -> dashboard, as the code (deploy/grafana/build.py) makes them."""
    spec = importlib.util.spec_from_file_location("grafana_build", DEPLOY / "grafana" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: json.loads(text) for name, text in module.rendered().items()}


def rules() -> list[dict[str, Any]]:
    """All recording rules and alerts."""
    files = sorted((DEPLOY / "prometheus" / "rules").glob("*.yml"))
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


class Traffic:
    """Streams, whole answers, repeated prefixes, refusals and waiting, until it is stopped."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(14)
        self.answers: list[int] = []

    def __enter__(self) -> Traffic:
        for number in range(12):
            self._pool.submit(self._completions, number)
        self._pool.submit(self._refused)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()

    def wait_for_answers(self, count: int) -> None:
        """Wait until the given number of responses is complete."""
        deadline = time.monotonic() + PATIENCE
        while self.answers.count(200) < count:
            assert time.monotonic() < deadline, self.answers
            time.sleep(0.2)

    def _completions(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE, trust_env=False) as client:
            for turn in itertools.count():
                if self._stop.is_set():
                    return
                # the same beginning in every turn: hits; a different end: new blocks, and so evictions
                prompt = f"Conversation {number}. " * 12 + f"Turn {turn}. " * 20
                body = {"model": "demo", "prompt": prompt, "max_tokens": 24, "temperature": 0}
                self.answers.append(client.post("/v1/completions", json=body).status_code)

    def _refused(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE, trust_env=False) as client:
            while not self._stop.wait(0.2):
                body = {"model": "demo", "prompt": "too long", "max_tokens": 5000}
                self.answers.append(client.post("/v1/completions", json=body).status_code)


class Prometheus:
    """The HTTP API of a running Prometheus."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE)

    def get(self, path: str, **parameters: str) -> dict[str, Any]:
        answer = self._client.get(f"/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", answer
        data: dict[str, Any] = answer["data"]
        return data

    def ready(self) -> bool:
        """Return whether Prometheus is ready; it responds with 503 until its storage is open."""
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def instant(self, expression: str) -> list[float]:
        """Values of an instant query; NaN and infinities included."""
        data = self.get("query", query=expression)
        if data["resultType"] == "scalar":
            return [float(data["result"][1])]
        return [float(sample["value"][1]) for sample in data["result"]]


@contextmanager
def scraping(server: str, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with our configuration and rules, every interval a second, scraping ``server``."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (apt-get install prometheus): NO query was run")
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.removeprefix("http://")]
    del config["alerting"]
    shutil.copytree(DEPLOY / "prometheus" / "rules", folder / "rules")
    for file in (folder / "rules").iterdir():
        file.write_text(file.read_text().replace("interval: 15s", "interval: 1s"))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log, stderr=log,
        )  # fmt: skip
    client = Prometheus(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
            if client.ready() and client.instant("count_over_time(tonnage_engine_ready[1m]) > 8"):
                break
            time.sleep(0.2)
        yield client
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE)


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


def filled(expression: str) -> str:
    """With the dashboard's variables set to All, and the rate interval of a scrape each second."""
    return re.sub(r"\$(job|model|instance)", ".*", expression.replace("$__rate_interval", "15s"))


def unfiltered(expression: str) -> str:
    """Without the comparison that leaves out what a panel has no line for (not within the hour)."""
    node = promql_parser.parse(expression)
    compared = isinstance(node, promql_parser.BinaryExpr) and str(node.op) in {"<", "<=", ">", ">="}
    return str(node.lhs) if compared and isinstance(node.rhs, promql_parser.NumberLiteral) else expression


def recorded(rules: list[dict[str, Any]]) -> set[str]:
    """Names of what the rules record."""
    return {rule["record"] for rule in rules if "record" in rule}


def panel_queries(dashboards: dict[str, dict[str, Any]]) -> list[tuple[str, str, str]]:
    """(where, unit, expression) of every target."""
    return [
        (
            f"{built['title']}: {panel['title']}",
            panel["fieldConfig"]["defaults"]["unit"],
            filled(target["expr"]),
        )
        for built in dashboards.values()
        for panel in built["panels"]
        for target in panel["targets"]
    ]


def operands(expression: str) -> list[str]:
    """Return the operands of comparisons and set operators: the values of an alert, firing or not."""
    node = promql_parser.parse(expression)
    while isinstance(node, promql_parser.ParenExpr):
        node = node.expr
    if isinstance(node, promql_parser.NumberLiteral):
        return []
    if isinstance(node, promql_parser.BinaryExpr) and str(node.op) in {
        "and", "or", "unless", "<", "<=", ">", ">=", "==", "!=",
    }:  # fmt: skip
        return operands(str(node.lhs)) + operands(str(node.rhs))
    if isinstance(node, promql_parser.Call) and node.func.name == "absent":
        return []
    return [str(node)]


def wrong(values: list[float], unit: str, expression: str) -> str:
    """Why these values are no answer; empty: they are one."""
    largest = LATENCIES if unit == "percentunit" and "_limit_seconds" in expression else LARGEST[unit]
    if not values:
        return "empty"
    # A server with no traffic yet has a quantile of NaN; every series has some here.
    if not all(map(math.isfinite, values)):
        return f"not finite: {values}"
    if not all(0 <= value <= largest for value in values):
        return f"out of the range of {unit}: {values}"
    return ""


def every_panel_answers(
    prometheus: Prometheus, dashboards: dict[str, dict[str, Any]], without: str | None = None
) -> None:
    """Each query of each panel has an answer that makes sense, sooner or later.

    ``without`` is a part of the names of metrics that the server lacks; queries of them are left out.
    """
    left = [item for item in panel_queries(dashboards) if without is None or without not in item[2]]
    deadline = time.monotonic() + PATIENCE
    while left:
        bad = [(item, wrong(prometheus.instant(unfiltered(item[2])), *item[1:])) for item in left]
        left = [item for item, reason in bad if reason]
        if left:
            assert time.monotonic() < deadline, [(item[0], item[2], reason) for item, reason in bad if reason]
            time.sleep(0.5)


def every_rule_sees_its_series(
    prometheus: Prometheus, rules: list[dict[str, Any]], without: str | None = None
) -> None:
    rules = [rule for rule in rules if without is None or without not in rule["expr"]]
    left = [(rule.get("record") or rule["alert"], part) for rule in rules for part in operands(rule["expr"])]
    assert {name for name, _ in left} == {rule.get("record") or rule["alert"] for rule in rules}
    deadline = time.monotonic() + PATIENCE
    while left:
        left = [
            (name, part)
            for name, part in left
            if not (values := prometheus.instant(part)) or not all(map(math.isfinite, values))
        ]
        if left:
            assert time.monotonic() < deadline, left
            time.sleep(0.5)


def every_rule_is_evaluated(prometheus: Prometheus, rules: list[dict[str, Any]]) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        loaded = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
        if all(rule["health"] != "unknown" for rule in loaded):
            break
        assert time.monotonic() < deadline, loaded
        time.sleep(0.5)
    assert {rule["name"] for rule in loaded} == {rule.get("record") or rule["alert"] for rule in rules}
    assert {rule["health"] for rule in loaded} == {"ok"}, loaded
