"""What a GPU costs an hour: public price lists (prices.json), each line with the list it is from and the day it
was read.

Lists rent some GPUs in whole nodes only: what a deployment costs there is that of the nodes. A fixed price goes
before the least one of a marketplace, which may be gone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import isfinite
from pathlib import Path

from tonnage.planner.errors import DeploymentError
from tonnage.planner.units import ceil_div

FIELD = "--price"
GIVEN = "--price"  # the provider of a price that the user gave


@dataclass(frozen=True, slots=True)
class Price:
    """A line of a list. ``usd``: of one GPU for an hour; ``together``: rented in multiples of so many;
    ``read``: the day, as 2026-11-23."""

    usd: float
    provider: str
    terms: str = ""
    read: str = ""
    url: str = ""
    together: int = 1
    marketplace: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """What ``gpus`` GPUs cost an hour; ``source``: on which list, of which day."""

    usd: float
    source: str


@cache
def price_lists() -> Mapping[str, tuple[Price, ...]]:
    """Every price by the GPU's name in the catalogue."""
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
    """The lowest price of so many GPUs of that name; None where no list has one. ``given``: USD an hour by
    name, which go before all lists."""
    if given and gpu in given:
        return Cost(given[gpu] * gpus, GIVEN)

    def usd(line: Price) -> float:
        return line.usd * line.together * ceil_div(gpus, line.together)

    lines = price_lists().get(gpu, ())
    best = min(lines, key=lambda line: (line.marketplace, usd(line)), default=None)
    if best is None:
        return None
    whole = f", {best.together} GPUs together" if gpus % best.together else ""
    return Cost(usd(best), f"{best.provider}, {best.terms}{whole}, {best.read}")


def read_prices(texts: Iterable[str]) -> dict[str, float]:
    """``h100-80g=2.10`` -> USD for an hour of one GPU, by its name in the catalogue. Raises DeploymentError."""
    from tonnage.planner.devices.catalogue import find_gpu

    found = {}
    for text in texts:
        name, _, figure = text.partition("=")
        try:
            usd = float(figure)
        except ValueError:
            usd = -1.0
        if not isfinite(usd) or usd <= 0:
            raise DeploymentError(
                f"{text[:60]!r} is no price", field=FIELD, hint="GPU=USD an hour, for example h100-80g=2.10"
            )
        found[find_gpu(name, FIELD).name] = usd
    return found
