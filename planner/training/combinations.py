"""Search for combinations of memory-saving tricks that make a training setup fit, fastest first."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations as of_size
from typing import Any

from tonnage.planner.training.build import Planner
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.speed import work_of
from tonnage.planner.training.tricks import Trick, tried_with

MOST_TRIED = 400  # A plan takes 1 to 2 ms. 400 plans cover all pairs of 20 tricks and the best triples.
_MOST_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Combinations:
    """Combinations of memory-saving tricks that fit into the GPU's memory.

    Attributes:
        rows: the combinations that fit, fastest first.
        smallest: the fastest single trick with which the setup fits. If no single trick suffices, the fastest
            combination in `rows`; None if there is none.
        tried: number of combinations planned.
        complete: whether the last search (of pairs, triples or quadruples) planned all of its combinations.
    """

    rows: tuple[Trick, ...]
    smallest: Trick | None
    tried: int
    complete: bool


def combinations(
    planner: Planner, setup: TrainingSetup, singles: tuple[Trick, ...], most: int = MOST_TRIED
) -> Combinations:
    """Return the combinations of memory-saving tricks with which the setup fits, fastest first.

    Only tricks in `singles` that do not suffice alone are combined. Pairs are planned first. Triples and
    quadruples follow only if no single trick and no smaller combination fits. Combinations with the largest
    summed saving come first, and at most `most` are planned. Combinations that set one flag twice are skipped.
    """
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
    """Return the sort key of a memory-saving trick: first its relative step time, then its GPU bytes."""
    return round(trick.relative_time, 3), trick.gpu_bytes


def _together(chosen: tuple[Trick, ...]) -> dict[str, Any] | None:
    """Return the flag changes of all chosen memory-saving tricks, None if two tricks set the same flag."""
    changes: dict[str, Any] = {}
    for trick in chosen:
        if any(field in changes for field, _ in trick.changes):
            return None
        changes.update(trick.changes)
    return changes
