"""The distribution of recent requests' lengths, corrected for requests that still run.

Short outputs end first. After a start, and in a short window of time, the finished requests are therefore
shorter than all requests on average. `weigh` corrects this bias with the product-limit estimate of survival
analysis (Kaplan and Meier, JASA 53, 1958) with delayed entry. A request counts as *at risk of ending* at every
output length that it passed within the window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tonnage.cache.admission.forecast import FloatArray, Int64Array


@dataclass(frozen=True, slots=True)
class Lengths:
    """A weighted sample of requests from a window of engine steps, which represents all arriving requests.

    Attributes:
        rows: int64 [requests, 3]: prompt tokens, output tokens and max_tokens of each request.
        weights: float64 [requests]: share of the arriving requests that each row represents; the sum is 1.
        unknown: Share of the arriving requests whose output is longer than any that has finished.
    """

    rows: Int64Array
    weights: FloatArray
    unknown: float


def weigh(finished: Int64Array, ages: Int64Array, running: Int64Array, window: int) -> Lengths:
    """Return the requests of a window of engine steps, weighted to represent all arriving requests.

    A running request has a weight only if it is at least as long as the longest finished output. It then counts
    with the output that it has so far.

    Args:
        finished: int64 [finished, 3]: prompt tokens, output tokens (at least 1) and max_tokens of the requests
            that finished in the window, at least one.
        ages: int64 [finished]: steps from the start of the window to the end of each finished request. A
            request produced at most that many tokens within the window.
        running: int64 [running, 3]: the same three columns of the requests that run at the end of the window.
        window: Steps of the window.
    """
    output, produced = finished[:, 1], running[:, 1]
    # A finished request produced at least its last token within the window.
    passed = np.concatenate((np.maximum(1, ages), np.full(len(running), window)))
    entered = np.sort(np.maximum(0, np.concatenate((output, produced)) - passed))
    left = np.sort(np.concatenate((output, produced)))
    lengths, place, ended = np.unique(output, return_inverse=True, return_counts=True)
    at_risk = np.searchsorted(entered, lengths) - np.searchsorted(left, lengths)
    # At each length below the longest, some requests must continue, even if all of the few observed ones ended.
    at_risk[:-1] = np.maximum(at_risk[:-1], ended[:-1] + 1)
    survival = np.concatenate(((1.0,), np.cumprod(1 - ended / at_risk)))
    weights = (survival[:-1] - survival[1:])[place] / ended[place]
    longer = running[produced >= lengths[-1]]
    if len(longer):
        weights = np.concatenate((weights, np.full(len(longer), survival[-1] / len(longer))))
    unknown = float(survival[-1]) if len(longer) else 0.0
    return Lengths(np.concatenate((finished, longer)), weights / weights.sum(), unknown)


def draw(lengths: Lengths, count: int) -> Int64Array:
    """Return ``count`` requests of a weighted sample in random order, int64 [count, 3].

    Each request of the sample is repeated in proportion to its weight.
    """
    places = np.searchsorted(np.cumsum(lengths.weights), (np.arange(count) + 0.5) / count)
    rows = lengths.rows[np.minimum(places, len(lengths.rows) - 1)]
    return np.random.default_rng(0).permutation(rows)
