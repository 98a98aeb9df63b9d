"""Metrics of the admission mode `auto`: measured step costs, and the admission rule that currently applies."""

from __future__ import annotations

from tonnage.server.engines.stats import AutoStats
from tonnage.server.observe.metrics.families import Page


def auto_families(page: Page, auto: AutoStats | None) -> None:
    """Write the metrics of the admission mode ``auto``; write nothing when ``auto`` is None (other modes)."""
    if auto is None:
        return
    page.gauges(
        "tonnage_step_cost_seconds",
        "Fitted seconds of an engine step: fixed, and for each prefill_token, sequence and context_token. "
        "Absent until enough steps have run.",
        ("part",),
        {(part,): seconds for part, seconds in auto.parts.items()},
    )
    page.gauge(
        "tonnage_admission_holding",
        "1 while admission holds requests back, 0 while vLLM's rule holds.",
        int(auto.share is not None),
    )
    page.gauge(
        "tonnage_admission_share_ratio",
        "Share of longer outputs still running at the length where a running request is forecast to end. A "
        "lower share holds back more requests. Absent while vLLM's rule holds.",
        auto.share,
    )
    page.gauge(
        "tonnage_admission_rehearsed_gain_ratio",
        "Tokens per second of the rule in force over tokens per second of vLLM's rule, both rehearsed.",
        auto.gain,
    )
    page.counter(
        "tonnage_admission_fallbacks",
        "Times that admission went back to vLLM's rule because holding requests back served fewer tokens.",
        auto.fallbacks,
    )
