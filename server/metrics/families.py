"""Short ways to Prometheus families; every series carries the label ``model``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tonnage.server.accounts import Histogram

Labels = tuple[str, ...]


class Families:
    """Makes the families of one model. Names of counters come without ``_total``; the format appends it."""

    def __init__(self, model: str) -> None:
        self.model = model

    def gauge(self, name: str, text: str, value: float) -> Metric:
        return self.gauges(name, text, (), {(): value})

    def counter(self, name: str, text: str, value: float) -> Metric:
        return self.counters(name, text, (), {(): value})

    def gauges(self, name: str, text: str, labels: Labels, values: Mapping[Labels, float]) -> Metric:
        """One series for each key of ``values``, a tuple of label values in the order of ``labels``."""
        family = GaugeMetricFamily(name, text, labels=("model", *labels))
        for key, value in values.items():
            family.add_metric((self.model, *key), value)
        return family

    def counters(self, name: str, text: str, labels: Labels, values: Mapping[Labels, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model", *labels))
        for key, value in values.items():
            family.add_metric((self.model, *key), value)
        return family

    def info(self, name: str, text: str, labels: Labels, values: Iterable[Labels]) -> Metric:
        """A gauge that is always 1 and says things in its labels."""
        return self.gauges(name, text, labels, dict.fromkeys(values, 1))

    def histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        borders = [*map(str, map(float, histogram.borders)), "+Inf"]
        family = HistogramMetricFamily(name, text, labels=("model",))
        counts = list(accumulate(histogram.counts))
        family.add_metric((self.model,), list(zip(borders, counts, strict=True)), histogram.total)
        return family
