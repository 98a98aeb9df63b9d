"""The rule that reads a disk tier only where that is faster than computing."""

from __future__ import annotations

import pytest

from tonnage.cache.disk import pace
from tonnage.cache.disk.pace import ReadRule


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the monotonic clock by a list of one time in seconds."""
    now = [1000.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    return now


def test_blocks_are_read_from_disk_until_read_and_compute_costs_are_measured() -> None:
    rule = ReadRule()
    assert rule.blocks_to_read() is None
    rule.read(10, 100.0)
    assert rule.blocks_to_read() is None
    rule.computed(10, 1.0)
    assert rule.blocks_to_read() == 0


def test_configured_compute_cost_replaces_the_measured_one() -> None:
    rule = ReadRule(compute_seconds=0.5)
    rule.computed(10, 1.0)
    rule.read(10, 4.0)
    assert rule.compute_seconds == 0.5
    assert rule.blocks_to_read() is None
    rule.read(10, 40.0)
    assert rule.blocks_to_read() == 0


def test_slow_disk_is_probed_with_one_block_per_minute_until_it_recovers(clock: list[float]) -> None:
    rule = ReadRule()
    rule.computed(10, 1.0)
    rule.read(1000, 1000.0)
    assert [rule.blocks_to_read() for _ in range(3)] == [0, 0, 0]
    clock[0] += pace.PROBE_SECONDS
    assert [rule.blocks_to_read() for _ in range(3)] == [1, 0, 0]
    rule.read(1, 1.0)  # still slow
    assert rule.blocks_to_read() == 0
    clock[0] += pace.PROBE_SECONDS
    assert rule.blocks_to_read() == 1
    rule.read(1, 0.01)
    assert rule.blocks_to_read() is None


def test_recent_disk_read_times_outweigh_earlier_ones(clock: list[float]) -> None:
    rule = ReadRule()
    rule.computed(10, 1.0)
    for _ in range(20):
        rule.read(10, 0.1)
    assert rule.blocks_to_read() is None
    for _ in range(10):
        rule.read(10, 10.0)
    assert rule.blocks_to_read() == 0
