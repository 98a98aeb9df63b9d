"""Choice of the layouts that hold a number of requests (`--target-concurrency`), without near duplicates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from tonnage.planner.devices.catalogue import find_gpu
from tonnage.planner.devices.prices import cost_of
from tonnage.planner.sweep.layouts import NODE
from tonnage.planner.sweep.rows import SweepRow
from tonnage.planner.sweep.speed import Speed, Work, speed_of
from tonnage.planner.units import ceil_div

FOLD = 0.05
"""A layout is left out if it has more GPUs than a listed one and is better by at most this fraction.

The fraction applies to both price and speed.
"""


@dataclass(frozen=True, slots=True)
class Offer:
    """A layout of GPUs, in one or more replicas, that certainly holds the requested number of sequences.

    Attributes:
        row: the sweep row with the plan of one replica.
        replicas: number of replicas.
        running: sequences that each replica runs at once.
        usd_per_hour: hourly price of all GPUs, or None if no list has one.
        speed: rough speed of one replica, or None if the GPU's peak figures are not known.
    """

    row: SweepRow
    replicas: int
    running: int
    usd_per_hour: float | None
    speed: Speed | None

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of all replicas of the offer together."""
        return self.row.gpus * self.replicas

    @property
    def tokens_per_second(self) -> float | None:
        """Return the rough output tokens per second of all replicas together, or None if it is not known."""
        return None if self.speed is None else self.speed.tokens_per_second * self.replicas

    @property
    def changes(self) -> int:
        """Return how many of the formats (quantization, KV cache dtype) differ from the checkpoint's own."""
        return (self.row.quantization != "as is") + (self.row.kv_cache_dtype != "auto")

    @property
    def figures(self) -> tuple[float, float, float, float]:
        """Return the offer's (number of GPUs, price, seconds per token, changed formats); smaller is better."""
        price = inf if self.usd_per_hour is None else self.usd_per_hour
        return self.gpus, price, inf if self.speed is None else self.speed.step_seconds, self.changes


def offers(
    rows: Iterable[SweepRow], wanted: int, work: Work, stored: str, length: tuple[int, int] | None,
    prices: dict[str, float],
) -> list[Offer]:  # fmt: skip
    """Return one offer (layout and number of replicas) for each sweep row that fits, smallest first.

    The replicas together run `wanted` sequences at once.

    Args:
        rows: the rows of a sweep.
        stored: the quantization scheme of the checkpoint.
        wanted: sequences that have to run at once.
        work: the model's parameters.
        length: (prompt, output) tokens of each request. None stands for sequences of max_model_len; the speed
            then does not include prefill.
        prices: USD per hour of one GPU by its name; these prices replace the public lists.
    """
    found = []
    for row in rows:
        certain = int(row.least_sequences)
        if not row.fits or certain < 1:
            continue
        replicas = ceil_div(wanted, certain)
        running, gpu = ceil_div(wanted, replicas), find_gpu(row.gpu)
        prompt, output = length or (0, 1)
        speed = speed_of(
            work, gpu, scheme=stored if row.quantization == "as is" else row.quantization,
            weights_bytes=row.weights_bytes, read_bytes=row.read_bytes, tensor=row.tensor, stages=row.stages,
            running=running, prompt=prompt, output=output,
        )  # fmt: skip
        cost = cost_of(row.gpu, row.gpus * replicas, prices)
        found.append(Offer(row, replicas, running, None if cost is None else cost.usd, speed))
    found.sort(key=_order)
    smallest = found[0].gpus if found else 0
    most = NODE if smallest <= NODE else 2 * smallest
    return [offer for offer in found if offer.gpus <= most]


def _order(offer: Offer) -> tuple[float | str, ...]:
    """Return an offer's sort key: GPUs, price, stages, changed formats, seconds per token, replicas and GPU."""
    gpus, price, seconds, changes = offer.figures
    return gpus, price, offer.row.stages, changes, seconds, offer.replicas, offer.row.gpu


def pareto(found: Sequence[Offer]) -> list[Offer]:
    """Return the offers of the Pareto front of GPUs, price, speed and changed formats.

    An offer is left out if an offer that is already in the list needs at most as many GPUs and changed formats,
    and if the price and the seconds per token of the listed offer are at most `FOLD` (5 %) higher.

    Args:
        found: the offers, smallest first.
    """
    kept: list[Offer] = []
    for offer in found:
        gpus, price, seconds, changes = offer.figures
        beaten = (
            other.figures[0] <= gpus
            and other.figures[1] <= price * (1 + FOLD)
            and other.figures[2] <= seconds * (1 + FOLD)
            and other.figures[3] <= changes
            for other in kept
        )
        if not any(beaten):
            kept.append(offer)
    return kept


def gpus_needed(found: Sequence[Offer]) -> list[tuple[int, list[str]]]:
    """Return (smallest number of GPUs, GPU types that need this number), sorted by the number."""
    least: dict[str, int] = {}
    for offer in found:
        least[offer.row.gpu] = min(offer.gpus, least.get(offer.row.gpu, offer.gpus))
    counts: dict[int, list[str]] = {}
    for name, count in least.items():
        counts.setdefault(count, []).append(name)
    return sorted(counts.items())
