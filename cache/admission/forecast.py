"""Output lengths still to come, learned from requests that ended and from how far the running ones have got.

The estimate is the product-limit survival curve (Kaplan and Meier, JASA 53, 1958). Requests that still run
count as *at risk* up to where they are; leaving them out would make every start look short, because short
outputs end first. Where few have ever been at risk the hazard is drawn towards the overall one (ended / tokens
produced), so that a cold start begins at max_tokens, adapts from the first requests on, and the far tail is not
guessed from two or three outputs.

One curve for each key (a tenant, a route), bounded in number and in size; keys with little history use the
curve of all.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tonnage.cache.errors import CacheConfigError

IntArray = npt.NDArray[np.integer]
Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# Lengths 1..64 apart, then 16 bins an octave: within 6 %, some 240 bins up to 2^17 tokens.
_EXACT, _PER_OCTAVE, _OCTAVES = 64, 16, 15
# Below so many at risk a hazard is drawn towards the overall one; a key with fewer ended requests uses the
# curve of all. benchmarks/admission.py: 8 and 20 differ by 0.1 % of the steps on the Azure trace.
_FEW = 20
# Counts are halved here, so that a change of the traffic shows within some thousand requests.
_REMEMBERED = 4096
_MAX_KEYS = 64


def _edges() -> Int64Array:
    """Longest length of each bin, int64, ascending."""
    tail = _EXACT * 2.0 ** (np.arange(1, _PER_OCTAVE * _OCTAVES + 1) / _PER_OCTAVE)
    return np.unique(np.concatenate((np.arange(1, _EXACT + 1), np.ceil(tail)))).astype(np.int64)


EDGES = _edges()
_FROM_ZERO = np.concatenate(((0,), EDGES)).astype(np.float64)
_WIDTHS = np.diff(_FROM_ZERO)


class LengthForecast:
    """Quantiles of the output still to come, given what a sequence has produced already.

    ``quantile`` in (0, 1]: 0.5 is the median of the outputs longer than the sequence's own; 1 answers
    max_tokens. Raises CacheConfigError outside. Memory: at most 65 histograms of 300 bins.

    ``cautious``: of n sequences the share of outputs that may be longer, 1 - ``quantile``, is less by its
    ``1 / sqrt(n)``. What is forecast of many is their sum, whose surprises grow with the root of their number
    only; one alone counts with max_tokens. With and without: benchmarks/vllm_admission.py ``--simulate --loops
    closed --blocks 48``.
    """

    def __init__(self, quantile: float, cautious: bool = False) -> None:
        if not 0 < quantile <= 1:
            raise CacheConfigError(
                f"{quantile} is not in (0, 1]", field="length_quantile", hint="0.5 is the median"
            )
        self.quantile, self.cautious = quantile, cautious
        self._ended: dict[str, FloatArray] = {"": np.zeros(len(EDGES))}

    def ended(self, output_tokens: int, key: str = "") -> None:
        """A sequence has ended by itself after so many tokens. Cancelled ones say nothing and are not given."""
        at = min(int(np.searchsorted(EDGES, max(1, output_tokens))), len(EDGES) - 1)
        for name in {"", key}:
            counts = self._ended.get(name)
            if counts is None:
                if len(self._ended) > _MAX_KEYS:
                    del self._ended[next(name for name in self._ended if name)]
                counts = self._ended[name] = np.zeros(len(EDGES))
            counts[at] += 1
            if counts.sum() > _REMEMBERED:
                counts /= 2

    def left(self, output: IntArray, output_left: IntArray, keys: list[str] | None = None) -> Int64Array:
        """Tokens each sequence is forecast to produce; int64 [sequences], between 1 and ``output_left``.

        ``output`` [sequences]: produced so far, of all that run or are to be admitted (all of them are at
        risk); ``output_left`` [sequences]: the most they may still produce; ``keys`` one for each.
        """
        most: Int64Array = np.asarray(output_left, dtype=np.int64)
        if self.quantile == 1 or not len(most):
            return most
        done: Int64Array = np.asarray(output, dtype=np.int64)
        known = {key for key in set(keys or ()) if key and self._known(key)}
        share = 1 - self.quantile
        if self.cautious:
            share *= 1 - len(most) ** -0.5
        if keys is None or not known:
            return self._left_of("", share, done, most, done)
        result = np.empty_like(most)
        used = [key if key in known else "" for key in keys]
        for key in set(used):
            mine = np.array([name == key for name in used])
            peers = mine if key else np.ones_like(mine)  # the curve of all is of all
            result[mine] = self._left_of(key, share, done[mine], most[mine], done[peers])
        return result

    def _known(self, key: str) -> bool:
        return key in self._ended and float(self._ended[key].sum()) >= _FEW

    def _left_of(
        self, key: str, share: float, done: Int64Array, most: Int64Array, peers: Int64Array
    ) -> Int64Array:
        from tonnage.cache.admission.loops import lengths_left

        survival = self._survival(key, peers, done, most)
        left = np.empty_like(done)
        lengths_left(_FROM_ZERO, survival, share, done, most, left)
        return left

    def _survival(self, key: str, peers: Int64Array, done: Int64Array, most: Int64Array) -> FloatArray:
        """float64 [bins + 1]: share of outputs longer than 0 and each bin's edge; evenly falling between.
        ``peers``: what the running have produced; ``done`` and at ``most`` so many more: those that are asked
        for."""
        ended = self._ended[key]
        bins = np.searchsorted(EDGES, peers[peers > 0])  # of what is produced; who has nothing is in none
        running = np.bincount(np.minimum(bins, len(EDGES) - 1), minlength=len(EDGES))
        at_risk = (ended + running)[::-1].cumsum()[::-1]
        # One output of the greatest length allowed, ended by nothing: what is believed before anything is seen.
        rate = float(ended.sum()) / (float((at_risk * _WIDTHS).sum()) + int((done + most).max()))
        overall = 1 - np.exp(-rate * _WIDTHS)
        few = at_risk < _FEW
        hazard = np.where(few, (ended + _FEW * overall) / (at_risk + _FEW), ended / np.maximum(at_risk, 1))
        return np.concatenate(((1.0,), np.cumprod(1 - hazard)))
