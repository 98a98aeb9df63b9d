"""Result types of `tonnage fit-log`: comparison of a start-up log with its plan, for each memory term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tonnage.planner.deployment import Deployment

# Maximum relative difference between logged weights and weights computed from the model's files alone (0.1 % in
# tests/data/field_reports.jsonl).
_EXACT = 0.001


@dataclass(frozen=True, slots=True)
class Row:
    """One memory term (such as weights or activations) in a start-up log, compared with its planned value.

    Attributes:
        planned: the planned value, expected between `low` and `high`.
        logged: the value in the log, which is within `rounding` of the true value.
        rank: name of the rank in the log, or empty for the whole engine.
    """

    term: str
    planned: float
    logged: float
    low: float | None = None
    high: float | None = None
    rounding: float = 0.0
    rank: str = ""

    @property
    def exact(self) -> bool:
        """Return whether the planned value of this memory term is exact, without an interval."""
        return self.low is None or self.high is None or self.low == self.high

    @property
    def agrees(self) -> bool:
        """Return whether the term's logged value, within its rounding, lies in the planned interval."""
        low = self.planned if self.low is None else self.low
        high = self.planned if self.high is None else self.high
        rounding = self.rounding + (_EXACT * abs(self.logged) if self.term == "weights_bytes" else 0.0)
        return low - rounding <= self.logged <= high + rounding

    @property
    def verdict(self) -> str:
        """Return the result for this memory term as text: `agrees`, `planned too high` or `planned too low`."""
        if self.agrees:
            return "agrees"
        return "planned too high" if self.planned > self.logged else "planned too low"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of one engine's start-up log with its plan, for each memory term.

    Attributes:
        rows: compared memory terms of the rank with the smallest KV pool, and of the engine as a whole.
        ranks: compared memory terms of every rank.
        missing: names of the memory terms that the log does not contain.
        assumed: flags that neither log nor user gave, with the assumed values.
        digest: hash of the log's text.
    """

    name: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    ranks: tuple[Row, ...] = ()
    missing: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    failure: str | None = None
    headline: str = ""
    flags: Deployment | None = None
    model: str = ""
    shape: tuple[object, ...] = ()
    digest: str = ""

    @property
    def shown(self) -> tuple[Row, ...]:
        """Return the comparisons of memory terms to print; ranks with equal figures share one row."""
        if len({row.rank for row in self.ranks}) < 2:
            return self.rows
        by_rank = {row.term for row in self.ranks}
        return (*_merged(self.ranks), *(row for row in self.rows if row.term not in by_rank))

    @property
    def verdict(self) -> str:
        """Return a sentence on how well the plan agrees with the start-up log."""
        start = "the start failed; " if self.failure else ""
        if not self.rows:
            return f"{start}nothing to compare"
        shown = self.shown
        wrong = [row for row in shown if not row.agrees]
        count = f"{len(shown) - len(wrong)} of {len(shown)} terms agree"
        pool = next((row for row in self.rows if row.term == "kv_pool_bytes"), None)
        said = f"; the KV pool was planned {_deviation(pool)}" if pool is not None and pool.logged else ""
        if not wrong:
            return f"{start or 'the plan holds: '}{count}{said}"
        worst = max(wrong, key=lambda row: abs(row.planned - row.logged) / max(abs(row.logged), 1.0))
        name = word(worst.term) + (f" of {worst.rank}" if worst.rank else "")
        holds = "the plan does not hold: "
        if all(row.agrees for row in self.rows):
            holds = "the plan holds for the rank with the smallest pool, not for others: "
        return f"{start or holds}{count}; worst: {name}, {_deviation(worst)}{said}"


def _deviation(row: Row) -> str:
    if not row.logged:
        return "where the log has none"
    share = 100 * (row.planned - row.logged) / abs(row.logged)
    return (
        f"{abs(share):.2f} % too {'high' if share > 0 else 'low'}" if row.planned != row.logged else "exactly"
    )


_WORDS = {
    "weights_bytes": "weights",
    "activation_bytes": "activations",
    "non_torch_bytes": "non-torch",
    "cuda_graph_bytes": "CUDA graphs",
    "graph_estimate_bytes": "CUDA graphs",
    "kv_pool_bytes": "KV pool",
    "num_blocks": "blocks",
    "max_concurrency": "concurrency",
    "device_bytes": "memory of the device",
    "context_tokens": "n_ctx",
}
OF_LOGGED_POOL = "_of_logged_pool"
"""End of the names of terms that are computed from the log's pool instead of the plan's."""


def word(term: str) -> str:
    """Return the readable name of a memory term: `tokens of the logged pool` for `tokens_of_logged_pool`.

    If `term` has alternative names, separated by `|`, the first is used.
    """
    name, space, how = term.partition(" (")
    name = name.partition("|")[0]
    plain = name.removesuffix(OF_LOGGED_POOL)
    return _WORDS.get(plain, plain) + (" of the logged pool" if plain != name else "") + space + how


def _merged(rows: Sequence[Row]) -> list[Row]:
    """Return `rows`, in which ranks with the same planned and logged value of a memory term share one row."""
    terms = [row.term for row in rows]
    out: dict[tuple[object, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: terms.index(row.term)):
        out.setdefault((row.term, row.planned, row.logged), []).append(row)
    return [
        replace(same[0], rank=f"{same[0].rank}-{same[-1].rank}") if len(same) > 1 else same[0]
        for same in out.values()
    ]
