"""The command `tonnage fit-log`, which compares start-up logs with their plans and fits memory terms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tonnage.planner.arguments import Parser, refused
from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import TonnageError
from tonnage.planner.fitlog.calibrate import keep
from tonnage.planner.fitlog.compare import ASKED, FITTED, Comparison, Row, compare
from tonnage.planner.fitlog.read import read_log
from tonnage.planner.flags import add_flags
from tonnage.planner.headers.hub import add_token_flag
from tonnage.planner.units import gib

OK = 0
_LEAST_LOGS = 3  # Leave-one-out needs at least two other logs.


def parser() -> Parser:
    """Return the parser of `tonnage fit-log`."""
    p = Parser(
        "tonnage fit-log",
        "Compare an engine's start-up log with the plan, term by term; with several logs, fit the terms.",
        """
exit codes: 0 compared, 2 bad input.

examples:
  tonnage fit-log vllm.log --model ./Llama-3.1-8B --gpu h100-80g
  tonnage fit-log logs/*.log --calibrate h100.json
""",
    )
    p.add_argument("logs", nargs="+", metavar="FILE", help="start-up log of vLLM, SGLang or llama.cpp")
    p.add_argument("--model", help="folder with config.json or hub id (default: the model the log names)")
    add_token_flag(p)
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument(
        "--calibrate", metavar="FILE",
        help="add the logs' measurements of this GPU and version to FILE, for tonnage plan --calibration FILE",
    )  # fmt: skip
    add_flags(p.add_argument_group("values that the log does not contain"), Deployment, ASKED)
    return p


def run(argv: list[str]) -> int:
    """Run `tonnage fit-log` and return its exit code: 0 if logs were compared, 2 for bad input."""
    try:
        args = parser().parse_args(argv)
        compared = [compare(read_log(Path(name)), name, args) for name in args.logs]
        kept = None if args.calibrate is None else keep(Path(args.calibrate), compared)
    except SystemExit as stop:  # --help was printed.
        return int(stop.code or 0)
    except TonnageError as error:
        return refused(error)
    refit = refit_terms(compared)
    if args.json:
        out: dict[str, Any] = {"logs": [_as_dict(c) for c in compared], "refit": refit}
        if kept is not None:
            out["calibration"] = {"file": args.calibrate, "starts": kept}
        print(json.dumps(out, indent=2))
        return OK
    for comparison in compared:
        _print(comparison)
    if refit:
        print(f"Refitted to {len(compared)} logs, each left out once (factor on the planned term):")
        for name, (factor, before, after) in refit.items():
            print(f"  {name:<18} x {factor:.3f}   median error {100 * before:.1f} % -> {100 * after:.1f} %")
    elif len(compared) > 1:
        print(f"No refit: {_LEAST_LOGS} logs with the same term are needed.")
    if kept is not None:
        print(f"{args.calibrate}: {kept} start{'s' if kept > 1 else ''}; tonnage plan --calibration reads it")
    return OK


def refit_terms(compared: Sequence[Comparison]) -> dict[str, tuple[float, float, float]]:
    """Fit a correction factor to each memory term over all logs.

    Returns term -> (fitted factor, median error of the plan, median leave-one-out error). Errors are relative
    to the logged value. Terms with fewer than three logged values are left out.
    """
    out = {}
    for name in FITTED:
        rows = [row for c in compared for row in c.rows if row.term == name]
        pairs = [(row.planned, row.logged) for row in rows if row.planned > 0 and row.logged > 0]
        if len(pairs) < _LEAST_LOGS:
            continue
        before = median(abs(p - v) / v for p, v in pairs)
        after = []
        for i, (planned, logged) in enumerate(pairs):
            factor = median(v / p for j, (p, v) in enumerate(pairs) if j != i)
            after.append(abs(planned * factor - logged) / logged)
        out[name] = (median(v / p for p, v in pairs), before, median(after))
    return out


def _as_dict(comparison: Comparison) -> dict[str, Any]:
    ranks: dict[str, dict[str, Any]] = {}
    for row in comparison.ranks:
        ranks.setdefault(row.rank, {})[row.term] = _term(row)
    return {
        "log": comparison.name,
        "model": comparison.model,
        "verdict": comparison.verdict,
        "terms": {row.term: _term(row) for row in comparison.rows},
        "ranks": ranks,
        "failure": comparison.failure,
        "not_in_the_log": list(comparison.missing),
        "assumed": list(comparison.assumed),
        "notes": list(comparison.notes),
    }


def _term(row: Row) -> dict[str, Any]:
    return {
        "planned": row.planned,
        "logged": row.logged,
        "interval": None if row.exact else [row.low, row.high],
        "verdict": row.verdict,
    }


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


def _print(comparison: Comparison) -> None:
    print(f"{comparison.name}: {comparison.headline}")
    several = len({row.rank for row in comparison.ranks}) > 1
    rows: Sequence[Row] = comparison.rows
    if several:  # Ranks with the same figures share a line.
        by_rank = {row.term for row in comparison.ranks}
        rows = [*_merged(comparison.ranks), *(row for row in rows if row.term not in by_rank)]
    width = max((28, *(len(_word(row.term)) for row in rows)))
    if rows:
        rank = f"{'rank':<10}" if several else ""
        print(f"  {'':<{width}}{rank}{'planned':>14}{'interval':>28}{'logged':>14}{'difference':>12}  verdict")
    for row in rows:
        share = f"{100 * (row.planned - row.logged) / row.logged:+.2f} %" if row.logged else ""
        between = "exact" if row.exact else f"{_shown(row, row.low)} to {_shown(row, row.high)}"
        rank = f"{row.rank:<10}" if several else ""
        print(
            f"  {_word(row.term):<{width}}{rank}{_shown(row, row.planned):>14}{between:>28}"
            f"{_shown(row, row.logged):>14}{share:>12}  {row.verdict}"
        )
    if comparison.failure is not None:
        print(f"  The start failed: {comparison.failure}")
    print(f"  Verdict: {comparison.verdict}.")
    for words, said in (("Not in the log", comparison.missing), ("Assumed", comparison.assumed)):
        if said:
            print(f"  {words}: {', '.join(map(_word, said))}.")
    for note in comparison.notes:
        print(f"  Note: {note}")


def _word(term: str) -> str:
    """Return the readable name of a memory term, such as `tokens of the logged pool`.

    The term of that example is `tokens_of_logged_pool`. Of alternative names (`a|b`) the first is used.
    """
    name, space, how = term.partition(" (")
    name = name.partition("|")[0]
    plain = name.removesuffix("_of_logged_pool")
    word = _WORDS.get(plain, plain)
    return word + (" of the logged pool" if plain != name else "") + space + how


def _merged(rows: Sequence[Row]) -> list[Row]:
    """Return the compared terms grouped by term, with one row for all ranks that have the same figures."""
    out: dict[tuple[object, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: list(dict.fromkeys(r.term for r in rows)).index(row.term)):
        out.setdefault((row.term, row.planned, row.logged), []).append(row)
    return [
        Row(r.term, r.planned, r.logged, r.low, r.high, r.rounding,
            f"{same[0].rank}-{same[-1].rank}" if len(same) > 1 else r.rank)
        for same in out.values()
        for r in same[:1]
    ]  # fmt: skip


def _shown(row: Row, value: float | None) -> str:
    if value is None:
        return ""
    if row.term.endswith("_bytes"):
        return gib(int(value))
    return f"{value:,.2f}" if row.term.startswith("max_concurrency") else f"{value:,.0f}"
