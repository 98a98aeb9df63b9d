"""Tables of plans in `tonnage plan`: several models or values, `--sweep` and `--target-concurrency`."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields, replace

from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import catalogue, find_gpu
from tonnage.planner.devices.prices import read_prices
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.engines.support import on_device
from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.flags import flags_of
from tonnage.planner.output.tables import Table, print_table
from tonnage.planner.planning.advice import serve_lines
from tonnage.planner.planning.build import plan_source
from tonnage.planner.planning.calibration import read_calibration
from tonnage.planner.planning.deployment import version_of
from tonnage.planner.planning.requests import parse_request
from tonnage.planner.source.resolve import ModelSource, resolve_model
from tonnage.planner.sweep.choices import Choices, grids
from tonnage.planner.sweep.grid import Grid, default_grid, sweep
from tonnage.planner.sweep.order import cheapest, check_sort, ordered
from tonnage.planner.sweep.page import write_sweep_page
from tonnage.planner.sweep.rows import SweepRow
from tonnage.planner.sweep.table import length_lines, price_lines, print_rows
from tonnage.planner.units import parse_count

_SHOWN = 12  # The number of offers printed for --target-concurrency
_TOP = 20  # The number of rows of a sweep printed as text without --top
_REASONS = 3  # The number of reasons printed for combinations left out


def run_sweep(choices: Choices, deployment: Deployment, wanted: int | None, args: argparse.Namespace) -> int:
    """Print a table of plans, or the GPU offers that hold `wanted` sequences; return the exit code.

    Args:
        choices: the models and values to combine.
        deployment: the flags that are the same in every plan.
        wanted: the sequences of --target-concurrency, or None.
        args: the parsed options.

    Raises:
        TonnageError: the flags are invalid, or the only model is not supported.
    """
    many = args.sweep or wanted is not None
    here = not many and not choices.gpus
    deployment = _common_flags(choices, deployment, wanted, args.engine is not None or here)
    prices = read_prices(args.price or ())
    top = None if args.top is None else parse_count(args.top, "--top")
    if args.sort is not None:
        check_sort(args.sort)
    lengths = [parse_request(text) for text in args.request or ()]
    combined = _grids(choices, deployment, wanted, args.sweep)
    rows: list[SweepRow] = []
    sources: list[ModelSource] = []
    for name in choices.models:
        try:
            source = resolve_model(name)
            rows += [row for grid in combined for row in sweep(source, deployment, grid, lengths, prices)]
            sources.append(source)
        except TonnageError as error:
            if len(choices.models) == 1:
                raise
            rows.append(SweepRow("-", 1, "-", "-", False, model=name, refused=str(error)))
    left_out = [row for row in rows if many and row.unsupported]
    rows = [row for row in rows if not many or not row.unsupported]
    found = len(rows)
    by = "price-per-sequence" if args.sort is None and many else args.sort
    rows = ordered(rows, by) if wanted is None else cheapest(rows, wanted)
    rows = rows[:top]
    if args.html:
        engine = engine_of(deployment.engine)
        flags = replace(deployment, engine_version=version_of(engine, deployment)[1])
        names, lines = ", ".join(choices.models), price_lines(rows, prices)
        lines = [*length_lines(rows, lengths), *_notes(rows), *lines]
        write_sweep_page(args.html, names, rows, engine.shown_name(flags), args.words, lines)
    if args.json:
        best = _command(sources[0], deployment, rows[0]) if wanted is not None and rows else []
        _print_json(rows, left_out, best)
    elif args.csv or args.markdown:
        print_table(_table(rows), sys.stdout, markdown=args.markdown)
    else:
        if wanted is not None:
            _print_offers(sources[0], deployment, rows, wanted, prices)
        else:
            shown = rows[:_TOP] if many and top is None else rows
            if here:
                print("For this machine's CPU, as no GPU was named; --gpu h100-80g,l40s compares these two")
            _print_all(shown, found, by, lengths, prices)
        _print_left_out(left_out)
    return 0 if any(row.fits for row in rows) else 1


def _common_flags(
    choices: Choices, deployment: Deployment, wanted: int | None, engine_given: bool
) -> Deployment:
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
        read_calibration(deployment.calibration)  # An invalid file raises an error here, not in each row.
    if wanted is not None and deployment.max_num_seqs is None:
        deployment = replace(deployment, max_num_seqs=wanted)
    return deployment


def _grids(choices: Choices, deployment: Deployment, wanted: int | None, every: bool) -> list[Grid]:
    """Return the grids to sweep; --sweep and --target-concurrency vary every flag that was not given."""
    if wanted is None and not every:
        return grids(choices, deployment, [find_gpu("cpu")], None)
    gpus = [gpu for gpu in catalogue() if on_device(deployment.engine, gpu.name).runs]
    whole = default_grid(deployment, gpus)
    if not every:  # Another format needs another checkpoint, so only --sweep offers it.
        whole = replace(whole, quantizations=("as is",))
    return grids(choices, deployment, gpus, whole)


def _print_json(rows: list[SweepRow], left_out: list[SweepRow], serve: list[str]) -> None:
    out = {
        "rows": [{**asdict(row), "usd_per_sequence": row.usd_per_sequence} for row in rows],
        "serve": serve,
        "left_out": len(left_out),
        "left_out_because": dict(Counter(row.unsupported for row in left_out)),
    }
    print(json.dumps(out, indent=2))


def _table(rows: list[SweepRow]) -> Table:
    columns = (*(column.name for column in fields(SweepRow)), "usd_per_sequence")

    def cell(row: SweepRow, name: str) -> object:
        value = getattr(row, name)
        return ";".join(map(str, value)) if isinstance(value, tuple) else value

    return Table(columns, tuple(tuple(cell(row, name) for name in columns) for row in rows))


def _print_all(
    rows: list[SweepRow], found: int, by: str | None, lengths: Sequence[tuple[int, int]],
    prices: dict[str, float],
) -> None:  # fmt: skip
    if rows:
        name = f"{rows[0].model}: " if len({row.model for row in rows}) == 1 else ""
        print(f"{name}weights and pool in GiB of one GPU, prices of all GPUs and of each certain sequence")
    if rows:
        print_rows(rows, lengths, sys.stdout)
    for why, count in Counter(row.refused or row.unsupported or row.stops for row in rows).items():
        if not why:
            continue
        print(f"{count:,} {'row' if count == 1 else 'rows'}: {why}")
    if len(rows) < found:
        order = "" if by is None else f" by {by}"
        print(f"... the first {len(rows):,} of {found:,}{order} (--sort, --top; --json lists all)")
    for line in (*length_lines(rows, lengths), *_notes(rows), *price_lines(rows, prices)):
        print(line)


def _notes(rows: Sequence[SweepRow]) -> list[str]:
    """Return the notes of a sweep's rows as lines, without duplicates."""
    return [f"Note: {note}" for note in dict.fromkeys(note for row in rows for note in row.notes)]


