"""The command `tonnage plan`: its options, checks for options that exclude each other, and its output."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import NoReturn

from tonnage.planner.api import plan_or_advise
from tonnage.planner.arguments import Parser, refused
from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.flags import add_groups, given
from tonnage.planner.headers.hub import add_token_flag
from tonnage.planner.output.json import plan_to_dict
from tonnage.planner.output.terminal import for_this_cpu, print_plan
from tonnage.planner.planning.advice import serve_lines
from tonnage.planner.planning.build import plan_source
from tonnage.planner.planning.deployment import deployment_of
from tonnage.planner.planning.requests import parse_request, with_requests, with_trace
from tonnage.planner.plans import Plan
from tonnage.planner.screen import Screen
from tonnage.planner.source.resolve import resolve_model
from tonnage.planner.sweep.choices import Choices, one_of, read_choices
from tonnage.planner.units import parse_count

FITS, DOES_NOT_FIT = 0, 1

_EPILOG = """
exit codes: 0 the plan fits, 1 it does not (the reasons say why and what would), 2 bad input.

examples:
  tonnage plan demo
  tonnage plan demo --kv-cache-memory-bytes 512MiB --explain
  tonnage plan ./Llama-3.1-8B --gpu h100-80g --max-model-len 32K
  tonnage plan ./Qwen3-32B --request 4000+500 --target-concurrency 200
  tonnage plan ./Qwen3-32B ./Llama-3.1-8B --gpu h100-80g,l40s,2xa100-80g --quantization none,fp8,int4
  tonnage plan ./Qwen3-32B --sweep --top 20 --html sweep.html
  tonnage plan ./Qwen3-32B --gpu h100-80g --request 2000+300 --request 30K+1K
  tonnage plan ./Qwen3-32B --gpu h100-80g --trace azure.csv
  tonnage plan ./Qwen3-32B --gpu h100-80g --compare 0.19.0 0.32.0
  tonnage plan ./Llama-3.1-8B --gpu h100-80g --emit helm-values > plan.yaml
  tonnage plan ./Llama-3.1-8B --gpu h100-80g --replicas auto --rate 20 --trace azure.csv
  tonnage plan ./Llama-3.1-8B --engine vllm --engine-version 0.11.0 --gpu a100-40g --json
"""


COLUMNS = "column names of the trace: arrival=t,prompt_tokens=in,..."


# Options that accept several values in `tonnage plan` (sweep/choices.py) -> text added to their help.
SEVERAL = {
    "gpu": "; several, with commas: one table, side by side; 2xa100-80g: two of them",
    "quantization": "; several, with commas, none for the checkpoint's own: one table",
    "kv_cache_dtype": "; several, with commas: one table",
}


def parser() -> Parser:
    """Return the parser of `tonnage plan`; options have vLLM's names."""
    p = Parser(
        "tonnage plan", "Show what a model needs and what a device can hold, before anything loads.", _EPILOG
    )
    p.add_argument(
        "model", metavar="MODEL",
        help="demo, a folder with config.json, a .gguf file, or a hub id: org/name, org/name@revision, "
        "org/name-GGUF:Q4_K_M, or an address of the hub",
    )  # fmt: skip
    p.add_argument("others", metavar="MODEL", nargs="*", help="more models: one table, side by side")
    add_token_flag(p)
    add_groups(p, Deployment)
    for action in p._actions:
        if action.dest in SEVERAL:
            action.help = f"{action.help}{SEVERAL[action.dest]}"
    _output_flags(p.add_argument_group("answers and output"))
    _trace_flags(p.add_argument_group("requests of a trace"))
    return p


_Group = argparse._ArgumentGroup


def _output_flags(p: _Group) -> None:
    p.add_argument(
        "--target-concurrency",
        metavar="N",
        help="find the GPUs that hold N requests at once: smallest layouts first, with price and speed",
    )
    p.add_argument("--sweep", action="store_true", help="quantization x KV dtype x TP x GPU as a table")
    p.add_argument(
        "--sort", metavar="FIGURE", help="of a table: price-per-sequence, price, sequences, tokens, pool ..."
    )
    p.add_argument("--top", metavar="N", help="only the first N rows of a table")
    p.add_argument(
        "--price", action="append", metavar="GPU=USD",
        help="hourly price of one GPU, for example h100-80g=2.10 (repeatable; default: public lists)",
    )  # fmt: skip
    p.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="show what an upgrade from version A to B changes, and why",
    )
    p.add_argument(
        "--request", action="append", metavar="P+O",
        help="how many requests of P prompt and O output tokens run at once, for example 2000+300 (repeatable)",
    )  # fmt: skip
    p.add_argument("--explain", action="store_true", help="print every term with its formula and source")
    out = p.add_mutually_exclusive_group()
    out.add_argument("--serve-line", action="store_true", help="print only the commands that serve this plan")
    out.add_argument("--json", action="store_true", help="print one JSON object")
    out.add_argument("--markdown", action="store_true", help="print a Markdown table")
    out.add_argument("--csv", action="store_true", help="print CSV")
    out.add_argument(
        "--emit",
        type=str.lower,
        metavar="helm-values|compose-env|k8s-resources",
        help="print the deployment's settings",
    )
    p.add_argument("--html", metavar="FILE", help="write the answer as a page, one file")


