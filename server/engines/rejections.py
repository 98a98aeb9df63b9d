"""Counts of the requests that an engine's API process rejects because an empty KV pool cannot hold them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NoReturn

from tonnage.cache.admission import Never
from tonnage.server.engines.errors import NeverFits
from tonnage.server.engines.stats import EngineStats, ReasonCounts, merged


class Rejections:
    """Numbers of rejected requests, and of the KV blocks that they lacked, by the reason of the rejection."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._blocks: Counter[str] = Counter()

    def reject(self, never: Never) -> NoReturn:
        """Count a rejected request and raise its NeverFits; ``never`` says why an empty pool cannot hold it."""
        reason = str(never.reason)
        self._requests[reason] += 1
        self._blocks[reason] += max(0, never.needed_blocks - never.usable_blocks)
        raise NeverFits(str(never), field="prompt")

    def added_to(self, stats: EngineStats) -> EngineStats:
        """Return an engine's statistics with the rejected requests and their missing KV blocks added."""
        return replace(
            stats,
            admissions=merged((stats.admissions, _counts(self._requests))),
            refused_blocks=merged((stats.refused_blocks, _counts(self._blocks))),
        )


def _counts(by_reason: Counter[str]) -> ReasonCounts:
    return tuple(("never", reason, count) for reason, count in by_reason.items())
