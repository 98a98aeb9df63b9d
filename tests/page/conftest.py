"""Fixtures of the page in a real browser.

They need chromium, npm and openssl from the system, and playwright from the extra pagetest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import Sight

from tonnage.planner.page.build import build, model_files
from tonnage.planner.page.command import server


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("site") / "page"
    build(folder, os.environ.get("TONNAGE_PYODIDE"))
    with server(folder, "127.0.0.1", 0) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_address[1]}/"
        serving.shutdown()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the page's models, under the names that they have on the page."""
    root = tmp_path_factory.mktemp("models")
    for name, content in model_files().items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


@pytest.fixture(scope="session")
def launch() -> Iterator[Callable[..., Any]]:
    """Yield a function that starts a Chromium with the given arguments."""
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium") or shutil.which("chromium-browser")
    assert found is not None, "chromium is not installed (apt-get install chromium)"
    with sync_playwright() as playwright:
        yield lambda *args: playwright.chromium.launch(executable_path=found, args=["--no-sandbox", *args])


@pytest.fixture(scope="session")
def browser(launch: Callable[..., Any]) -> Iterator[Any]:
    running = launch()
    yield running
    running.close()


@pytest.fixture
def sight(browser: Any, site: str) -> Iterator[Sight]:
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    seen = Sight(page, site)
    yield seen
    page.close()
    assert not seen.said


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the source of axe-core, from npm."""
    folder = tmp_path_factory.mktemp("axe")
    subprocess.run(
        ["npm", "install", "--silent", "--no-audit", "--prefix", str(folder), "axe-core@4.11.0"], check=True
    )
    return (folder / "node_modules/axe-core/axe.min.js").read_text()
