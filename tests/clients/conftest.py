"""Fixtures for client libraries in their own environment (``make test-clients``), and for their servers.

pytest runs in the environment of the clients. The servers run with the Python that TONNAGE_PYTHON names. The
tests of each backend are a group of xdist: with two workers, both backends are tested at the same time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import PATIENCE, serving

HERE = Path(__file__).parent
HELPERS = HERE.parent / "helpers"
FLAGS = [
    *("--served-model-name", "demo", "--chat-template", "hermes", "--reasoning-parser", "granite"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--max-model-len", "4096", "--max-num-seqs", "16", "--kv-cache-memory-bytes", "512MiB"),
]

# Everything is on this machine, and no client sends telemetry or asks for prices of models.
os.environ |= {
    "NO_PROXY": "*", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none",
}  # fmt: skip


@pytest.fixture(scope="session")
def python() -> str:
    """Return the Python of the server."""
    return os.environ["TONNAGE_PYTHON"]


@pytest.fixture(scope="session")
def model(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the demo model with scaled logits, because some clients send no temperature."""
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([python, str(HELPERS / "sharpened.py"), str(folder)], check=True, timeout=PATIENCE)
    return folder


@pytest.fixture(scope="session", params=["hf", "vllm"])
def url(request: pytest.FixtureRequest, model: Path) -> Iterator[str]:
    """Start ``tonnage serve`` on each backend; yield its URL."""
    with serving(str(model), "--backend", request.param, *FLAGS, killed=request.param == "vllm") as address:
        yield address


@pytest.fixture(scope="session")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as client:
        yield client


@pytest.fixture(scope="session")
def npm() -> Path:
    """Return the folder of the installed npm packages (tests/clients/package.json)."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    packages = Path(os.environ["CLIENTS_NPM"]).absolute() / "node_modules"
    assert packages.is_dir(), "the npm packages are not installed: make test-clients"
    return packages


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs a client's command in an empty home and returns its standard output."""

    def command(*line: str, ends: tuple[int, ...] = (0,), **environment: str) -> str:
        paths = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
        done: subprocess.CompletedProcess[Any] = subprocess.run(
            line, cwd=tmp_path, env=os.environ | paths | environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip
        assert done.returncode in ends, done.stdout[-3000:] + done.stderr[-3000:]
        return str(done.stdout)

    return command


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group(item.callspec.params["url"]))  # type: ignore[attr-defined]


@pytest.fixture
def checked(record_property: Callable[[str, object], None]) -> Callable[[int], None]:
    """Return a function that records how many documents a test compared with their types."""
    return lambda documents: record_property("documents", documents)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    passed = terminalreporter.getreports("passed")
    count = sum(dict(report.user_properties).get("documents", 0) for report in passed)
    terminalreporter.write_line(f"{count} documents match the types of openai and anthropic")
