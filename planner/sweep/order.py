"""Sort orders of a table of plans, for --sort and --target-concurrency."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tonnage.planner.errors import DeploymentError, did_you_mean
from tonnage.planner.sweep.rows import SweepRow

_LAST = float("inf")
# Value of --sort -> sort key of a sweep row; rows with a lower key come first
SORTS: dict[str, Callable[[SweepRow], float]] = {
    "price-per-sequence": lambda row: _LAST if row.usd_per_sequence is None else row.usd_per_sequence,
    "price": lambda row: _LAST if row.usd_per_hour is None else row.usd_per_hour,
    "sequences": lambda row: -row.sequences,
    "tokens": lambda row: -row.tokens,
    "pool": lambda row: -row.kv_pool_bytes,
    "weights": lambda row: row.weights_bytes,
    "gpus": lambda row: row.gpus,
}


def check_sort(by: str) -> None:
    """Raise DeploymentError unless `by` is a valid value of --sort."""
    if by not in SORTS:
        why = f"{by[:40]!r} is not one of {', '.join(SORTS)}"
        raise DeploymentError(why, field="--sort", hint=did_you_mean(by, SORTS))


def ordered(rows: Sequence[SweepRow], by: str | None) -> list[SweepRow]:
    """Sort the rows of a sweep by a --sort key: first rows that fit, then rows that do not, then rejected rows.

    Without a key the order is unchanged.
    """

    def key(row: SweepRow) -> tuple[int, float, float]:
        figure = SORTS[by](row) if by and row.fits else 0.0
        return 0 if row.fits else 1 if not row.refused else 2, figure, -row.sequences if by else 0.0

    return sorted(rows, key=key) if by else list(rows)


def cheapest(rows: Iterable[SweepRow], concurrency: int) -> list[SweepRow]:
    """Return the sweep rows that certainly run `concurrency` sequences at once, cheapest first.

    "Certainly" means that the lower bound of the KV pool's size is enough, because users buy hardware by this
    result.
    """
    return sorted(
        (row for row in rows if row.fits and row.least_sequences >= concurrency), key=lambda r: r.cost
    )
