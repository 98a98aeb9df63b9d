"""Fixtures: a real server under load, a real Prometheus that scrapes it, and a PromQL parser."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import queries
from queries import Prometheus, Traffic, scraping, selectors
from serving import PATIENCE


@pytest.fixture(scope="session")
def dashboards() -> dict[str, dict[str, Any]]:
    return queries.dashboards()


@pytest.fixture(scope="session")
def rules() -> list[dict[str, Any]]:
    return queries.rules()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a real server of the demo model on the hf engine, kept busy throughout.

    The scope is one module, because the server takes the cores from other tests.
    """
    command = [sys.executable, "-m", "tonnage.server.cli", "serve", "demo", "--port", "0"]
    command += ["--kv-cache-memory-bytes", "48MiB", "--max-model-len", "1024", "--max-num-seqs", "6"]
    command += ["--max-num-batched-tokens", "256", "--kv-offloading-size", "0.05"]
    command += ["--kv-offloading-disk", f"{tmp_path_factory.mktemp('kv')},64MiB"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = next((line.split()[-1] for line in process.stdout if line.startswith("ready on ")), None)
        assert url is not None, "the server ended before it was ready"
        with Traffic(url) as traffic:
            traffic.wait_for_answers(4)
            yield url
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert set(traffic.answers) <= {200, 400}


@pytest.fixture(scope="module")
def prometheus(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with scraping(server, tmp_path_factory.mktemp("prometheus")) as client:
        yield client


@pytest.fixture(scope="session")
def selectors_of() -> Any:
    return selectors
