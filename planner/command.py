"""``tonnage plan``: the planner's command line."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.plans import Deployment, Plan, default_engine
from tonnage.planner.units import GiB, parse_count, parse_size

FITS, DOES_NOT_FIT, BAD_INPUT = 0, 1, 2

_EPILOG = """
exit codes: 0 the plan fits, 1 it does not (the reasons say why and what would), 2 bad input.

examples:
  tonnage plan demo
  tonnage plan demo --kv-cache-memory-bytes 512MiB --explain
  tonnage plan ./Llama-3.1-8B --gpu h100-80g --max-model-len 32K
  tonnage plan ./Llama-3.1-70B --target-concurrency 64 --max-model-len 8192
  tonnage plan ./Qwen3-32B --sweep --html sweep.html
  tonnage plan ./Llama-3.1-8B --gpu h100-80g --emit helm-values > plan.yaml
  tonnage plan ./Llama-3.1-8B --gpu h100-80g --replicas auto --rate 20 --trace azure.csv
  tonnage plan ./Llama-3.1-8B --engine vllm --engine-version 0.11.0 --gpu a100-40g --json
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
    _engine_flags(p.add_argument_group("engine and device"))
    _model_flags(p.add_argument_group("model"))
    _cache_flags(p.add_argument_group("KV cache and batch"))
    _parallel_flags(p.add_argument_group("parallelism and extras"))
    _output_flags(p.add_argument_group("answers and output"))
    return p


_Group = argparse._ArgumentGroup


def _engine_flags(p: _Group) -> None:
    p.add_argument(
        "--engine", metavar="vllm|hf|sglang|llama.cpp",
        help="whose rules and overheads (default: hf; vllm with --gpu or --engine-version)",
    )  # fmt: skip
    p.add_argument("--engine-version", metavar="V", help="rules of this version, for example 0.11.0")
    p.add_argument("--gpu", metavar="NAME|cpu|auto", help="a GPU of the catalogue, or ask this machine")
    p.add_argument("--device", metavar="cpu|cuda", help="default: cpu, or the GPU's")
    p.add_argument("--device-memory", metavar="SIZE", help="for example 79.18GiB (default: the device's own)")
    p.add_argument(
        "--gpu-memory-utilization",
        metavar="SHARE",
        help="share of the device's memory to use (default: 0.9; vllm from 0.21 on 0.92)",
    )
    p.add_argument("--mem-fraction-static", metavar="SHARE", help="sglang: for weights and pool")
    p.add_argument("--swa-full-tokens-ratio", metavar="SHARE", help="sglang (default: 0.8)")
    p.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")


def _model_flags(p: _Group) -> None:
    p.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16 (default: auto)")
    p.add_argument("--quantization", metavar="METHOD", help="int8, nf4, gptq ... (default: the checkpoint's)")
    p.add_argument("--max-model-len", metavar="N", help="longest sequence (default: the model's own)")


def _cache_flags(p: _Group) -> None:
    p.add_argument("--kv-cache-dtype", default="auto", metavar="DTYPE", help="default: auto, the model's dtype")
    p.add_argument("--kv-cache-memory-bytes", metavar="SIZE", help="size of the KV pool, for example 512MiB")
    p.add_argument(
        "--num-gpu-blocks-override", metavar="N", help="vllm: blocks of the pool, whatever the memory"
    )
    p.add_argument("--block-size", metavar="N", help="tokens per KV block (default: 16; vllm on cpu: 128)")
    p.add_argument("--max-num-seqs", metavar="N", help="most sequences running at once")
    p.add_argument("--max-num-batched-tokens", metavar="N", help="most tokens of one step")
    p.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="share blocks of equal prefixes (default: on, where the engine has it on)",
    )


