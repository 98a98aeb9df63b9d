"""``tonnage plan --sweep`` and ``--target-concurrency``: many combinations, printed."""

from __future__ import annotations

import argparse
import json
import sys

from tonnage.planner.engines.registry import engine_of
from tonnage.planner.errors import DeploymentError
from tonnage.planner.families.registry import architecture_of
from tonnage.planner.output.tables import Table, print_table
from tonnage.planner.plans import Deployment
from tonnage.planner.records import asdict, replace
from tonnage.planner.source.resolve import ModelSource
from tonnage.planner.sweep.grid import SweepRow, cheapest, default_grid, sweep
from tonnage.planner.units import gib

_SHOWN = 12  # offers printed for --target-concurrency


def run_sweep(source: ModelSource, deployment: Deployment, wanted: int | None, args: argparse.Namespace) -> int:
    """Print the table, or the offers that hold ``wanted`` sequences. Returns the exit code."""
    from tonnage.planner.devices.catalogue import catalogue, find_gpu

    if not engine_of(deployment.engine).divides and args.engine is None and deployment.gpu != "cpu":
        deployment = replace(deployment, engine="vllm")
    if wanted is not None and deployment.max_num_seqs is None:
        deployment = replace(deployment, max_num_seqs=wanted)
    gpus = (find_gpu(deployment.gpu),) if deployment.gpu else catalogue()
    if not engine_of(deployment.engine).apple:
        gpus = tuple(gpu for gpu in gpus if gpu.vendor != "apple")
    if deployment.device_memory is not None:
        raise DeploymentError(
            "the memory of each GPU is the catalogue's", field="--device-memory", hint="leave it out of --sweep"
        )
    grid = default_grid(deployment, gpus)
    if wanted is not None and deployment.quantization is None and not args.sweep:
        # another format needs another checkpoint: offered only when asked for
        grid = replace(grid, quantizations=("as is",))
    rows = sweep(source, deployment, grid)
    offers = rows if wanted is None else cheapest(rows, wanted)
    if args.html:
        from tonnage.planner.sweep.page import write_sweep_page

        write_sweep_page(args.html, source.id, offers)
    if args.json:
        best = _command(source, deployment, offers[0]) if wanted is not None and offers else []
        print(json.dumps({"rows": [asdict(row) for row in offers], "serve": best}, indent=2))
    elif args.csv or args.markdown:
        print_table(_table(offers), sys.stdout, markdown=args.markdown)
    elif wanted is not None:
        _print_offers(source, deployment, offers, wanted)
    else:
        _print_rows(offers)
    return 0 if any(row.fits for row in offers) else 1


def _table(rows: list[SweepRow]) -> Table:
    columns = tuple(SweepRow.__dataclass_fields__)
    return Table(columns, tuple(tuple(getattr(row, name) for name in columns) for row in rows))


def _print_rows(rows: list[SweepRow]) -> None:
    print(
        f"{'GPU':<20}{'n':>3} {'quantization':<13}{'KV':<10}{'weights':>13}{'pool':>13}{'tokens':>13}"
        f"{'sequences':>11}"
    )
    for row in rows:
        head = f"{row.gpu:<20}{row.gpus:>3} {row.quantization:<13}{row.kv_cache_dtype:<10}"
        if row.refused:
            print(f"{head} refused: {row.refused}")
        elif not row.fits:
            print(f"{head}{gib(row.weights_bytes):>13} does not fit")
        else:
            print(
                f"{head}{gib(row.weights_bytes):>13}{gib(row.kv_pool_bytes):>13}{row.tokens:>13,}"
                f"{row.max_concurrency:>11.1f}"
            )


def _print_offers(source: ModelSource, deployment: Deployment, rows: list[SweepRow], wanted: int) -> None:
    if not rows:
        print(f"No combination holds {wanted:,} sequences; fewer tokens (--max-model-len) or more GPUs would.")
        return
    length = deployment.max_model_len or architecture_of(source.config).max_model_len
    print(f"{wanted:,} sequences of {length:,} tokens at once, the cheapest first:")
    print(f"{'n':>3}   {'GPU':<20}{'quantization':<13}{'KV':<9}{'sequences':>9}{'at least':>10}   price")
    for row in rows[:_SHOWN]:
        price = f"{row.usd_per_hour:.2f} USD/h" if row.usd_per_hour is not None else "no list price"
        print(
            f"{row.gpus:>3} x {row.gpu:<20}{row.quantization:<13}{row.kv_cache_dtype:<9}"
            f"{row.max_concurrency:>9.1f}{row.least_concurrency:>10.1f}   {price}"
        )
    if len(rows) > _SHOWN:
        print(f"... and {len(rows) - _SHOWN} more (--json lists all)")
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
