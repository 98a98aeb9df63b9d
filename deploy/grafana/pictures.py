"""Draw the dashboards with data for docs/dashboards: ``make pictures``.

Grafana is not needed. Every query of a dashboard runs on a real Prometheus that has scraped a real server
under load. Headless Chromium draws the results with uPlot, like Grafana's time series. It needs prometheus,
chromium and the npm package uplot (``--uplot`` is its dist folder).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).resolve().parents[1]
DASHBOARDS = DEPLOY / "grafana" / "dashboards"
PAGE = (Path(__file__).resolve().parent / "pictures.html").read_text()
ROW_PIXELS = 38  # height of one row of Grafana's grid


def get(url: str, **parameters: str | float) -> Any:
    """Return the JSON answer of a GET request."""
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(parameters)}", timeout=60) as answer:
        return json.load(answer)


@contextmanager
def running(*command: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Run a command and yield its process; end it afterwards."""
    process = subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


@contextmanager
def server() -> Iterator[str]:
    """Start a server of the demo model, with a small pool for the load, and yield its URL."""
    with running(
        sys.executable, "-m", "tonnage.server.cli", "serve", "demo", "--port", "0", "--max-num-seqs", "8",
        "--kv-cache-memory-bytes", "64MiB", "--max-model-len", "1024",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        yield next(line.split()[-1] for line in process.stdout if line.startswith("ready on "))


def load(url: str, stop: threading.Event, number: int) -> None:
    """Run one conversation after another, with pauses so that the lines vary."""
    for turn in itertools.count():
        if stop.wait(0 if (turn // 4 + number) % 3 else 4):
            return
        prompt = f"Conversation {number}. " * 15 + f"Turn {turn}. " * 20
        body = {"model": "demo", "prompt": prompt, "max_tokens": 16 + 16 * (number % 4), "stream": True}
        if number == 0 and turn % 3 == 0:
            body["max_tokens"] = 5000  # never fits
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                answer.read()
        except urllib.error.HTTPError:
            continue


@contextmanager
def prometheus(target: str) -> Iterator[str]:
    """Start a Prometheus that scrapes ``target`` every second and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "prometheus.yml"
        text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
        text = text.replace("scrape_interval: 5s", "scrape_interval: 1s").replace(
            "rules/", f"{DEPLOY}/prometheus/rules/"
        )
        config.write_text(text.replace("tonnage:8000", target.removeprefix("http://")))
        with running(
            "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ):  # fmt: skip
            yield f"http://127.0.0.1:{port}/api/v1"


def measure(seconds: int) -> dict[str, list[dict[str, Any]]]:
    """Return the panels with their data by dashboard, after ``seconds`` of load."""
    with server() as url, prometheus(url) as api:
        stop = threading.Event()
        threads = [threading.Thread(target=load, args=(url, stop, number)) for number in range(10)]
        for thread in threads:
            thread.start()
        start = time.time()
        for done in range(seconds):
            time.sleep(1)
            if done % 15 == 0:
                print(f"load: {done} of {seconds} s", file=sys.stderr, flush=True)
        try:
            return {path.stem: panels(path, api, start + 5) for path in sorted(DASHBOARDS.glob("*.json"))}
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def panels(path: Path, api: str, start: float) -> list[dict[str, Any]]:
    """Return the panels of a dashboard with the data of their queries."""
    found = []
    for panel in json.loads(path.read_text())["panels"]:
        defaults = panel["fieldConfig"]["defaults"]
        series = []
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "10s")
            expression = re.sub(r"\$(job|model|instance)", ".*", expression)
            answer = get(f"{api}/query_range", query=expression, start=start, end=time.time(), step=1)
            for one in answer["data"]["result"]:
                name = re.sub(
                    r"{{(\w+)}}", lambda m, of=one: of["metric"].get(m[1], ""), target["legendFormat"]
                )
                # A quantile without observations is NaN and leaves a gap.
                values = [[float(t), float(v)] for t, v in one["values"] if math.isfinite(float(v))]
                if values:
                    series.append({"name": name, "values": values})
        found.append(
            {
                "title": panel["title"],
                "type": panel["type"],
                "unit": defaults["unit"],
                "decimals": defaults.get("decimals"),
                "stacked": defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal",
                "grid": panel["gridPos"],
                "steps": defaults.get("thresholds", {}).get("steps", []),
                "mappings": defaults.get("mappings", []),
                "nothing": defaults.get("noValue", "no data"),
                "series": series,
            }
        )
    return found


def draw(name: str, found: list[dict[str, Any]], uplot: Path, out: Path) -> None:
    """Draw one dashboard as a PNG file."""
    title = json.loads((DASHBOARDS / f"{name}.json").read_text())["title"]
    height = 60 + ROW_PIXELS * max(panel["grid"]["y"] + panel["grid"]["h"] for panel in found)
    page = (
        PAGE.replace("/*UPLOT_CSS*/", (uplot / "uPlot.min.css").read_text())
        .replace("/*UPLOT_JS*/", (uplot / "uPlot.iife.min.js").read_text())
        .replace("__TITLE__", title)
        .replace("__ROW__", str(ROW_PIXELS))
        .replace("__DATA__", json.dumps(found))
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(page)
        subprocess.run(
            ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--user-data-dir={folder}/profile", f"--window-size=1440,{height}", "--virtual-time-budget=4000",
             f"--screenshot={out / name}.png", file.as_uri()],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip


def main() -> int:
    """Run the load and draw all dashboards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uplot", type=Path, required=True, help="dist folder of the npm package uplot")
    parser.add_argument("--out", type=Path, default=DEPLOY.parent / "docs" / "dashboards")
    parser.add_argument("--seconds", type=int, default=120, help="seconds of load before the pictures")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, found in measure(arguments.seconds).items():
        draw(name, found, arguments.uplot, arguments.out)
        empty = [panel["title"] for panel in found if not panel["series"]]
        print(f"{name}: {len(found)} panels" + (f", EMPTY: {empty}" if empty else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