def _trace_flags(p: _Group) -> None:
    """Add the options of `tonnage plan` that read request traces.

    The server's modules commands.trace_concurrency and commands.replicas implement these options. The command
    `tonnage` calls the modules if --trace or --replicas is given.
    """
    p.add_argument("--trace", metavar="FILE", help="how many requests with the lengths in FILE run at once")
    p.add_argument("--columns", metavar="NAME=COLUMN,...", help=COLUMNS)
    p.add_argument("--limit", metavar="N", help="only the first N requests of the trace")
    p.add_argument("--replicas", metavar="auto", help="number of servers with this plan that --rate needs")
    p.add_argument("--rate", type=float, metavar="N", help="requests per second, with the lengths of --trace")
    p.add_argument(
        "--wait-target", metavar="TIME", help="target for the 99th percentile of waits (default: 1s)"
    )
    p.add_argument(
        "--memory-bandwidth",
        type=float,
        metavar="GB/s",
        help="memory bandwidth of one device (default: by --gpu)",
    )
    p.add_argument(
        "--flops",
        type=float,
        metavar="TFLOP/s",
        help="dense 16-bit operations of one device (default: by --gpu)",
    )


def _check_trace(args: argparse.Namespace) -> None:
    needs = dict.fromkeys(("limit", "columns", "replicas"), "trace")
    needs |= dict.fromkeys(("rate", "wait_target", "memory_bandwidth", "flops"), "replicas")
    for name, other in needs.items():
        if getattr(args, name) is not None and getattr(args, other) is None:
            raise DeploymentError(f"requires --{other}", field="--" + name.replace("_", "-"))


def deployment_from(args: argparse.Namespace) -> Deployment:
    """Return the Deployment that the parsed options describe.

    Raises:
        DeploymentError: options contradict each other, or one needs an option that is missing.
    """
    one_of(read_choices(args))
    deployment = deployment_of(given(args, Deployment), args.model)
    _check_outputs(args)
    _check_trace(args)
    return deployment


def _check_outputs(args: argparse.Namespace, several: bool = False) -> None:
    """Raise DeploymentError for output options that exclude each other.

    Args:
        args: the parsed options.
        several: whether several models or several values of an option were given. The output is then a table.
    """

    def refuse(name: str, why: str, hint: str) -> NoReturn:
        raise DeploymentError(why, field="--" + name.replace("_", "-"), hint=hint)

    target = args.target_concurrency is not None
    many = "target_concurrency" if target else "sweep" if args.sweep else None
    if args.compare is not None:
        if many:
            refuse(
                "compare", f"compares one deployment; --{many.replace('_', '-')} plans many", "leave one out"
            )
        if args.engine_version is not None:
            refuse("compare", "already names both versions", "leave --engine-version out")
        many = "compare"
    if target and len(args.request or ()) > 1:
        refuse("request", "--target-concurrency counts requests of one length", "give the longest")
    about = f"--{many.replace('_', '-')} gives" if many else "several models or values give" if several else ""
    for name in ("explain", "serve_line", "emit", "request"):
        if name == "request" and many != "compare":
            continue  # --compare accepts several --request, because its table has a column for each
        if name == "serve_line" and target:
            continue  # --target-concurrency accepts --serve-line, which prints the command of the first layout
        if about and getattr(args, name):
            refuse(name, f"needs a single plan; {about} a table of plans", "leave one out")
    settings = "emit" if args.emit else "serve_line" if args.serve_line else None
    for name in ("explain", "request", "trace"):
        if settings and not (target and name == "request") and getattr(args, name):
            refuse(name, f"adds figures; --{settings.replace('_', '-')} prints settings only", "leave one out")
    if args.explain and (args.csv or args.markdown):
        refuse("explain", "is not available in a table", "--json has the terms, with their formulas")
    for name in ("sort", "top", "price"):
        if getattr(args, name) is None:
            continue
        if not about:
            refuse(name, "applies to a table of plans only", "give several models or values, or --sweep")
        if many == "compare":
            refuse(name, "applies to a table of plans; --compare shows one deployment", "leave one out")
    if args.sort is not None and many == "target_concurrency":
        refuse("sort", "does not combine with --target-concurrency, whose order is fixed", "leave it out")


