"""Search for GPU layouts that run a given number of requests at once (`--target-concurrency`).

Example: `tonnage plan --request 4000+500 --target-concurrency 200`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.prices import read_prices
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.errors import DeploymentError, escaped
from tonnage.planner.families.registry import architecture_of
from tonnage.planner.model.capacity import check_lengths
from tonnage.planner.output.tables import print_table
from tonnage.planner.planning.advice import serve_lines, smallest_layout
from tonnage.planner.planning.build import plan_source
from tonnage.planner.planning.files import with_file_type
from tonnage.planner.planning.requests import parse_request
from tonnage.planner.planning.size import Sizer
from tonnage.planner.quantization.read import read_quantization
from tonnage.planner.screen import Screen, busy
from tonnage.planner.source.resolve import ModelSource, resolve_model
from tonnage.planner.sweep.choices import Choices
from tonnage.planner.sweep.command import (
    common_flags,
    notes_of,
    print_json,
    row_table,
    varied,
    write_html,
)
from tonnage.planner.sweep.layouts import NODE, layouts
from tonnage.planner.sweep.offers import FOLD, Offer, gpus_needed, offers, pareto
from tonnage.planner.sweep.order import cheapest
from tonnage.planner.sweep.rows import SweepRow
from tonnage.planner.sweep.speed import SPEEDS, work_of
from tonnage.planner.sweep.table import price_lines
from tonnage.planner.units import GiB, ceil_div, gib, parse_count

_SHOWN = 12  # maximum number of GPU layouts printed as text without --top

# For requests of a given length, max_model_len is rounded up to a multiple of this number of tokens.
_ROUND = 1024


def run_target(choices: Choices, deployment: Deployment, wanted: int, args: argparse.Namespace) -> int:
    """Print the GPU layouts that hold `wanted` requests, and the commands that serve the first layout.

    Returns the exit code.

    Args:
        choices: the model and the values that the user gave.
        deployment: the flags that are the same in every plan.
        wanted: number of requests that have to run at once.
        args: the parsed options.

    Raises:
        TonnageError: the flags are invalid, or the model is not supported.
    """
    stages = deployment.pipeline_parallel_size
    deployment = common_flags(choices, replace(deployment, pipeline_parallel_size=1), args.engine is not None)
    deployment = replace(deployment, pipeline_parallel_size=stages)
    if deployment.max_num_seqs is None:
        deployment = replace(deployment, max_num_seqs=wanted)
    prices = read_prices(args.price or ())
    top = None if args.top is None else parse_count(args.top, "--top")
    lengths = [parse_request(text) for text in args.request or ()]
    source, deployment = with_file_type(resolve_model(args.model), deployment)
    if source.file_type:
        choices = replace(choices, quantizations=())
    architecture = architecture_of(source.config)
    if lengths and deployment.max_model_len is None:
        check_lengths(*lengths[0], architecture.max_model_len)
        longest = min(architecture.max_model_len, ceil_div(sum(lengths[0]), _ROUND) * _ROUND)
        deployment = replace(deployment, max_model_len=longest)
    grids = varied(choices, deployment, formats=args.sweep)
    with busy(f"Planning {sum(map(len, grids)):,} layouts and more with pipelines ..."):
        rows = layouts(source, deployment, grids, choices, wanted, lengths, prices)
    if lengths and args.max_model_len is None and rows and all(row.refused for row in rows):
        # If the rule for a request's KV blocks is not known for this model, the request counts as a sequence of
        # prompt + output tokens.
        sized = replace(deployment, max_model_len=sum(lengths[0]))
        others = layouts(source, sized, grids, choices, wanted, (), prices)
        if not all(row.refused for row in others):
            deployment, rows, lengths = sized, others, []
    if rows and all(row.refused for row in rows):
        raise DeploymentError(Counter(row.refused for row in rows).most_common(1)[0][0])
    left_out = [row for row in rows if row.unsupported]
    rows = [row for row in rows if not row.unsupported]
    stored = read_quantization(source.config, deployment.quantization).scheme
    found = offers(rows, wanted, work_of(architecture), stored, lengths[0] if lengths else None, prices)
    listed = pareto(found)
    single = cheapest(rows, wanted)
    if args.html:
        write_html(args, choices, deployment, single[:top], lengths, prices)
    if args.json:
        more = {"layouts": [_as_dict(offer) for offer in listed[:top]],
                "serve": _command(source, deployment, listed[0]) if listed else []}  # fmt: skip
        print_json(single[:top], left_out, more)
    elif args.csv or args.markdown:
        print_table(row_table(single[:top]), sys.stdout, markdown=args.markdown)
    elif args.serve_line:
        lines = _command(source, deployment, listed[0]) if listed else _none(source, rows, deployment)
        print("\n".join(map(escaped, lines)))
    else:
        _print_need(rows, args.max_model_len, wanted, lengths)
        if not listed:
            print("\n".join(map(escaped, _none(source, rows, deployment))))
        else:
            _print_layouts(listed, found, top, prices)
            print("To serve the first (with --gpu NAME that of another GPU):")
            for line in _command(source, deployment, listed[0]):
                print(f"  {escaped(line)}")
            if (several := _machines(listed[0], deployment)) is not None:
                Screen(sys.stdout).print(several)
        if left_out:
            print(f"Left out: {len(left_out):,} combinations that the engine does not run (--json says why)")
    return 0 if listed else 1


def _print_need(
    rows: Sequence[SweepRow], given: object, wanted: int, lengths: Sequence[tuple[int, int]]
) -> None:
    """Print the KV pool size that `wanted` requests need, from the rows with the fewest tensor-parallel ranks.

    `given` is the user's --max-model-len, or None.
    """
    known = [row for row in rows if row.request_bytes]
    if not known:
        return
    length = known[0].max_model_len
    what = f"sequences of {length:,} tokens"
    if lengths:
        what = f"requests of {lengths[0][0]:,}+{lengths[0][1]:,} tokens"
    print(f"{wanted:,} {what} at once, max_model_len {length:,}:")
    if not lengths and given is None:
        Screen(sys.stdout).print(
            "No --request was given, so each is as long as the model allows: --request 4000+500 plans for "
            "prompts of 4,000 tokens and answers of 500"
        )
    least = min(row.gpus for row in known)
    sizes: dict[str, int] = {}
    weights: dict[str, int] = {}
    for row in known:
        if row.gpus == least:
            sizes.setdefault(row.kv_cache_dtype, row.request_bytes)
            weights.setdefault(row.quantization, row.weights_bytes)
    each = "" if least == 1 else f" on each GPU of -tp {least}"
    needs = (
        f"{f'--kv-cache-dtype {name}: ' if place else ''}{gib(wanted * size)} ({gib(size)} each)"
        for place, (name, size) in enumerate(sizes.items())
    )
    screen = Screen(sys.stdout)
    screen.print(f"KV pool needed{each}: {'; '.join(needs)}")
    held = (f"{gib(size)}{'' if name == 'as is' else f' in {name}'}" for name, size in weights.items())
    screen.print(f"Weights{each}: {', '.join(held)}")


def _print_layouts(
    listed: Sequence[Offer], found: Sequence[Offer], top: int | None, prices: dict[str, float]
) -> None:
    screen = Screen(sys.stdout)
    screen.print("GPUs needed:")
    for count, names in gpus_needed(found):
        screen.print(f"  {count} x {', '.join(names)}")
    screen.print()
    shown = listed[: _SHOWN if top is None else top]
    several = len({offer.row.quantization for offer in shown}) > 1
    piped = any(offer.row.stages > 1 for offer in shown)
    titles = ["GPUs", "-tp", *(["-pp"] if piped else []), "-dp", *(["format"] if several else []), "KV",
              "pool GiB", "holds", "at least", "tok/s", "ms/tok", "USD/h"]  # fmt: skip
    lines = [titles, *(_cells(offer, several, piped) for offer in shown)]
    right = [place for place, title in enumerate(titles) if title not in ("GPUs", "format", "KV")]
    screen.table(lines, right, titles=sys.stdout.isatty())
    screen.print()
    if len(shown) < len(listed):
        print(f"... and {len(listed) - len(shown)} more (--top)")
    if folded := len(found) - len(listed):
        screen.print(
            f"Smallest first. {folded:,} {'layout is' if folded == 1 else 'layouts are'} not listed: a listed "
            "one has at most as many GPUs and "
            f"changed formats, and its price and speed are at most {100 * FOLD:.0f} % worse."
        )
    screen.print(SPEEDS)
    rows = [offer.row for offer in shown]
    for line in (*notes_of(rows), *price_lines(rows, prices)):
        screen.print(line)


def _cells(offer: Offer, several: bool, piped: bool) -> list[str]:
    row = offer.row
    return [
        f"{offer.gpus} x {row.gpu}",
        str(row.tensor),
        *([str(row.stages)] if piped else []),
        str(offer.replicas),
        *([row.quantization] if several else []),
        row.kv_cache_dtype,
        f"{offer.replicas * row.replica_pool_bytes / GiB:,.1f}",
        f"{offer.replicas * (row.requests_held[0] if row.requests_held else int(row.max_concurrency)):,}",
        f"{offer.replicas * int(row.least_held):,}",
        "-" if offer.tokens_per_second is None else f"{offer.tokens_per_second:,.0f}",
        "-" if offer.speed is None else f"{1000 * offer.speed.step_seconds:,.0f}",
        "-" if offer.usd_per_hour is None else f"{offer.usd_per_hour:.2f}",
    ]


def _none(source: ModelSource, rows: Sequence[SweepRow], deployment: Deployment) -> list[str]:
    """Return lines of text with the reasons why no sweep row holds the requested number of requests."""
    most = max((row.gpus for row in rows), default=1)
    lines = [f"No layout of up to {most} {'GPU' if most == 1 else 'GPUs'} of one type holds a single request."]
    largest = max((row.total_bytes for row in rows), default=0)
    names = dict.fromkeys(row.gpu for row in rows if 3 * row.total_bytes >= largest)
    sizer = Sizer(source)
    for name in names:
        if (layout := smallest_layout(replace(deployment, gpu=name), sizer)) is not None:
            lines.append(f"  {name}: {layout}")
    if len(lines) > 1:
        lines.insert(
            1, "The smallest layouts over several machines (plan one with --request for its capacity):"
        )
    return lines


def _as_dict(offer: Offer) -> dict[str, Any]:
    """Return the JSON object of a GPU layout with its replicas, price and speed."""
    row, speed = offer.row, offer.speed
    return {
        "gpu": row.gpu,
        "gpus": offer.gpus,
        "tensor_parallel_size": row.tensor,
        "pipeline_parallel_size": row.stages,
        "data_parallel_size": offer.replicas,
        "quantization": row.quantization,
        "kv_cache_dtype": row.kv_cache_dtype,
        "running_per_replica": offer.running,
        "kv_pool_bytes": offer.replicas * row.replica_pool_bytes,
        "request_bytes_per_gpu": row.request_bytes // row.stages,
        "usd_per_hour": offer.usd_per_hour,
        "rough_tokens_per_second": offer.tokens_per_second,
        "rough_seconds_per_token": None if speed is None else speed.step_seconds,
    }


def _machines(offer: Offer, deployment: Deployment) -> str | None:
    """Return text on how to start a replica over several machines, or None if one machine is enough for it."""
    if offer.row.gpus <= NODE:
        return None
    count = ceil_div(offer.row.gpus, NODE)
    line = f"The first is over {count} machines of {NODE} GPUs."
    return f"{line} {engine_of(deployment.engine).machines_note(count)}".rstrip()


def _command(source: ModelSource, deployment: Deployment, offer: Offer) -> list[str]:
    row = offer.row
    flags = replace(
        deployment, gpu=row.gpu, quantization=None if row.quantization == "as is" else row.quantization,
        kv_cache_dtype=row.kv_cache_dtype, tensor_parallel_size=row.tensor,
        pipeline_parallel_size=row.stages, data_parallel_size=offer.replicas,
    )  # fmt: skip
    if flags.max_num_seqs is not None:
        flags = replace(flags, max_num_seqs=min(flags.max_num_seqs, offer.running))
    return list(serve_lines(plan_source(source, flags)))
