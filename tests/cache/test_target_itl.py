"""The log lines of ``--target-itl`` after a rehearsal has chosen a limit."""

from __future__ import annotations

import logging
import re

import pytest
from rehearsed import busy

from tonnage.cache.admission.auto import Auto, Choice


def said(caplog: pytest.LogCaptureFixture, auto: Auto) -> list[str]:
    caplog.set_level(logging.INFO, "tonnage.cache")
    for in_system in (40, 20, 40):
        auto.rule(in_system)
    return [record.getMessage() for record in caplog.records]


def forecast(choice: Choice | None) -> str:
    assert choice is not None
    ratio = choice.outcome.tokens_per_second / choice.own.tokens_per_second
    return f"{1e3 * choice.outcome.between_p99:.0f} ms, tokens/s {100 * (ratio - 1):+.0f} % against vLLM's rule"


def test_reachable_target_itl_is_logged_once_with_its_throughput_cost(caplog: pytest.LogCaptureFixture) -> None:
    auto = busy(0.2)
    (line,) = said(caplog, auto)
    assert re.match(r"Tonnage admission: target 200 ms between tokens: P99 forecast \d+ ms, ", line)
    assert line.endswith(forecast(auto.choice))
    assert auto.choice is not None
    assert auto.choice.outcome.between_p99 <= 0.2


def test_unreachable_target_itl_is_logged_once_with_the_lowest_forecast_latency(
    caplog: pytest.LogCaptureFixture,
) -> None:
    auto = busy(0.001)
    (line,) = said(caplog, auto)
    assert line.startswith(
        "Tonnage admission: no rule keeps the target of 1 ms between tokens: the best has a P99 forecast of "
    )
    assert "against vLLM's rule" in line


def test_throughput_cost_is_logged_only_with_target_itl(caplog: pytest.LogCaptureFixture) -> None:
    assert said(caplog, busy()) == []
