"""Tables of plans in `tonnage plan`, for several models or flag values and for `--sweep`.

The module also has functions that target.py (`--target-concurrency`) uses.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import catalogue, find_gpu
from tonnage.planner.devices.prices import read_prices
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.engines.support import on_device
from tonnage.planner.errors import DeploymentError, TonnageError, escaped
from tonnage.planner.flags import flags_of
from tonnage.planner.headers.gguf_types import file_type
from tonnage.planner.output.tables import Table, print_table
from tonnage.planner.planning.calibration import read_calibration
from tonnage.planner.planning.deployment import version_of
from tonnage.planner.planning.files import with_file_type
from tonnage.planner.planning.requests import parse_request
from tonnage.planner.screen import Screen, busy
from tonnage.planner.source.resolve import ModelSource, resolve_model
from tonnage.planner.sweep.choices import Choices, grids
from tonnage.planner.sweep.grid import Grid, default_grid, sweep
from tonnage.planner.sweep.order import check_sort, ordered
from tonnage.planner.sweep.page import write_sweep_page
from tonnage.planner.sweep.rows import SweepRow
from tonnage.planner.sweep.table import length_lines, price_lines, print_rows
from tonnage.planner.units import parse_count

_TOP = 20  # maximum number of rows printed as text without --top
_REASONS = 3  # maximum number of reasons printed for combinations left out


def run_sweep(choices: Choices, deployment: Deployment, args: argparse.Namespace) -> int:
    """Print a table of plans and return the exit code.

    Args:
        choices: the models and values to combine.
        deployment: the flags that are the same in every plan.
        args: the parsed options.

    Raises:
        TonnageError: the flags are invalid, or the only model is not supported.
    """
    many = args.sweep
    here = not many and not choices.gpus
    deployment = common_flags(choices, deployment, args.engine is not None or here)
    prices = read_prices(args.price or ())
    top = None if args.top is None else parse_count(args.top, "--top")
    if args.sort is not None:
        check_sort(args.sort)
    lengths = [parse_request(text) for text in args.request or ()]
    kinds = [kind for name in choices.quantizations if (kind := file_type(name)) is not None]
    formats = tuple(name for name in choices.quantizations if file_type(name) is None)
    choices = replace(choices, quantizations=formats)
    if kinds:
        deployment = replace(deployment, quantization=None)
    combined = varied(choices, deployment) if many else grids(choices, deployment, [find_gpu("cpu")], None)
    rows: list[SweepRow] = []
    for name in choices.models:
        try:
            source = resolve_model(name)
            for kind in kinds:
                rows += _gguf_rows(source, deployment, combined, kind, lengths, prices)
            if formats or not kinds:
                with busy(f"{escaped(name)}: planning {sum(map(len, combined)):,} combinations ..."):
                    for grid in combined:
                        rows += sweep(source, deployment, grid, lengths, prices)
        except TonnageError as error:
            if len(choices.models) == 1:
                raise
            rows.append(SweepRow("-", 1, "-", "-", False, model=name, refused=str(error)))
    left_out = [row for row in rows if many and row.unsupported]
    rows = [row for row in rows if not many or not row.unsupported]
    found = len(rows)
    by = "price-per-sequence" if args.sort is None and many else args.sort
    rows = ordered(rows, by)[:top]
    if args.html:
        write_html(args, choices, deployment, rows, lengths, prices)
    if args.json:
        print_json(rows, left_out, {"serve": []})
    elif args.csv or args.markdown:
        print_table(row_table(rows), sys.stdout, markdown=args.markdown)
    else:
        shown = rows[:_TOP] if many and top is None else rows
        if here:
            print("For this machine's CPU, as no GPU was named; --gpu h100-80g,l40s compares these two")
        _print_all(shown, found, by, lengths, prices)
        print_left_out(left_out)
    return 0 if any(row.fits for row in rows) else 1


def _gguf_rows(
    source: ModelSource, deployment: Deployment, combined: Sequence[Grid], kind: str,
    lengths: Sequence[tuple[int, int]], prices: dict[str, float],
) -> list[SweepRow]:  # fmt: skip
    """Return the table rows for a model that is converted to the GGUF file type `kind`, such as Q4_K_M."""
    made, deployment = with_file_type(source, replace(deployment, quantization=kind))
    rows = [
        row
        for grid in combined
        for row in sweep(made, deployment, replace(grid, quantizations=("as is",)), lengths, prices)
    ]
    return [replace(row, quantization=kind, model=source.id) for row in rows]


def write_html(
    args: argparse.Namespace, choices: Choices, deployment: Deployment, rows: list[SweepRow],
    lengths: Sequence[tuple[int, int]], prices: dict[str, float],
) -> None:  # fmt: skip
    """Write the rows of a sweep as an HTML page to the file that the option --html names."""
    engine = engine_of(deployment.engine)
    flags = replace(deployment, engine_version=version_of(engine, deployment)[1])
    lines = [*length_lines(rows, lengths), *notes_of(rows), *price_lines(rows, prices)]
    write_sweep_page(args.html, ", ".join(choices.models), rows, engine.shown_name(flags), args.words, lines)


def common_flags(choices: Choices, deployment: Deployment, engine_given: bool) -> Deployment:
    """Return the flags that are the same in every row of a sweep.

    Raises:
        DeploymentError: a flag has a value that is not valid in a table of plans.
    """
    alone = (
        ("device_memory", None, "a table uses the catalogue's memory of each GPU"),
        ("pipeline_parallel_size", 1, "a table divides models by tensor parallelism alone"),
        ("data_parallel_size", 1, "a table shows one replica"),
    )
    for name, default, why in alone:
        if getattr(deployment, name) != default:
            raise DeploymentError(why, field=flags_of(Deployment)[name].option, hint="leave it out")
    named = [name for name, _ in choices.gpus]
    if not engine_given and not engine_of(deployment.engine).divides and named != ["cpu"]:
        deployment = replace(deployment, engine="vllm")
    if deployment.calibration is not None:
        # read the calibration file here, so that an invalid file is one error, not one in every row
        read_calibration(deployment.calibration)
    return deployment


def varied(choices: Choices, deployment: Deployment, *, formats: bool = True) -> list[Grid]:
    """Return the grids of flag values for --sweep: all flags that the user did not give vary.

    The grids cover all GPUs that the engine supports.

    Args:
        choices: the values that the user gave.
        deployment: the flags that are the same in every plan.
        formats: whether the quantization varies too. Another quantization needs another checkpoint.
    """
    version = version_of(engine_of(deployment.engine), deployment)[0]
    gpus = [gpu for gpu in catalogue() if on_device(deployment.engine, gpu.name, version).runs]
    whole = default_grid(deployment, gpus)
    if not formats:
        whole = replace(whole, quantizations=("as is",))
    return grids(choices, deployment, gpus, whole)


def print_json(rows: list[SweepRow], left_out: list[SweepRow], more: dict[str, Any]) -> None:
    """Print the rows of a sweep as one JSON object, to which the entries `more` are added."""
    out = {
        "rows": [{**asdict(row), "usd_per_sequence": row.usd_per_sequence} for row in rows],
        **more,
        "left_out": len(left_out),
        "left_out_because": dict(Counter(row.unsupported for row in left_out)),
    }
    print(json.dumps(out, indent=2))


def row_table(rows: list[SweepRow]) -> Table:
    """Return the rows of a sweep as a table for CSV or Markdown."""
    columns = (*(column.name for column in fields(SweepRow)), "usd_per_sequence")

    def cell(row: SweepRow, name: str) -> object:
        value = getattr(row, name)
        return ";".join(map(str, value)) if isinstance(value, tuple) else value

    return Table(columns, tuple(tuple(cell(row, name) for name in columns) for row in rows))


def _print_all(
    rows: list[SweepRow], found: int, by: str | None, lengths: Sequence[tuple[int, int]],
    prices: dict[str, float],
) -> None:  # fmt: skip
    screen = Screen(sys.stdout)
    if rows:
        if len({row.model for row in rows}) == 1:
            print(f"{escaped(rows[0].model)}:")
        print("GiB of one GPU; prices of all GPUs and of each certain sequence")
        print_rows(rows, lengths, sys.stdout)
    for why, count in Counter(row.refused or row.unsupported or row.stops for row in rows).items():
        if why:
            screen.print(f"{count:,} {'row' if count == 1 else 'rows'}: {why}")
    if len(rows) < found:
        order = "" if by is None else f" by {by}"
        print(f"... the first {len(rows):,} of {found:,}{order} (--sort, --top; --json lists all)")
    for line in (*length_lines(rows, lengths), *notes_of(rows), *price_lines(rows, prices)):
        screen.print(line)


def notes_of(rows: Sequence[SweepRow]) -> list[str]:
    """Return the notes of a sweep's rows as lines, without duplicates."""
    return [f"Note: {note}" for note in dict.fromkeys(note for row in rows for note in row.notes)]


def print_left_out(rows: list[SweepRow]) -> None:
    """Print how many combinations of a sweep the engine does not support, and the most frequent reasons."""
    if not rows:
        return
    reasons = Counter(row.unsupported for row in rows).most_common()
    print(f"Left out: {len(rows):,} combinations that the engine does not support, for example")
    for why, count in reasons[:_REASONS]:
        Screen(sys.stdout).print(f"  {count:,}: {why}")
