"""The sums that the memory components of a plan's rank must have."""

from __future__ import annotations

from dataclasses import fields

from tonnage.planner.plans import RankPlan


def check_components(components: dict[str, int], rank: RankPlan) -> None:
    """Assert that the components of a rank, including `free`, add up to the device's memory.

    Every field of `rank` in bytes must be among the components.

    Raises:
        AssertionError: the sums differ.
    """
    elsewhere = {"total_bytes", "offloaded_bytes"}
    held = [getattr(rank, part.name) for part in fields(rank) if part.name not in elsewhere]
    assert sum(components.values()) == rank.total_bytes, (components, rank)
    assert sum(held) == sum(components.values()) - components["free"], (components, rank)
