"""The weights of finished and running requests in a window of steps (product-limit estimate)."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tonnage.cache.admission.observed_lengths import Lengths, draw, weigh

NONE = np.empty((0, 3), np.int64)


def rows(lengths: list[int]) -> np.ndarray:
    """Return requests with 10 prompt tokens, these output lengths and max_tokens 600."""
    return np.array([(10, length, 600) for length in lengths], np.int64).reshape(-1, 3)


def mean(lengths: Lengths) -> float:
    return float(lengths.rows[:, 1] @ lengths.weights)


def exponential(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [1 + int(chance.expovariate(1 / 120)) for _ in range(count)]


def test_finished_requests_have_equal_weights_if_none_is_running() -> None:
    found = weigh(rows([5, 40, 40, 7]), np.array([500, 500, 500, 500]), NONE, 500)
    assert found.weights == pytest.approx([0.25] * 4)
    assert found.unknown == 0


@pytest.mark.parametrize("steps", [60, 120, 240])
def test_length_estimate_soon_after_a_start_includes_requests_still_running(steps: int) -> None:
    outputs = exponential(0, 2000)  # all start in step 0, none later
    finished = [output for output in outputs if output < steps]
    running = rows([steps] * (len(outputs) - len(finished)))
    found = weigh(rows(finished), np.array(finished), running, steps)
    true = np.mean([min(output, steps) for output in outputs])
    assert mean(found) == pytest.approx(true, rel=0.01)
    assert np.mean(finished) < 0.8 * true
    assert found.unknown == pytest.approx(len(running) / len(outputs), rel=0.05)


@pytest.mark.parametrize("window", [200, 400, 2000])
def test_output_lengths_estimated_from_a_time_window_of_a_busy_server_have_the_true_mean(window: int) -> None:
    outputs, clients, begin = exponential(1, 40_000), 300, 3000
    chance = random.Random(2)
    finished, ages, running = [], [], []
    for _ in range(clients):  # each client sends one request after the other
        now = -chance.randrange(600)
        while True:
            output = outputs.pop()
            if now + output > begin + window:
                running.append(begin + window - now)
                break
            now += output
            if now > begin:
                finished.append(output)
                ages.append(now - begin)
    found = weigh(rows(finished), np.array(ages), rows([each for each in running if each > 0]), window)
    assert mean(found) == pytest.approx(120, rel=0.1)
    assert found.unknown < 0.1


def test_length_estimate_is_not_cut_off_after_a_step_in_which_few_requests_ran() -> None:
    # In the begin of the window only long requests run. The first length is then observed once, and it ends.
    found = weigh(rows([3, 300, 310, 320]), np.array([50, 50, 60, 70]), NONE, 80)
    assert found.weights[1:].sum() == pytest.approx(0.5)


def test_long_request_that_ends_in_the_first_step_of_the_time_window_is_counted_with_full_weight() -> None:
    assert weigh(rows([3, 300]), np.array([50, 0]), NONE, 80).weights == pytest.approx([0.5, 0.5])


def test_request_lengths_are_drawn_in_proportion_to_their_weights() -> None:
    drawn = draw(Lengths(rows([1, 2, 3]), np.array([0.5, 0.3, 0.2]), 0.0), 1000)
    assert np.bincount(drawn[:, 1]).tolist() == [0, 500, 300, 200]
    assert drawn[:, 1].tolist() != sorted(drawn[:, 1].tolist())
