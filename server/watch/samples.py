"""Parsing of a page in the Prometheus text format into numbers by name and labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from prometheus_client.parser import text_string_to_metric_families

from tonnage.server.watch.client import WatchError

Labels = Mapping[str, str]

# Only samples with these prefixes are parsed, because a page can have thousands of other lines.
_PREFIXES = ("vllm:", "lmcache:", "sglang:", "llamacpp:", "tonnage_", "process_start_time_seconds")


class Samples:
    """The samples of one metrics page. A value that is negative or not finite counts as absent.

    Raises:
        WatchError: the page is not in the Prometheus text format.
    """

    def __init__(self, page: str) -> None:
        self._found: dict[str, list[tuple[Labels, float]]] = {}
        kept = [line for line in page.splitlines() if line.startswith(_PREFIXES) and "_bucket{" not in line]
        try:
            for family in text_string_to_metric_families("\n".join(kept) + "\n"):
                for sample in family.samples:
                    if math.isfinite(sample.value) and sample.value >= 0:
                        self._found.setdefault(sample.name, []).append((sample.labels, sample.value))
        except (ValueError, KeyError, IndexError) as error:
            raise WatchError(f"/metrics is not in Prometheus' text format: {error}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def has_prefix(self, prefix: str) -> bool:
        """Return whether the metrics page has a sample whose name begins with `prefix`."""
        return any(name.startswith(prefix) for name in self._found)

    def of(self, name: str) -> list[tuple[Labels, float]]:
        """Return labels and value of each series whose sample name is `name`."""
        return self._found.get(name, [])

    def total(self, *names: str) -> float | None:
        """Return the sum over all series of one metric, or None when the page does not have it.

        The metric is the first of `names` that the page has, since releases of a server use different names.
        """
        found = self.first(names)
        return None if found is None else sum(value for _, value in self.of(found))

    def count(self, *names: str) -> int | None:
        """Return the sum over all series of one metric, rounded to an integer, or None when it is absent.

        The metric is the first of `names` that the page has.
        """
        value = self.total(*names)
        return None if value is None else round(value)

    def first(self, names: Iterable[str]) -> str | None:
        """Return the first of the sample names `names` that occurs on the metrics page, or None."""
        return next((name for name in names if name in self._found), None)

    def where(self, **labels: str) -> Samples:
        """Return the samples in which each of the given labels has the given value or is absent."""
        part = object.__new__(Samples)
        part._found = {}
        for name, series in self._found.items():
            kept = [
                (own, value)
                for own, value in series
                if all(own.get(label, wanted) == wanted for label, wanted in labels.items())
            ]
            if kept:
                part._found[name] = kept
        return part

    def by(self, label: str, name: str) -> list[Samples]:
        """Return one part of the metrics page for each value of `label` in the series of `name`.

        The parts are in the order of these values; numbers are compared as numbers. If no series of `name` has
        the label, the whole page is the only part.
        """
        values = sorted({labels[label] for labels, _ in self.of(name) if label in labels}, key=_natural)
        return [self.where(**{label: value}) for value in values] or [self]


def _natural(text: str) -> tuple[int, str]:
    return (int(text) if text.isdecimal() else -1, text)
