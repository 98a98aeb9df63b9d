"""Several tricks at once: which fit together, ranked, and which of them changes least."""

from __future__ import annotations

from itertools import combinations as of_size
from typing import Any

from tonnage.planner.records import dataclass
from tonnage.planner.training.build import Planner
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.speed import work_of
from tonnage.planner.training.tricks import Trick, tried_with

MOST_TRIED = 400  # plans, each a millisecond or two: all pairs of 20 tricks, and the most promising threes
_MOST_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Combinations:
    """``rows``: combinations that fit though none of their parts does, the quickest first. ``smallest``: the
    fewest tricks that fit, among these and single ones, of several the quickest. ``complete``: all of that
    number were tried."""

    rows: tuple[Trick, ...]
    smallest: Trick | None
    tried: int
    complete: bool


def combinations(
    planner: Planner, setup: TrainingSetup, singles: tuple[Trick, ...], most: int = MOST_TRIED
) -> Combinations:
    """Of the tricks ``singles`` (``tricks.tricks``) those that save memory, but not enough alone: by twos,
    and, where neither one trick nor two are enough, by threes and fours, what saves most first. At most
    ``most`` are planned; sets that say two values of a flag are none."""
    base = planner.plan(setup)
    alone = [t for t in singles if t.changes and t.fits and not t.name.startswith("together: ")]
    parts = [t for t in singles if t.changes and not t.fits and t.saved > 0]
    found: list[Trick] = []
    tried, complete, reference = 0, True, work_of(planner, base).seconds
    for count in range(2, _MOST_AT_ONCE + 1) if base.fits is False else ():
        sets = [
            (chosen, changes) for chosen in of_size(parts, count) if (changes := _together(chosen)) is not None
        ]
        sets.sort(key=lambda pair: -sum(t.saved for t in pair[0]))
        complete = len(sets) <= most - tried
        for chosen, changes in sets[: most - tried]:
            row = tried_with(planner, setup, base, reference, " + ".join(t.name for t in chosen), changes, "")
            if row is not None and row.fits:
                found.append(row)
        tried += min(len(sets), most - tried)
        if alone or found or not complete:
            break
    found.sort(key=_quickest)
    smallest = min(alone, key=_quickest) if alone else found[0] if found else None
    return Combinations(tuple(found), smallest, tried, complete)


def _quickest(trick: Trick) -> tuple[float, int]:
    return round(trick.relative_time, 3), trick.gpu_bytes


def _together(chosen: tuple[Trick, ...]) -> dict[str, Any] | None:
    """Changes of all; None where two say the same flag."""
    changes: dict[str, Any] = {}
    for trick in chosen:
        if any(field in changes for field, _ in trick.changes):
            return None
        changes.update(trick.changes)
    return changes