def _print_left_out(rows: list[SweepRow]) -> None:
    if not rows:
        return
    reasons = Counter(row.unsupported for row in rows).most_common()
    print(f"Left out: {len(rows):,} combinations that the engine does not support, for example")
    for why, count in reasons[:_REASONS]:
        print(f"  {count:,}: {why}")


def _print_offers(
    source: ModelSource, deployment: Deployment, rows: list[SweepRow], wanted: int, prices: dict[str, float]
) -> None:
    if not rows:
        print(f"No combination holds {wanted:,} sequences; fewer tokens (--max-model-len) or more GPUs would.")
        return
    length = rows[0].max_model_len
    print(f"{wanted:,} sequences of {length:,} tokens at once, the cheapest first:")
    print(f"{'n':>3}   {'GPU':<20}{'quantization':<13}{'KV':<9}{'sequences':>9}{'at least':>10}   price")
    for row in rows[:_SHOWN]:
        price = f"{row.usd_per_hour:.2f} USD/h" if row.usd_per_hour is not None else "no price"
        print(
            f"{row.gpus:>3} x {row.gpu:<20}{row.quantization:<13}{row.kv_cache_dtype:<9}"
            f"{row.max_concurrency:>9.1f}{row.least_concurrency:>10.1f}   {price}"
        )
    if len(rows) > _SHOWN:
        print(f"... and {len(rows) - _SHOWN} more (--json lists all)")
    print("\n".join((*_notes(rows[:_SHOWN]), *price_lines(rows[:_SHOWN], prices))))
    print("To serve the first:")
    for line in _command(source, deployment, rows[0]):
        print(f"  {line}")


def _command(source: ModelSource, deployment: Deployment, row: SweepRow) -> list[str]:
    scheme = None if row.quantization == "as is" else row.quantization
    flags = replace(
        deployment, gpu=row.gpu, quantization=scheme, kv_cache_dtype=row.kv_cache_dtype,
        tensor_parallel_size=row.gpus,
    )  # fmt: skip
    return list(serve_lines(plan_source(source, flags)))
