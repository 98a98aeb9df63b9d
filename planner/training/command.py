"""Command line of the training planner, `tonnage train`."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tonnage.planner.arguments import Parser, refused
from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import find_gpu
from tonnage.planner.errors import DeploymentError, TonnageError, did_you_mean
from tonnage.planner.flags import add_flags, add_groups, given
from tonnage.planner.headers.hub import add_token_flag
from tonnage.planner.markup import save
from tonnage.planner.screen import Screen, aligned
from tonnage.planner.training import render
from tonnage.planner.training.build import Planner
from tonnage.planner.training.combinations import Combinations, combinations
from tonnage.planner.training.emit import emit
from tonnage.planner.training.html import facts_of, plan_page, sweep_page
from tonnage.planner.training.model import load_training_model
from tonnage.planner.training.search import FIELDS, MULTIPLE, largest
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.stacks import with_defaults
from tonnage.planner.training.sweep import Row, parse_axis, sweep
from tonnage.planner.training.tricks import Trick, tricks
from tonnage.planner.units import GiB

FITS, DOES_NOT_FIT = 0, 1

_EPILOG = """
exit codes: 0 it fits (or no device was named), 1 it does not, 2 bad input.

examples:
  tonnage train ./Llama-3.1-8B --gpu a100-80g --strategy zero3 --gpus 8
  tonnage train ./Llama-3.1-8B --method qlora --gpu rtx-4090 --find sequence-length
  tonnage train ./Llama-3.1-8B --gpu a100-80g --tricks
  tonnage train ./Llama-3.1-8B --sweep micro-batch=1,2,4,8 --sweep checkpointing=none,full --json
  tonnage train ./Llama-3.1-8B --strategy zero3 --gpus 8 --emit deepspeed > deepspeed.json
  tonnage train ./Llama-3.1-8B --gpus 8 --emit deepspeed-estimate
  tonnage train ./Llama-3.1-8B --stack torchtune --method qlora --compile --gpu rtx-4090
  tonnage train ./Llama-3.1-8B --method lora --sweep stack=transformers,torchtune,llama-factory,unsloth