def _parallel_flags(p: _Group) -> None:
    for name, what in (
        ("tensor", "GPUs a layer is divided over"),
        ("pipeline", "GPUs the layers are divided over"),
        ("data", "replicas"),
    ):
        p.add_argument(f"--{name}-parallel-size", metavar="N", help=f"{what} (default: 1)")
    p.add_argument("--enable-expert-parallel", action="store_true", help="whole experts per GPU")
    p.add_argument(
        "--decode-context-parallel-size", metavar="N", help="ranks that divide a sequence's KV cache"
    )
    p.add_argument("--cpu-offload-gb", metavar="GIB", help="GiB of weights per GPU kept in the host's memory")
    p.add_argument("--enable-lora", action="store_true", help="hold LoRA slots")
    p.add_argument("--max-loras", metavar="N", help="slots (default: 1)")
    p.add_argument(
        "--max-lora-rank", metavar="N", help="rank of each slot (default: 16; vllm: 1, 8, 16, 32 ... 512)"
    )
    p.add_argument(
        "--speculative-model", metavar="M", help="draft model, or mtp for the checkpoint's own layers"
    )
    p.add_argument(
        "--num-speculative-tokens", metavar="N", help="tokens drafted a step (default: 1 with a draft)"
    )


def _output_flags(p: _Group) -> None:
    p.add_argument(
        "--target-concurrency", metavar="N", help="find the cheapest GPU and TP that hold N sequences"
    )
    p.add_argument("--sweep", action="store_true", help="quantization x KV dtype x TP x GPU as a table")
    p.add_argument("--explain", action="store_true", help="print every term with its formula and source")
    p.add_argument("--serve-line", action="store_true", help="print only the commands that serve this plan")
    out = p.add_mutually_exclusive_group()
    out.add_argument("--json", action="store_true", help="print one JSON object")
    out.add_argument("--markdown", action="store_true", help="print a Markdown table")
    out.add_argument("--csv", action="store_true", help="print CSV")
    out.add_argument(
        "--emit",
        metavar="FORM",
        help="helm-values, compose-env or k8s-resources: print the deployment's settings",
    )
    p.add_argument("--html", metavar="FILE", help="write a self-contained page with memory bars")


def deployment_from(args: argparse.Namespace) -> Deployment:
    """Flags -> Deployment. Raises DeploymentError naming the flag."""

    def flag(name: str) -> str:
        return "--" + name.replace("_", "-")

    def size(name: str) -> int | None:
        text = getattr(args, name)
        return None if text is None else parse_size(text, flag(name))

    def count(name: str) -> int | None:
        text = getattr(args, name)
        return None if text is None else parse_count(text, flag(name))

    def count_or(name: str, default: int, least: int = 1) -> int:
        text = getattr(args, name)
        return default if text is None else parse_count(text, flag(name), least=least)

    def share(name: str) -> float | None:
        text = getattr(args, name)
        try:
            return None if text is None else float(text)
        except ValueError:
            raise DeploymentError(f"{text!r} is not a number", field=flag(name)) from None

    offload = share("cpu_offload_gb")
    if offload is None:
        offload = 0.0
    if not 0 <= offload < 1 << 20:
        raise DeploymentError(f"{args.cpu_offload_gb!r} is not a size in GiB", field="--cpu-offload-gb")
    ratio = share("swa_full_tokens_ratio")
    return Deployment(
        engine=args.engine or default_engine(args.gpu, args.engine_version),
        engine_version=args.engine_version,
        device=args.device or "cpu",
        gpu=args.gpu,
        device_memory=size("device_memory"),
        gpu_memory_utilization=share("gpu_memory_utilization"),
        dtype=args.dtype,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        max_model_len=count("max_model_len"),
        max_num_seqs=count("max_num_seqs"),
        max_num_batched_tokens=count("max_num_batched_tokens"),
        block_size=count("block_size"),
        kv_cache_memory_bytes=size("kv_cache_memory_bytes"),
        enable_prefix_caching=args.enable_prefix_caching,
        num_gpu_blocks_override=count("num_gpu_blocks_override"),
        tensor_parallel_size=count_or("tensor_parallel_size", 1),
        pipeline_parallel_size=count_or("pipeline_parallel_size", 1),
        data_parallel_size=count_or("data_parallel_size", 1),
        enable_expert_parallel=args.enable_expert_parallel,
        decode_context_parallel_size=count_or("decode_context_parallel_size", 1),
        enforce_eager=args.enforce_eager,
        cpu_offload_bytes=int(offload * GiB),
        enable_lora=args.enable_lora,
        max_loras=count_or("max_loras", 1),
        max_lora_rank=count_or("max_lora_rank", 16),
        speculative_model=args.speculative_model,
        num_speculative_tokens=count_or("num_speculative_tokens", 1 if args.speculative_model else 0, least=0),
        mem_fraction_static=share("mem_fraction_static"),
        swa_full_tokens_ratio=0.8 if ratio is None else ratio,
    )


