"""Request accounting: the estimate of when blocks become free."""

from __future__ import annotations

import pytest

from tonnage.server.requests.drain import DrainEstimate


def test_estimated_wait_for_blocks_uses_the_rate_of_recently_freed_blocks() -> None:
    drain = DrainEstimate(window=4)
    assert drain.seconds(10, 0.0) is None
    for second in range(6):
        drain.ended(20, float(second))
    # The window has four ends, seconds 2 to 5: 60 blocks in three seconds after the first of them.
    assert drain.seconds(100, 5.0) == pytest.approx(5.0)
    assert drain.seconds(100, 8.0) == pytest.approx(10.0)