"""


def parser() -> Parser:
    """Return the argument parser of `tonnage train`."""
    p = Parser(
        "tonnage train",
        "Show what training a model needs on GPU, CPU and NVMe, and what would make it fit.",
        _EPILOG,
    )
    p.add_argument("model", metavar="MODEL", help="demo, a folder with config.json or a hub id")
    add_token_flag(p)
    add_groups(p, TrainingSetup)
    add_flags(p, Deployment, ("gpu",))
    p.add_argument(
        "--find",
        type=str.lower,
        metavar="micro-batch|sequence-length",
        help="search for the largest value that fits",
    )
    p.add_argument(
        "--tricks", action="store_true", help="rank changes that would make it fit, alone and combined"
    )
    p.add_argument(
        "--emit", type=str.lower, metavar="deepspeed|accelerate|trainer|peft|deepspeed-estimate",
        help="print the configuration for that tool, or the estimates of DeepSpeed's own estimators",
    )  # fmt: skip
    p.add_argument(
        "--sweep",
        metavar="FLAG=A,B",
        action="append",
        help="plan every combination of the values (repeatable; join module names as A+B)",
    )
    p.add_argument("--html", metavar="FILE", help="write the plan or the sweep as one HTML file")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument("--explain", action="store_true", help="print every line with its formula and source")
    return p


def setup_from(args: argparse.Namespace, **changes: Any) -> TrainingSetup:
    """Return the training setup of the parsed flags, with the field values in `changes` applied.

    Raises:
        DeploymentError: for a flag with a wrong value; the error names the flag.
    """
    values = {**given(args, TrainingSetup), **changes}
    if args.gpu is not None:
        if "device_memory" in values:
            raise DeploymentError(
                "--gpu and --device-memory exclude each other", field="--gpu", hint="give one of them"
            )
        gpu = find_gpu(args.gpu)
        values["device_memory"] = gpu.memory_bytes
        if gpu.capability is not None:
            values.setdefault("compute_capability", "{}.{}".format(*gpu.capability))
    if values.get("stack") is None:
        return TrainingSetup(**values)
    return TrainingSetup(**with_defaults(values))


def run(argv: list[str]) -> int:
    """Run `tonnage train` with `argv` (without the sub-command's name) and return the exit code."""
    try:
        return _run(parser().parse_args(argv))
    except SystemExit as stop:  # argparse exits after --help.
        return int(stop.code or 0)
    except TonnageError as error:
        return refused(error)


def _run(args: argparse.Namespace) -> int:
    """Plan one setup, a sweep (--sweep) or the largest setup that fits (--find), and return the exit code."""
    _check_outputs(args)
    setup = setup_from(args)
    planner = Planner(load_training_model(args.model))
    if args.sweep:
        return _sweep(args, planner, setup)
    found = None
    if args.find:
        field = args.find.replace("-", "_")
        if field not in FIELDS:
            raise DeploymentError(
                f"{args.find!r} is not micro-batch or sequence-length", field="--find",
                hint=did_you_mean(args.find, ("micro-batch", "sequence-length")),
            )  # fmt: skip
        found = largest(planner, setup, field)
        setup = found.plan.setup
    plan = found.plan if found else planner.plan(setup)
    if args.emit:
        print(emit(args.emit, plan, planner.model.architecture))
        return FITS
    rows: tuple[Trick, ...] = ()
    several: Combinations | None = None
    if args.tricks:
        rows = tricks(planner, setup)
        several = combinations(planner, setup, rows)
    if args.html:
        save(args.html, plan_page(plan, rows, args.words, args.gpu))
    if args.json:
        result = render.plan_to_dict(plan, args.explain)
        if found:
            result["largest"] = {"field": found.field, "value": found.value, "aligned": found.aligned}
        if several is not None:
            result["tricks"] = [_trick(t) for t in rows]
            result["combinations"] = {
                "rows": [_trick(t) for t in several.rows], "tried": several.tried, "complete": several.complete,
                "smallest": None if several.smallest is None else _trick(several.smallest),
            }  # fmt: skip
        print(json.dumps(result, indent=2))
    else:
        render.print_plan(plan, args.explain, sys.stdout)
        screen = Screen(sys.stdout)
        if found:
            aligned = f" ({found.aligned:,} as a multiple of {MULTIPLE})" if found.aligned else ""
            screen.print(f"Largest {args.find} that fits: {found.value:,}{aligned}")
        for line in render.trick_lines(rows) if rows else ():
            screen.print(line)
        for line in render.combination_lines(several) if several is not None else ():
            screen.print(line)
        if plan.fits is False and not rows:
            screen.print("--tricks ranks what would make it fit.")
    return DOES_NOT_FIT if plan.fits is False else FITS


def _check_outputs(args: argparse.Namespace) -> None:
    """Raise DeploymentError if the parsed flags include two output flags that exclude each other."""
    many = "--sweep", "is about one setting, --sweep about many", ("find", "tricks", "emit", "explain")
    alone = (
        "--emit",
        "is left out by --emit, which prints a configuration alone",
        ("tricks", "explain", "json", "html"),
    )
    for asked, why, names in (many, alone):
        for name in names:
            if getattr(args, asked[2:]) and getattr(args, name):
                raise DeploymentError(why, field=f"--{name}", hint="leave one out")


def _trick(trick: Any) -> dict[str, Any]:
    """Return a memory-saving trick as a JSON object."""
    return {**asdict(trick), "changes": dict(trick.changes)}


def _sweep_lines(names: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Return a sweep over training setups as lines of a table with sizes in GiB, one line per setup.

    The column of CPU or NVMe memory is left out if no setup uses it.
    """
    parts = {"GPU": "gpu_bytes", "CPU": "cpu_bytes", "NVMe": "nvme_bytes"}
    used = [name for name, field in parts.items() if name == "GPU" or any(_gib_of(r, field) for r in rows)]
    table = [[*names, *(f"{name} GiB" for name in used), "fits"]]
    for r in rows:
        values = ["+".join(v) if isinstance(v, tuple) else str(v) for v in r.values]
        fits = "-" if r.refused or r.fits is None else "yes" if r.fits else "no"
        sizes = ["-" if r.refused else f"{_gib_of(r, parts[name]):,.2f}" for name in used]
        table.append([*values, *sizes, fits])
    return aligned(table, range(len(names), len(names) + len(used)))


def _gib_of(row: Row, field: str) -> float:
    """Return a setup's planned memory in GiB from field `field` of a sweep's row; 0 if the field is None."""
    return round((getattr(row, field) or 0) / GiB, 2)


def _sweep(args: argparse.Namespace, planner: Any, setup: TrainingSetup) -> int:
    """Plan each combination of the --sweep values, print a table or JSON, and return the exit code."""
    axes = [parse_axis(text) for text in args.sweep]
    names = [name for name, _ in axes]
    made = (lambda changes: setup_from(args, **changes)) if {"stack", "method"} & set(names) else None
    rows = list(sweep(planner, setup, axes, made))
    if args.html:
        facts = facts_of(setup, planner.model.id, args.gpu, names)
        save(args.html, sweep_page(names, rows, args.words, facts))
    if args.json:
        print(json.dumps({"fields": names, "rows": [asdict(row) for row in rows]}))
        return FITS
    print("\n".join(_sweep_lines(names, rows)))
    screen = Screen(sys.stdout)
    for why, count in Counter(r.refused for r in rows if r.refused).items():
        screen.print(f"{count:,} {'row' if count == 1 else 'rows'} refused: {why}")
    return FITS
