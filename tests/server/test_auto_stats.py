"""What the admission mode ``auto`` has learned and does: on /metrics, in /memory, in status and watch."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from metric_families import AUTO_FAMILIES, AUTO_LEARNED_FAMILIES, FAMILIES
from prometheus_client.parser import text_string_to_metric_families
from rehearsed import busy, teach

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.cache.admission.cost import StepCost
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.engines.stats import AutoStats, stats_of_auto, total_auto
from tonnage.server.observe.metrics.auto import auto_families
from tonnage.server.observe.metrics.families import Page
from tonnage.server.observe.status import auto_text
from tonnage.server.watch import status, text
from tonnage.server.watch.client import Client
from tonnage.server.watch.samples import Samples
from tonnage.server.watch.servers.families import read_auto
from tonnage.server.watch.watcher import Watcher

AUTO = Policy(AdmissionMode.AUTO)


def types(page: str) -> dict[str, str]:
    return dict(line.split()[2:4] for line in page.splitlines() if line.startswith("# TYPE"))  # type: ignore[misc]


def kinds(families: dict[str, tuple[str, set[str]]]) -> dict[str, str]:
    return {name: kind for name, (kind, _) in families.items()}


def page_of(*parts: AutoStats) -> str:
    """Return the families of several engines on one page, as a vLLM with data parallel serves them."""
    written = ""
    for index, part in enumerate(parts):
        page = Page(model="demo", engine_index=str(index))
        auto_families(page, part)
        written += page.take()
    return written


async def test_auto_mode_without_learned_step_costs_delays_no_request(
    run_server: Callable[..., Any], small_plan: Callable[..., Any]
) -> None:
    async with run_server(FakeEngine(small_plan(), policy=AUTO), admission_mode="auto") as server:
        page = (await server.http.get("/metrics")).text
        report = (await server.http.get("/memory")).json()
    shown = types(page)
    known = {name for name in FAMILIES if not name.startswith(("tonnage_memory_m", "tonnage_process_"))}
    assert {name: shown[name] for name in AUTO_FAMILIES} == kinds(AUTO_FAMILIES)
    assert shown.keys() - AUTO_FAMILIES.keys() == known
    assert 'tonnage_admission_info{model="demo",mode="auto"} 1.0' in page
    assert report["admission"] == {
        "mode": "auto",
        "auto": {
            "step_cost_seconds": None, "holds_back": False, "share": None, "rehearsed_gain": None,
            "fallbacks": 0,
        },
    }  # fmt: skip


async def test_admission_modes_other_than_auto_report_no_statistics_of_the_auto_mode(server: Any) -> None:
    report = (await server.http.get("/memory")).json()
    assert report["admission"] == {"mode": "guaranteed", "auto": None}
    found = await asyncio.to_thread(Watcher(Client(server.url), {}, None).observe)
    assert found.reading.auto is None
    assert "admission" not in text.to_dict(found)


async def test_step_costs_and_admission_rule_are_equal_in_metrics_and_memory_report_and_watch(
    run_server: Callable[..., Any], small_plan: Callable[..., Any]
) -> None:
    engine = FakeEngine(small_plan(200), policy=AUTO)
    async with run_server(engine, admission_mode="auto") as server:
        auto = engine.scheduler.admission.auto
        assert auto is not None
        auto.background = False
        teach(auto)
        auto.rule(64)
        told = engine.stats().auto
        assert told is not None
        page = (await server.http.get("/metrics")).text
        report = (await server.http.get("/memory")).json()
        found = await asyncio.to_thread(Watcher(Client(server.url), {}, None).observe)
        seen = await asyncio.to_thread(status.observe, Client(server.url))
    assert told == stats_of_auto(auto)
    assert told.cost is not None
    assert (told.cost.fixed + 16 * told.cost.sequence) == pytest.approx(0.017, rel=0.01)
    assert told.cost.prefill == pytest.approx(0.001, rel=0.01)
    assert told.share is not None
    assert told.gain is not None
    assert told.gain > 1
    assert kinds(AUTO_FAMILIES | AUTO_LEARNED_FAMILIES).items() <= types(page).items()
    labels = {
        sample.name: sample.labels.keys() - {"model"}
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    for name, (_, wanted) in (AUTO_FAMILIES | AUTO_LEARNED_FAMILIES).items():
        assert labels[name] == wanted
    assert f'tonnage_step_cost_seconds{{model="demo",part="prefill_token"}} {told.cost.prefill!r}' in page
    assert f'tonnage_admission_share_ratio{{model="demo"}} {told.share!r}' in page
    assert report["admission"] == {"mode": "auto", "auto": told.to_dict()}
    assert found.reading.auto == told
    line = f"admission {auto_text(told.to_dict())}"
    assert line in text.line(found)
    assert text.to_dict(found)["admission"]["auto"]["share"] == told.share
    assert re.search(rf"^admission +{re.escape(auto_text(told.to_dict()))}$", status.plain(seen), re.M)


async def test_auto_mode_learns_step_costs_from_the_fake_engine(
    run_server: Callable[..., Any], small_plan: Callable[..., Any]
) -> None:
    engine = FakeEngine(small_plan(), policy=AUTO, token_rate=1000)
    async with run_server(engine, admission_mode="auto") as server:
        for number in range(10):
            await server.complete(prompt=f"Story {number} and more", max_tokens=15)
        told = engine.stats().auto
    assert told is not None
    assert told.cost is not None
    assert sum(told.parts.values()) >= 0.001
    assert told.share is None


def test_status_line_of_auto_mode_shows_delayed_requests_and_step_cost() -> None:
    cost = StepCost(0.017, 0.001, 0.0, 3e-9)
    step = "step 17.0 ms + 1.0 ms a prefill token + 3.0 ns a token of context"
    for told, line in (
        (AutoStats(), "auto: vLLM's rule"),
        (AutoStats(cost, gain=1.0), f"auto: vLLM's rule, {step}"),
        (AutoStats(fallbacks=2), "auto: vLLM's rule, back to vLLM's rule 2 x"),
        (
            AutoStats(cost, 0.8, gain=1.07),
            f"auto: holds requests back at share 0.8, +7 % tokens/s rehearsed, {step}",
        ),
    ):
        assert auto_text(told.to_dict()) == line


def test_auto_mode_statistics_of_several_engines_are_merged() -> None:
    first = AutoStats(StepCost(0.02, 0.001, 0.0, 0.0), 0.9, gain=1.06, fallbacks=1)
    second = AutoStats(StepCost(0.04, 0.003, 0.0, 0.0), 0.6, gain=1.1)
    third, cold = AutoStats(None, 0.8, gain=1.05), AutoStats(fallbacks=2)
    both = total_auto([first, second, third, cold])
    assert both is not None
    assert both.cost is not None
    assert (both.cost.fixed, both.cost.prefill) == pytest.approx((0.03, 0.002))
    assert (both.share, both.fallbacks) == (0.6, 3)
    assert both.gain == pytest.approx(1.07)
    assert total_auto([third, cold]) == AutoStats(None, 0.8, gain=1.05, fallbacks=2)
    assert total_auto([]) is None
    assert read_auto(Samples(page_of(first, second, third, cold))) == both
    assert read_auto(Samples(page_of(cold))) == cold
    assert read_auto(Samples("")) is None


def test_auto_statistics_of_a_simulation_without_gain_report_vllms_rule() -> None:
    auto = busy()
    auto.rule(1)
    told = stats_of_auto(auto)
    assert told is not None
    assert (told.share, told.gain) == (None, 1.0)
    assert read_auto(Samples(page_of(told))) == told
