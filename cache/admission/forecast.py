"""A forecast of remaining output lengths, learned from finished requests and from the progress of running ones.

The estimate is the product-limit survival curve (Kaplan and Meier, JASA 53, 1958). Running requests count as
*at risk* up to their present length. Without them outputs would look too short after a start, because short
outputs end first. The *hazard* at a length is the probability that an output which reaches the length ends
there. Where few requests have been at risk, the hazard is drawn towards the overall hazard (ended requests /
tokens produced). The first forecasts are therefore max_tokens, and the tail of long outputs is not guessed from
two or three requests.

There is one curve per key (a tenant, a route), bounded in number and in size. A key with little history uses
the curve that is estimated from the requests of all keys.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tonnage.cache.errors import CacheConfigError

IntArray = npt.NDArray[np.integer]
Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# Histogram bins of output lengths: lengths of 1 to 64 tokens have one bin each. Longer lengths have 16 bins per
# doubling and are exact to 6 %, which makes about 240 bins up to 2^17 tokens.
_EXACT, _PER_OCTAVE, _OCTAVES = 64, 16, 15
# If fewer requests than this have reached a length, the estimated probability to end there is drawn towards the
# mean over all lengths. A tenant with fewer finished requests uses the survival curve of all tenants. With 8
# instead of 20, the number of steps of benchmarks/admission.py on the Azure trace changes by 0.1 %.
_FEW = 20
# The counts of a length histogram are halved when their sum reaches this number, so that a change of the
# traffic shows within some thousand requests.
_REMEMBERED = 4096
_MAX_KEYS = 64
# Number of survival curves that are cached, 2 KB each. Most requests decided on in one step share a curve.
_CURVES = 16


def _edges() -> Int64Array:
    """Return the largest output length in tokens of each bin of a length histogram, int64 [bins], ascending."""
    tail = _EXACT * 2.0 ** (np.arange(1, _PER_OCTAVE * _OCTAVES + 1) / _PER_OCTAVE)
    return np.unique(np.concatenate((np.arange(1, _EXACT + 1), np.ceil(tail)))).astype(np.int64)


EDGES = _edges()
_FROM_ZERO = np.concatenate(((0,), EDGES)).astype(np.float64)
_WIDTHS = np.diff(_FROM_ZERO)


class LengthForecast:
    """Quantiles of the remaining output length of a sequence, given the tokens it has produced already.

    It keeps at most 65 histograms with 300 bins each.

    Args:
        quantile: Quantile in (0, 1]. 0.5 is the median of the outputs that are longer than the sequence's
            output so far; 1 forecasts max_tokens.
        cautious: Use a higher quantile for few sequences: for n sequences 1 - ``quantile`` is reduced by the
            fraction ``1 / sqrt(n)`` of itself. A single sequence then counts with max_tokens. Only the sum of
            the lengths matters, and its relative deviation is large for few sequences. Measured with
            benchmarks/vllm_admission.py ``--simulate --loops closed --blocks 48``.

    Raises:
        CacheConfigError: ``quantile`` is outside (0, 1].
    """

    def __init__(self, quantile: float = 1.0, cautious: bool = False) -> None:
        if not 0 < quantile <= 1:
            raise CacheConfigError(
                f"{quantile} is not in (0, 1]", field="length_quantile", hint="0.5 is the median"
            )
        self.quantile, self.cautious = quantile, cautious
        # Number of recorded lengths.
        self.count = 0
        # Cache of computed survival curves, emptied whenever a length is recorded.
        self._curves: dict[tuple[object, ...], FloatArray] = {}
        self._ended: dict[str, FloatArray] = {"": np.zeros(len(EDGES))}

    def ended(self, output_tokens: int, key: str = "") -> None:
        """Record the output length of a sequence that finished; cancelled sequences must not be recorded."""
        self.count += 1
        self._curves.clear()
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
        """Return the forecast remaining tokens of each sequence, int64 [sequences], 1 to ``output_left``.

        Args:
            output: int [sequences]: output tokens so far, of all running and new sequences.
            output_left: int [sequences]: upper bound of the output tokens that each sequence may still produce.
            keys: Key (such as the tenant) of each sequence, or None to forecast from the requests of all keys.
        """
        most: Int64Array = np.asarray(output_left, dtype=np.int64)
        if self.quantile == 1 or not len(most):
            return most
        done: Int64Array = np.asarray(output, dtype=np.int64)
        known = {key for key in set(keys or ()) & self._ended.keys() if key and self._ended[key].sum() >= _FEW}
        share = 1 - self.quantile
        if self.cautious:
            share *= 1 - len(most) ** -0.5
        if keys is None or not known:
            return self._left_of("", share, done, most, done)
        result = np.empty_like(most)
        used = [key if key in known else "" for key in keys]
        for key in set(used):
            mine = np.array([name == key for name in used])
            # the survival curve of requests without a known key counts the running sequences of all keys
            peers = mine if key else np.ones_like(mine)
            result[mine] = self._left_of(key, share, done[mine], most[mine], done[peers])
        return result

    def _left_of(
        self, key: str, share: float, done: Int64Array, most: Int64Array, peers: Int64Array
    ) -> Int64Array:
        from tonnage.cache.admission.loops import lengths_left

        survival = self._survival(key, peers, done, most)
        left = np.empty_like(done)
        lengths_left(_FROM_ZERO, survival, share, done, most, left)
        return left

    def _survival(self, key: str, peers: Int64Array, done: Int64Array, most: Int64Array) -> FloatArray:
        """Return the share of outputs longer than each histogram bin (the survival curve), float64 [bins + 1].

        Element 0 is the share of outputs longer than 0 tokens. Element i + 1 is the share of outputs longer
        than the last length of bin i.

        Args:
            key: Key of the outputs that are counted, such as a tenant's name; "" for all outputs.
            peers: Output tokens so far of each running sequence with this key.
            done: Output tokens so far of each sequence whose length is to be forecast.
            most: Upper bound of the further output tokens of each of these sequences.
        """
        ended = self._ended[key]
        # bin of each sequence's output length; a sequence without output is in no bin
        bins = np.searchsorted(EDGES, peers[peers > 0])
        running = np.bincount(np.minimum(bins, len(EDGES) - 1), minlength=len(EDGES))
        longest = int((done + most).max())
        curve = self._curves.get(known := (key, longest, running.tobytes()))
        if curve is not None:
            return curve
        at_risk = (ended + running)[::-1].cumsum()[::-1]
        # As a prior, the rate (ended outputs per token) counts one more output, which has reached the greatest
        # allowed length without an end.
        rate = float(ended.sum()) / (float((at_risk * _WIDTHS).sum()) + longest)
        overall = 1 - np.exp(-rate * _WIDTHS)
        few = at_risk < _FEW
        hazard = np.where(few, (ended + _FEW * overall) / (at_risk + _FEW), ended / np.maximum(at_risk, 1))
        if len(self._curves) == _CURVES:
            self._curves.clear()
        curve = self._curves[known] = np.concatenate(((1.0,), np.cumprod(1 - hazard)))
        return curve
