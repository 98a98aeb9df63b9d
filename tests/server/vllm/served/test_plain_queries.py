"""Tests of every panel query and alert rule on a real Prometheus that scrapes a plain vLLM with our plug-in."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from queries import (
    Prometheus,
    Traffic,
    dashboards,
    every_panel_answers,
    every_rule_is_evaluated,
    every_rule_sees_its_series,
    rules,
    scraping,
)
from serving import PATIENCE, listens

from tonnage.server.engines.vllm import figures

TIER = "tonnage_tier_"  # this server has no KV tier


@pytest.fixture(scope="module")
def busy(plain: str) -> Iterator[str]:
    with Traffic(plain) as traffic:
        traffic.wait_for_answers(4)
        yield plain
    assert set(traffic.answers) <= {200, 400}


@pytest.fixture(scope="module")
def prometheus(busy: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with scraping(busy, tmp_path_factory.mktemp("prometheus")) as client:
        yield client


def test_no_dashboard_panel_is_empty_for_a_plain_vllm(prometheus: Prometheus) -> None:
    every_panel_answers(prometheus, dashboards(), without=TIER)


def test_every_alert_rule_is_evaluated_for_a_plain_vllm(prometheus: Prometheus) -> None:
    known = rules()
    assert len(known) > 15
    every_rule_is_evaluated(prometheus, known)
    every_rule_sees_its_series(prometheus, known, without=TIER)


def test_metrics_page_of_plain_vllm_has_consistent_tonnage_metrics(
    busy: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = httpx.get(f"{busy}/metrics", trust_env=False, timeout=PATIENCE).text
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("tonnage_"))
    assert samples['tonnage_plugin_errors_total{model="demo"}'] == "0.0"
    assert samples['tonnage_pool_difference_blocks{model="demo"}'] == "0.0"
    blocks = float(samples['tonnage_config_num_blocks{model="demo"}'])
    states = [float(v) for name, v in samples.items() if name.startswith("tonnage_pool_blocks{")]
    assert sum(states) == blocks
    # What our scheduler tells has come with vLLM's messages.
    assert samples['tonnage_admission_info{mode="guaranteed",model="demo"}'] == "1.0"
    decided = 'tonnage_admission_decisions_total{{model="demo",outcome="{}",reason="{}"}}'
    answered = sum(float(samples[decided.format(*key)]) for key in (("admit", "fits"), ("never", "blocks")))
    ended = sum(float(v) for name, v in samples.items() if name.startswith("tonnage_requests_total{"))
    in_flight = float(samples['tonnage_requests_in_flight{model="demo"}'])
    assert float(samples['tonnage_requests_received_total{model="demo"}']) == ended + in_flight
    assert ended <= answered <= ended + in_flight
    assert samples['tonnage_preemptions_total{model="demo"}'] == "0.0"  # the pool is too small for vLLM's own
    assert "vllm:num_requests_running" in text  # its own are there as before
    (log,) = Path(tmp_path_factory.getbasetemp()).glob("plain0/log")
    assert log.read_text().count("Tonnage: plan ") == 1


def test_workers_of_plain_vllm_report_their_memory(busy: str) -> None:
    """On a CPU the workers log only the pool's size, which takes the same path as a GPU's figures."""
    (api,) = [child for child in psutil.Process().children(recursive=True) if listens(child, busy)]
    family = api.children(recursive=True)  # another vLLM may be running
    folders = {folder for child in family if (folder := child.environ().get(figures.FOLDER))}
    assert len(folders) == 1
    told: dict[str, float] = {}
    for file in Path(folders.pop()).glob("*.json"):
        told |= json.loads(file.read_text())
    text = httpx.get(f"{busy}/metrics", trust_env=False, timeout=PATIENCE).text
    (tokens,) = re.findall(r'^tonnage_pool_tokens\{model="demo",state="reserved"} (\d+)', text, re.M)
    blocks = float(re.findall(r'^tonnage_config_num_blocks\{model="demo"} (\d+)', text, re.M)[0])
    assert told["tokens"] == blocks * float(tokens)  # vLLM counts its null block


def test_counters_of_plain_vllm_equal_what_the_clients_counted(busy: str) -> None:
    """Our counters equal vLLM's own, except on a page that is written while a request ends."""
    deadline = time.monotonic() + PATIENCE
    while wrong := counted_otherwise(httpx.get(f"{busy}/metrics", trust_env=False, timeout=PATIENCE).text):
        assert time.monotonic() < deadline, wrong
        time.sleep(0.1)


def counted_otherwise(text: str) -> list[tuple[str, float, float]]:
    """Return the counters on a page that differ from vLLM's: name, our value, vLLM's value."""
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    errors = float(samples['tonnage_requests_total{model="demo",outcome="error"}'])
    found = []
    for ours, theirs in (
        ("tonnage_generation_tokens_total", "vllm:generation_tokens_total"),
        ("tonnage_prompt_tokens_total", "vllm:prompt_tokens_total"),
        ("tonnage_preemptions_total", "vllm:num_preemptions_total"),
        ("tonnage_time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds_count"),
        ("tonnage_request_duration_seconds_count", "vllm:e2e_request_latency_seconds_count"),
    ):
        (own,) = [float(v) for name, v in samples.items() if name.startswith(ours + "{")]
        (other,) = [float(v) for name, v in samples.items() if name.startswith(theirs + "{")]
        own += ("e2e" in theirs) * errors
        if own != other:
            found.append((ours, own, other))
    return found
