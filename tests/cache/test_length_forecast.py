"""Learned output lengths: quantiles of the remaining tokens, higher where few requests run."""

from __future__ import annotations

import numpy as np
import pytest

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.cache.admission.forecast import LengthForecast


def taught(quantile: float, cautious: bool = False) -> LengthForecast:
    """Return a forecast that has seen 2,000 outputs, spread evenly from 1 to 200 tokens."""
    forecast = LengthForecast(quantile, cautious)
    for number in range(2000):
        forecast.ended(1 + number % 200)
    return forecast


@pytest.mark.parametrize("done", [0, 50, 120])
def test_forecast_of_remaining_output_is_the_median_of_longer_past_outputs(done: int) -> None:
    left = taught(0.5).left(np.full(100, done), np.full(100, 1000))
    assert left == pytest.approx((200 - done) / 2, rel=0.08)
    assert (taught(0.5).left(np.full(100, done), np.full(100, 7)) == 7).all(), "max_tokens bounds it"


def test_output_length_forecast_is_longer_with_fewer_running_requests() -> None:
    def of(count: int) -> int:
        return int(taught(0.4, cautious=True).left(np.zeros(count), np.full(count, 1000)).max())

    assert of(1) == 1000, "one alone counts with max_tokens"
    assert of(1) > of(4) > of(25) > of(100) > of(400)
    assert of(25) == pytest.approx(200 * 0.52, rel=0.08)
    assert of(400) == pytest.approx(200 * 0.43, rel=0.08)


def test_configured_length_quantile_does_not_depend_on_the_running_requests() -> None:
    assert Policy(AdmissionMode.PREDICTIVE).cautious
    assert not Policy(AdmissionMode.PREDICTIVE, length_quantile=0.4).cautious
    assert Policy(AdmissionMode.GUARANTEED).cautious
    assert not Policy(AdmissionMode.GUARANTEED, length_quantile=0.5).cautious
    plain = taught(0.4)
    assert plain.left(np.zeros(1), np.full(1, 1000)) == plain.left(np.zeros(400), np.full(400, 1000))[0]