def run(argv: list[str]) -> int:
    """Run `tonnage plan` and return its exit code.

    Args:
        argv: the words after the sub-command's name.
    """
    try:
        args = parser().parse_args(argv)
        return answer(args)
    except SystemExit as stop:  # argparse exits after it printed --help.
        return int(stop.code or 0)
    except TonnageError as error:
        return refused(error)


def answer(args: argparse.Namespace, trace: tuple[str, Sequence[tuple[int, int]]] | None = None) -> int:
    """Print the plan, table or settings that the options request, and return the exit code.

    Args:
        args: the parsed options.
        trace: (name of the request trace, (prompt, output) tokens of each request), or None without --trace.

    Raises:
        TonnageError: the model or the options are not supported.
    """
    if args.trace is not None and trace is None:
        raise DeploymentError(
            "works only in the command tonnage", field="--trace", hint="run tonnage plan in a shell"
        )
    _check_trace(args)
    many = args.sweep or args.target_concurrency is not None
    choices = read_choices(args)
    if args.compare is not None or trace is not None:
        one_of(choices)
    if args.target_concurrency is not None:
        one_of(Choices(choices.models))
    deployment = deployment_of(given(args, Deployment), args.model)
    _check_outputs(args, choices.several)
    if args.compare is not None:
        # lazy import, needed only for --compare
        from tonnage.planner.sweep.versions import run_compare

        return run_compare(resolve_model(args.model), deployment, args)
    if many or choices.several:
        if args.target_concurrency is not None:
            # lazy import, needed only for --target-concurrency
            from tonnage.planner.sweep.target import run_target

            wanted = parse_count(args.target_concurrency, "--target-concurrency")
            return run_target(choices, deployment, wanted, args)
        # lazy import, needed only for a table of plans
        from tonnage.planner.sweep.command import run_sweep

        return run_sweep(choices, deployment, args)
    asked = given(args, Deployment)
    lengths = [parse_request(text) for text in args.request or ()]
    source = resolve_model(args.model)
    plan = plan_or_advise(source, deployment, engine_given="engine" in asked)
    if lengths:

        def planned_for(tokens: int) -> Plan:
            """Return the plan for max_model_len `tokens`, with the same KV pool bytes and other flags."""
            size = max(1, plan.rank.kv_pool_bytes)
            return plan_source(
                source, replace(plan.deployment, max_model_len=tokens, kv_cache_memory_bytes=size)
            )

        plan = with_requests(plan, lengths, planned_for)
    if trace is not None:
        plan = with_trace(plan, *trace)
    if args.html:
        from tonnage.planner.markup import write_page  # lazy import, needed only for --html

        write_page(args.html, "Memory plan", plan.html(), args.words, plan.facts())
    _print(plan, args)
    return FITS if plan.fits else DOES_NOT_FIT


def _print(plan: Plan, args: argparse.Namespace) -> None:
    settings = None
    if args.emit:
        from tonnage.planner.output.emit import emit  # lazy import, needed only for --emit

        settings = emit(plan, args.emit)  # computed before anything is printed, because it may raise an error
    if not args.json and (line := for_this_cpu(plan, args.gpu, args.device, args.device_memory)):
        # Another program may read these output formats from stdout, so the line that says that the plan is for
        # the CPU goes to stderr.
        apart = args.emit or args.serve_line or args.markdown or args.csv
        Screen(sys.stderr if apart else sys.stdout).print(line)
    if settings is not None:
        print(settings, end="")
    elif args.serve_line:
        print("\n".join(serve_lines(plan)))
        for note in plan.notes:
            print(f"Note: {note}", file=sys.stderr)
    elif args.json:
        result = plan_to_dict(plan)
        if args.explain:
            result["terms"] = [asdict(term) for term in plan.terms]
        print(json.dumps(result, indent=2))
    elif args.markdown or args.csv:
        # lazy import, needed only for --markdown and --csv
        from tonnage.planner.output.tables import plan_table, print_table

        print_table(plan_table(plan), sys.stdout, markdown=args.markdown)
    else:
        print_plan(plan, args.explain, sys.stdout)