def check_flags(args: argparse.Namespace, deployment: Deployment) -> None:
    """Raise DeploymentError for flags that contradict each other or need one that was not given."""
    from tonnage.planner.api import check_given  # --help needs nothing of what it reads

    check_given({name: value for name, value in vars(args).items() if value is not None}, deployment)

    def refuse(name: str, why: str, hint: str) -> NoReturn:
        raise DeploymentError(why, field="--" + name.replace("_", "-"), hint=hint)

    many = "sweep" if args.sweep else "target_concurrency" if args.target_concurrency is not None else None
    if args.sweep and args.target_concurrency is not None:
        refuse(
            "sweep", "prints all combinations, --target-concurrency the cheapest that hold so many", "give one"
        )
    for name in ("explain", "serve_line", "emit"):
        if many and getattr(args, name):
            refuse(name, f"is about one plan, --{many.replace('_', '-')} about many", "leave one out")


def run(argv: list[str]) -> int:
    """Run ``tonnage plan`` with ``argv`` (without the sub-command's name). Returns the exit code."""
    try:
        args = parser().parse_args(argv)
        return _answer(args)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except TonnageError as error:
        print(f"tonnage plan: {error}", file=sys.stderr)
        return BAD_INPUT


def _answer(args: argparse.Namespace) -> int:
    # imported here: --help needs none of it
    from tonnage.planner.source.resolve import resolve_model

    deployment = deployment_from(args)
    check_flags(args, deployment)
    if args.sweep or args.target_concurrency is not None:
        from tonnage.planner.sweep.command import run_sweep

        target = args.target_concurrency
        wanted = None if target is None else parse_count(target, "--target-concurrency")
        return run_sweep(resolve_model(args.model), deployment, wanted, args)
    from tonnage.planner.api import plan_or_advise

    plan = plan_or_advise(resolve_model(args.model), deployment)
    if args.html:
        from tonnage.planner.markup import write_page

        write_page(args.html, "Memory plan", plan.html())
    _print(plan, args)
    return FITS if plan.fits else DOES_NOT_FIT


def _print(plan: Plan, args: argparse.Namespace) -> None:
    if args.emit:
        from tonnage.planner.output.emit import emit

        print(emit(plan, args.emit), end="")
    elif args.serve_line:
        from tonnage.planner.planning.advice import serve_lines

        print("\n".join(serve_lines(plan)))
        for note in plan.notes:
            print(f"Note: {note}", file=sys.stderr)
    elif args.json:
        import json

        from tonnage.planner.output.json import plan_to_dict

        result = plan_to_dict(plan)
        if args.explain:
            result["terms"] = [
                {"name": t.name, "value": t.value, "formula": t.formula, "source": t.source} for t in plan.terms
            ]
        print(json.dumps(result, indent=2))
    elif args.markdown or args.csv:
        from tonnage.planner.output.tables import plan_table, print_table

        print_table(plan_table(plan), sys.stdout, markdown=args.markdown)
    else:
        from tonnage.planner.output.terminal import print_plan

        print_plan(plan, args.explain, sys.stdout)
