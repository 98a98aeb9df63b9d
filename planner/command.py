"""``tonnage plan``: the planner's command line."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.plan import Deployment
from tonnage.planner.units import parse_count, parse_size

FITS, DOES_NOT_FIT, BAD_INPUT = 0, 1, 2

_EPILOG = """
exit codes: 0 the plan fits, 1 it does not (the reasons say why and what would), 2 bad input.

examples:
  tonnage plan demo
  tonnage plan demo --kv-cache-memory-bytes 512MiB --explain
  tonnage plan ./Llama-3.1-8B --device cuda --device-memory 80GiB --quantization nf4 --json
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DeploymentError(message, hint=f"{self.prog} --help lists the options")


def _width() -> int:
    try:
        return max(60, min(110, os.get_terminal_size().columns - 2))
    except OSError:  # piped
        return 100


def parser() -> argparse.ArgumentParser:
    """Flags are vLLM's own names."""
    p = _Parser(
        prog="tonnage plan",
        description="Say what a model needs and what a device carries, before anything loads.",
        epilog=_EPILOG,
        # a given width spares argparse the import of shutil and its compressors (5 ms)
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=_width()),
        allow_abbrev=False,
    )
    p.add_argument("model", metavar="MODEL", help="demo, a folder with config.json, a .gguf file or a hub id")
    p.add_argument("--engine", default="hf", metavar="hf|vllm", help="whose rules and overheads (default: hf)")
    p.add_argument("--device", default="cpu", metavar="cpu|cuda", help="default: cpu")
    p.add_argument("--device-memory", metavar="SIZE", help="for example 80GiB (default on cpu: this machine's)")
    p.add_argument(
        "--gpu-memory-utilization", metavar="SHARE", help="share of the device's memory to use (default: 0.9)"
    )
    p.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16 (default: auto)")
    p.add_argument("--quantization", metavar="METHOD", help="int8, nf4, nf4-double or gptq")
    p.add_argument("--kv-cache-dtype", default="auto", metavar="DTYPE", help="default: auto, the model's dtype")
    p.add_argument("--kv-cache-memory-bytes", metavar="SIZE", help="size of the KV pool, for example 512MiB")
    p.add_argument("--max-model-len", metavar="N", help="longest sequence (default: the model's own)")
    p.add_argument("--max-num-seqs", metavar="N", help="most sequences running at once")
    p.add_argument("--max-num-batched-tokens", metavar="N", help="most tokens of one step")
    p.add_argument("--block-size", metavar="N", help="tokens per KV block (default: 16; vllm on cpu: 128)")
    p.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share blocks of equal prefixes (default: on)",
    )
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument("--explain", action="store_true", help="print every term with its formula and source")
    return p


def deployment_from(args: argparse.Namespace) -> Deployment:
    """Flags -> Deployment. Raises DeploymentError naming the flag."""

    def size(name: str) -> int | None:
        text = getattr(args, name)
        return None if text is None else parse_size(text, "--" + name.replace("_", "-"))

    def count(name: str) -> int | None:
        text = getattr(args, name)
        return None if text is None else parse_count(text, "--" + name.replace("_", "-"))

    share = args.gpu_memory_utilization
    try:
        utilization = 0.9 if share is None else float(share)
    except ValueError:
        raise DeploymentError(f"{share!r} is not a number", field="--gpu-memory-utilization") from None
    return Deployment(
        engine=args.engine,
        device=args.device,
        device_memory=size("device_memory"),
        gpu_memory_utilization=utilization,
        dtype=args.dtype,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        max_model_len=count("max_model_len"),
        max_num_seqs=count("max_num_seqs"),
        max_num_batched_tokens=count("max_num_batched_tokens"),
        block_size=count("block_size"),
        kv_cache_memory_bytes=size("kv_cache_memory_bytes"),
        enable_prefix_caching=args.enable_prefix_caching,
    )


def run(argv: list[str]) -> int:
    """Run ``tonnage plan`` with ``argv`` (without the sub-command's name). Returns the exit code."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except TonnageError as error:
        return _refuse(error)
    # imported here: --help needs none of it
    from tonnage.planner.build import make_plan
    from tonnage.planner.render import plan_to_dict, print_plan

    try:
        plan = make_plan(args.model, deployment_from(args))
    except TonnageError as error:
        return _refuse(error)
    if args.json:
        import json

        result = plan_to_dict(plan)
        if args.explain:
            result["terms"] = [
                {"name": t.name, "value": t.value, "formula": t.formula, "source": t.source} for t in plan.terms
            ]
        print(json.dumps(result, indent=2))
    else:
        print_plan(plan, args.explain, sys.stdout)
    return FITS if plan.fits else DOES_NOT_FIT


def _refuse(error: TonnageError) -> int:
    print(f"tonnage plan: {error}", file=sys.stderr)
    return BAD_INPUT
