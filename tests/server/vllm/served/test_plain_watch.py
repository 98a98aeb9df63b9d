"""Tests of ``tonnage watch`` on a real ``vllm serve``, with and without our plug-in's metrics."""

from __future__ import annotations

import threading
import time

import httpx
from pages import pages
from serving import PATIENCE

from tonnage.server.observe.metrics.headroom import Headroom
from tonnage.server.watch.client import Client
from tonnage.server.watch.watcher import Watcher


def ask(url: str, number: int) -> None:
    body = {"model": "demo", "prompt": f"Story {number}", "max_tokens": 200, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE, trust_env=False)
    assert answer.status_code == 200, answer.text


def wait_for_load(url: str, watcher: Watcher, idle: Headroom) -> None:
    """Wait until an observation shows running requests that take blocks from the headroom; then for their end.

    vLLM's logger and the plug-in write a step one after the other, so a page read between them has the
    requests of this step beside the headroom of the step before.
    """
    threads = [threading.Thread(target=ask, args=(url, number)) for number in range(4)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE
    found = watcher.observe()
    while not (
        found.reading.sum_of("running")
        and found.reading.blocks("used")
        and found.headroom is not None
        and found.headroom.blocks < idle.blocks
    ):
        assert time.monotonic() < deadline, found
        found = watcher.observe()
    for thread in threads:
        thread.join(PATIENCE)


def test_watch_shows_the_plan_that_the_vllm_plug_in_reports(plain: str) -> None:
    watcher = Watcher(Client(plain), {}, None)
    idle = watcher.observe()
    assert idle.headroom is not None
    wait_for_load(plain, watcher, idle.headroom)
    page = httpx.get(f"{plain}/metrics", trust_env=False, timeout=PATIENCE).text
    assert (idle.facts.title, idle.facts.served) == ("vLLM", "demo")
    assert idle.planned is not None
    assert idle.planned.plan_id in page
    assert {"weights", "activations", "framework", "free"} <= idle.planned.components.keys()
    assert idle.planned.num_blocks == idle.reading.blocks("num_blocks")
    assert idle.measured["kv_pool"] == idle.planned.components["kv_pool"]
    assert idle.headroom.blocks <= (idle.reading.blocks("usable") or 0)
    assert watcher.observe().restarts == 0


def test_watch_reads_the_metrics_of_a_plain_vllm(plain: str) -> None:
    """Without our metrics on the page, watch makes the plan itself and has the same figures."""

    def fetched(path: str) -> str:
        return httpx.get(f"{plain}{path}", trust_env=False, timeout=PATIENCE).text

    told = Watcher(Client(plain), {}, None).observe()
    page = "".join(line for line in fetched("/metrics").splitlines(True) if not line.startswith("tonnage_"))
    with pages(metrics=page, v1_models=fetched("/v1/models"), version=fetched("/version")) as bare:
        flags = {"gpu": "cpu", "max_num_seqs": 6, "max_num_batched_tokens": 256, "enforce_eager": True}
        found = Watcher(Client(bare.url), flags, None).observe()
    assert told.planned is not None
    assert found.planned is not None
    assert found.planned.components["weights"] == told.planned.components["weights"]
    pool = found.planned.components["kv_pool"]
    assert pool == told.planned.components["kv_pool"] == found.measured["kv_pool"]
    assert found.reading.replicas == told.reading.replicas
    assert found.headroom is not None
    assert found.headroom.blocks == found.reading.blocks("usable")
