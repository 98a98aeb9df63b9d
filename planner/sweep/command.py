"""``tonnage plan`` about many plans: several models or values, ``--sweep`` and ``--target-concurrency``."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence

from tonnage.planner.devices.prices import read_prices
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.engines.support import on_device
from tonnage.planner.errors import DeploymentError
from tonnage.planner.families.registry import architecture_of
from tonnage.planner.output.tables import Table, print_table
from tonnage.planner.planning.requests import parse_request
from tonnage.planner.plans import Deployment
from tonnage.planner.records import asdict, replace
from tonnage.planner.source.resolve import ModelSource, resolve_model
from tonnage.planner.sweep.choices import Choices, grids
from tonnage.planner.sweep.grid import SweepRow, cheapest, default_grid, sweep
from tonnage.planner.sweep.order import ordered
from tonnage.planner.sweep.table import price_lines, print_rows
from tonnage.planner.units import parse_count

_SHOWN = 12  # offers printed for --target-concurrency
_TOP = 20  # rows of a sweep printed as text where nothing says how many
_REASONS = 3  # printed of why combinations were left out


def run_sweep(choices: Choices, deployment: Deployment, wanted: int | None, args: argparse.Namespace) -> int:
    """Print the table, or the offers that hold ``wanted`` sequences. Returns the exit code."""
    from tonnage.planner.devices.catalogue import catalogue

    if not engine_of(deployment.engine).divides and args.engine is None and deployment.gpu != "cpu":
        deployment = replace(deployment, engine="vllm")
    if wanted is not None and deployment.max_num_seqs is None:
        deployment = replace(deployment, max_num_seqs=wanted)
    if deployment.device_memory is not None:
        raise DeploymentError(
            "the memory of each GPU is the catalogue's", field="--device-memory",
            hint="leave it out where there are several",
        )  # fmt: skip
    prices = read_prices(args.price or ())
    lengths = [parse_request(text) for text in args.request or ()]
    gpus = tuple(gpu for gpu in catalogue() if on_device(deployment.engine, gpu.name).runs)
    many = args.sweep or wanted is not None
    whole = default_grid(deployment, gpus) if many else None
    if whole is not None and wanted is not None and not args.sweep:
        # another format needs another checkpoint: offered only when asked for
        whole = replace(whole, quantizations=("as is",))
    combined = grids(choices, deployment, gpus, whole)
    sources = [resolve_model(name) for name in choices.models]
    rows = [row for s in sources for grid in combined for row in sweep(s, deployment, grid, lengths, prices)]
    left_out = [row for row in rows if many and row.unsupported]
    rows = [row for row in rows if not many or not row.unsupported]
    found = len(rows)
    by = args.sort or ("price-per-sequence" if many else None)
    rows = ordered(rows, by) if wanted is None else cheapest(rows, wanted)
    if args.top is not None:
        rows = rows[: parse_count(args.top, "--top")]
    if args.html:
        from tonnage.planner.sweep.page import write_sweep_page

        write_sweep_page(args.html, ", ".join(source.id for source in sources), rows)
    if args.json:
        best = _command(sources[0], deployment, rows[0]) if wanted is not None and rows else []
        reasons = dict(Counter(row.unsupported for row in left_out))
        print(json.dumps({
            "rows": [{**asdict(row), "usd_per_sequence": row.usd_per_sequence} for row in rows],
            "serve": best, "left_out": len(left_out), "left_out_because": reasons,
        }, indent=2))  # fmt: skip
    elif args.csv or args.markdown:
        print_table(_table(rows), sys.stdout, markdown=args.markdown)
    elif wanted is not None:
        _print_offers(sources[0], deployment, rows, wanted, prices)
    else:
        _print_all(rows[:_TOP] if many and args.top is None else rows, found, by, lengths, prices, len(sources))
    if not args.json and not args.csv and not args.markdown:
        _print_left_out(left_out)
    return 0 if any(row.fits for row in rows) else 1


def _table(rows: list[SweepRow]) -> Table:
    columns = (*SweepRow.__dataclass_fields__, "usd_per_sequence")

    def cell(row: SweepRow, name: str) -> object:
        value = getattr(row, name)
        return ";".join(map(str, value)) if isinstance(value, tuple) else value

    return Table(columns, tuple(tuple(cell(row, name) for name in columns) for row in rows))


def _print_all(
    rows: list[SweepRow], found: int, by: str | None, lengths: Sequence[tuple[int, int]],
    prices: dict[str, float], models: int,
) -> None:  # fmt: skip
    if rows:
        name = f"{rows[0].model}: " if models == 1 else ""
        print(
            f"{name}weights and pool in GiB of one GPU, prices of all and of each sequence that runs at least"
        )
    if rows:
        print_rows(rows, lengths, sys.stdout)
    for why, count in Counter(row.refused or row.unsupported for row in rows).items():
        if not why:
            continue
        print(f"{count:,} {'row' if count == 1 else 'rows'}: {why}")
    if len(rows) < found:
        print(f"... the first {len(rows):,} of {found:,} by {by} (--sort, --top; --json lists all)")
    print("\n".join(price_lines(rows, prices)))


def _print_left_out(rows: list[SweepRow]) -> None:
    if not rows:
        return
    reasons = Counter(row.unsupported for row in rows).most_common()
    print(f"Left out: {len(rows):,} combinations that the engine does not run there, for example")
    for why, count in reasons[:_REASONS]:
        print(f"  {count:,}: {why}")


def _print_offers(
    source: ModelSource, deployment: Deployment, rows: list[SweepRow], wanted: int, prices: dict[str, float]
) -> None:
    if not rows:
        print(f"No combination holds {wanted:,} sequences; fewer tokens (--max-model-len) or more GPUs would.")
        return
    length = deployment.max_model_len or architecture_of(source.config).max_model_len
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
    print("\n".join(price_lines(rows[:_SHOWN], prices)))
    print("To serve the first:")
    for line in _command(source, deployment, rows[0]):
        print(f"  {line}")


def _command(source: ModelSource, deployment: Deployment, row: SweepRow) -> list[str]:
    from tonnage.planner.planning.advice import serve_lines
    from tonnage.planner.planning.build import plan_source

    scheme = None if row.quantization == "as is" else row.quantization
    flags = replace(
        deployment, gpu=row.gpu, quantization=scheme, kv_cache_dtype=row.kv_cache_dtype,
        tensor_parallel_size=row.gpus,
    )  # fmt: skip
    return list(serve_lines(plan_source(source, flags)))
