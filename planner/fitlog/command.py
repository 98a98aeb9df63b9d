"""The command `tonnage fit-log`, which compares start-up logs with plans and fits correction factors."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tonnage.planner.arguments import Parser, refused
from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import TonnageError
from tonnage.planner.fitlog.calibrate import keep
from tonnage.planner.fitlog.compare import FITTED, compare
from tonnage.planner.fitlog.comparison import OF_LOGGED_POOL, Comparison, Row, word
from tonnage.planner.fitlog.log_flags import ASKED
from tonnage.planner.fitlog.read import read_log
from tonnage.planner.flags import add_flags
from tonnage.planner.headers.hub import add_token_flag
from tonnage.planner.screen import Screen, aligned
from tonnage.planner.units import gib

_LEAST_LOGS = 3  # leave-one-out validation needs at least two other logs


def parser() -> Parser:
    """Return the argument parser of the command `tonnage fit-log`."""
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
    except SystemExit as stop:  # argparse exits after --help.
        return int(stop.code or 0)
    except TonnageError as error:
        return refused(error)
    refit = refit_terms(compared)
    if args.json:
        out: dict[str, Any] = {"logs": [_as_dict(c) for c in compared], "refit": refit}
        if kept is not None:
            out["calibration"] = {"file": args.calibrate, "starts": kept}
        print(json.dumps(out, indent=2))
        return 0
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
    return 0


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


def _print(comparison: Comparison) -> None:
    screen = Screen(sys.stdout)
    screen.print(f"{comparison.name}: {comparison.headline}")
    _print_rows(comparison.shown)
    if comparison.failure is not None:
        screen.print(f"The start failed: {comparison.failure}")
    screen.print(f"Verdict: {comparison.verdict}.")
    for words, said in (("Not in the log", comparison.missing), ("Assumed", comparison.assumed)):
        if said:
            screen.print(f"{words}: {', '.join(map(word, said))}.")
    for note in comparison.notes:
        screen.print(f"Note: {note}")


def _print_rows(shown: Sequence[Row]) -> None:
    """Print a table that compares the memory terms of a start-up log with the plan.

    The figures that were computed from the bytes of the KV pool in the log, not from the planned pool, are the
    last lines of the table, below a title.
    """
    if not shown:
        return
    several = len({row.rank for row in shown}) > 1
    titles = ["", *(["rank"] if several else []), "planned", "interval", "logged", "differs", "plan"]
    lines: list[list[str]] = [titles]
    for row in shown:
        share = f"{100 * (row.planned - row.logged) / row.logged:+.2f}%" if row.logged else ""
        between = "exact" if row.exact else f"{_shown(row, row.low)} to {_shown(row, row.high)}"
        lines.append([
            word(row.term.removesuffix(OF_LOGGED_POOL)), *([row.rank] if several else []),
            _shown(row, row.planned), between, _shown(row, row.logged), share,
            row.verdict.removeprefix("planned "),
        ])  # fmt: skip
    table = aligned(lines, [place for place, title in enumerate(titles) if title not in ("", "rank", "plan")])
    own = next((place for place, row in enumerate(shown, 1) if row.term.endswith(OF_LOGGED_POOL)), None)
    for place, line in enumerate(table):
        if place == own:
            print("Computed from the pool in the log:")
        print(line)


def _shown(row: Row, value: float | None) -> str:
    if value is None:
        return ""
    if row.term.endswith("_bytes"):
        return gib(int(value))
    return f"{value:,.2f}" if row.term.startswith("max_concurrency") else f"{value:,.0f}"
