"""Hourly prices of GPUs from public price lists (prices.json), with the day each list was read.

Some providers rent GPUs only in whole nodes; a deployment then costs as much as all nodes it needs. A fixed
price is preferred to the lowest offer of a marketplace, because the offer may no longer be available.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import isfinite
from pathlib import Path

from tonnage.planner.devices.catalogue import find_gpu
from tonnage.planner.errors import DeploymentError
from tonnage.planner.units import ceil_div

FIELD = "--price"


@dataclass(frozen=True, slots=True)
class Price:
    """The hourly price of a GPU in one provider's public price list.

    Attributes:
        usd: USD per hour for one GPU.
        read: the day on which the price list was read, for example 2026-11-23.
        together: number of GPUs that can be rented only together, such as the GPUs of a node.
        marketplace: whether the provider is a marketplace, whose offers change.
    """

    usd: float
    provider: str
    terms: str = ""
    read: str = ""
    url: str = ""
    together: int = 1
    marketplace: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """The hourly price of several GPUs in USD, with its price list and the day the list was read."""

    usd: float
    source: str


@cache
def price_lists() -> Mapping[str, tuple[Price, ...]]:
    """Return a dict: GPU name in the catalogue -> the GPU's hourly prices in all public price lists."""
    found: dict[str, list[Price]] = {}
    for entry in json.loads((Path(__file__).parent / "prices.json").read_text())["lists"]:
        for line in entry["lines"]:
            found.setdefault(line["gpu"], []).append(
                Price(
                    line["usd"], entry["provider"], entry["terms"], line["read"], entry["url"],
                    line.get("together", 1), entry.get("marketplace", False),
                )
            )  # fmt: skip
    return {gpu: tuple(lines) for gpu, lines in found.items()}


def cost_of(gpu: str, gpus: int, given: Mapping[str, float] | None = None) -> Cost | None:
    """Return the lowest hourly price of `gpus` GPUs of one kind, or None if no list has a price.

    Args:
        gpu: the GPU's name in the catalogue.
        gpus: number of GPUs.
        given: GPU name -> USD per hour of one GPU; these prices replace the price lists.
    """
    if given and gpu in given:
        return Cost(given[gpu] * gpus, FIELD)

    def usd(line: Price) -> float:
        return line.usd * line.together * ceil_div(gpus, line.together)

    lines = price_lists().get(gpu, ())
    best = min(lines, key=lambda line: (line.marketplace, usd(line)), default=None)
    if best is None:
        return None
    whole = f", {best.together} GPUs together" if gpus % best.together else ""
    return Cost(usd(best), f"{best.provider}, {best.terms}{whole}, {best.read}")


def read_prices(texts: Iterable[str]) -> dict[str, float]:
    """Parse hourly prices such as `h100-80g=2.10`; return a dict: GPU name in the catalogue -> USD per hour.

    Raises:
        DeploymentError: a text is not a price, or its GPU is unknown.
    """
    found = {}
    for text in texts:
        name, _, figure = text.partition("=")
        try:
            usd = float(figure)
        except ValueError:
            usd = -1.0
        if not isfinite(usd) or usd <= 0:
            raise DeploymentError(
                f"{text[:60]!r} is not a price", field=FIELD, hint="GPU=USD an hour, for example h100-80g=2.10"
            )
        found[find_gpu(name, FIELD).name] = usd
    return found
