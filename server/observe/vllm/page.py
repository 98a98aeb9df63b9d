"""A metrics page that collects prometheus_client's metric objects instead of writing text."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from prometheus_client import Metric

from tonnage.server.observe.metrics.families import Key, Labels, Page
from tonnage.server.requests.histogram import Histogram


class CollectedPage(Page):
    """A metrics page that adds its metrics to the dict `families`, keyed by metric name.

    Pages of several engines share one dict, so that each metric has the series of all engines.
    """

    def __init__(self, families: dict[str, Metric], **labels: str) -> None:
        super().__init__(**labels)
        self._families = families

    def histogram(self, name: str, text: str, histogram: Histogram) -> None:
        """Add a histogram, as a prometheus_client metric object."""
        family = self._metric(name, "histogram", text)
        count = 0
        for border, count in zip(
            (*map(float, histogram.borders), "+Inf"), accumulate(histogram.counts), strict=True
        ):
            family.add_sample(f"{name}_bucket", {**self._base, "le": str(border)}, float(count))
        family.add_sample(f"{name}_count", self._base, float(count))
        family.add_sample(f"{name}_sum", self._base, float(histogram.total))

    def _family(self, name: str, kind: str, text: str, labels: Labels, values: Mapping[Key, float]) -> None:
        if values:
            family = self._metric(name.removesuffix("_total") if kind == "counter" else name, kind, text)
            for key, value in values.items():
                family.add_sample(name, {**self._base, **dict(zip(labels, key, strict=True))}, float(value))

    def _metric(self, name: str, kind: str, text: str) -> Metric:
        return self._families.setdefault(name, Metric(name, text, kind))
