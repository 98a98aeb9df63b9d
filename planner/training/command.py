"""``tonnage train``: the training planner's command line."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.training import setup as s
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.units import parse_count, parse_size

if TYPE_CHECKING:
    from tonnage.planner.training.tricks import Trick

FITS, DOES_NOT_FIT, BAD_INPUT = 0, 1, 2

_EPILOG = """
exit codes: 0 it fits (or no device was named), 1 it does not, 2 bad input.

examples:
  tonnage train ./Llama-3.1-8B --gpu a100-80g --strategy zero3 --gpus 8
  tonnage train ./Llama-3.1-8B --method qlora --gpu rtx-4090 --find sequence-length
  tonnage train ./Llama-3.1-8B --gpu a100-80g --tricks
  tonnage train ./Llama-3.1-8B --sweep micro-batch=1,2,4,8 --sweep checkpointing=none,full --json
  tonnage train ./Llama-3.1-8B --strategy zero3 --gpus 8 --emit deepspeed > deepspeed.json
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DeploymentError(message, hint=f"{self.prog} --help lists the options")


# flag, metavar or choices, help; the setup's field is the flag's name
_TEXT: tuple[tuple[str, str, str], ...] = (
    ("method", "|".join(s.METHODS), "what is trained (default: full)"),
    ("precision", "|".join(s.PRECISIONS), "default: bf16-mixed"),
    (
        "convention",
        "|".join(s.CONVENTIONS),
        "where mixed precision keeps fp32 copies (default: the framework's)",
    ),
    ("optimizer", "|".join(s.OPTIMIZERS), "default: adamw"),
    (
        "optimizer-kernel",
        "|".join(s.KERNELS),
        "default: foreach; fused by DeepSpeed or with an fp32 master",
    ),
    ("gradient-dtype", "fp32|bf16|fp16", "default: the convention's"),
    ("base-dtype", "fp32|bf16|fp16", "frozen weights (default: 16-bit)"),
    ("base-quantization", "|".join(s.BASES), "of qlora (default: nf4-double)"),
    ("checkpointing", "|".join(s.CHECKPOINTING), "recomputed activations (default: none)"),
    ("attention", "|".join(s.ATTENTION), "default: flash"),
    ("loss", "|".join(s.LOSSES), "full logits, or chunks as Liger's kernel (default: full)"),
    ("strategy", "|".join(s.STRATEGIES), "default: ddp"),
    ("offload-optimizer", "|".join(s.PLACES), "optimizer states and gradients"),
    ("offload-param", "|".join(s.PLACES), "weights"),
)
_NUMBERS: tuple[tuple[str, str], ...] = (
    ("rank", "LoRA rank (default: 16)"),
    ("trainable-layers", "freeze: last layers that are trained (default: 2)"),
    ("micro-batch", "sequences per rank and forward pass (default: 1)"),
    ("sequence-length", "tokens (default: 2,048, or the model's length if shorter)"),
    ("gradient-accumulation", "forward passes per optimizer step (default: 1)"),
    ("checkpoint-segments", "segments of full checkpointing (default: one a layer)"),
    ("gpus", "GPUs per node (default: 1)"),
    ("nodes", "default: 1"),
    ("shard-size", "ranks of one fsdp-hybrid group (default: one node)"),
    ("fsdp-version", "1 or 2 (default: 2)"),
    ("tensor-parallel", "default: 1"),
    ("pipeline-parallel", "default: 1"),
    ("pipeline-micro-batches", "micro-batches in flight at most (default: gradient accumulation)"),
    ("context-parallel", "ranks that share one sequence (default: 1)"),
    ("expert-parallel", "ranks that share the experts (default: 1)"),
    ("hpz-partition-size", "ZeRO++ secondary partition, usually --gpus (default: 1)"),
    ("bucket-elements", "DeepSpeed reduce_bucket_size (default: 500,000,000)"),
)
_SWITCHES: tuple[tuple[str, str], ...] = (
    ("packing", "several documents in one sequence"),
    ("materialized-mask", "SDPA is given an explicit mask (transformers 4.56 and 4.57)"),
    ("offload-activations", "kept activations on the CPU"),
    ("sequence-parallel", "share norms and residuals out over tensor-parallel ranks"),
    ("partition-activations", "ZeRO-R: checkpoints over tensor-parallel ranks"),
    ("quantized-weights", "ZeRO++ qwZ: int8 all-gather"),
    ("quantized-gradients", "ZeRO++ qgZ: int4 reduction"),
    ("gradient-as-bucket-view", "DDP: no second copy of the gradients"),
)


def parser() -> argparse.ArgumentParser:
    p = _Parser(
        prog="tonnage train",
        description="Say what training a model needs on GPU, CPU and NVMe, and what would make it fit.",
        epilog=_EPILOG,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=100),
        allow_abbrev=False,
    )
    p.add_argument("model", metavar="MODEL", help="demo, a folder with config.json or a hub id")
    for name, metavar, text in _TEXT:
        p.add_argument("--" + name, metavar=metavar, help=text)
    p.add_argument(
        "--target-modules", metavar="A,B", help="modules with adapters, or all-linear (default: PEFT's)"
    )
    for name, text in _NUMBERS:
        p.add_argument("--" + name, metavar="N", help=text)
    for name, text in _SWITCHES:
        p.add_argument("--" + name, action="store_true", default=None, help=text)
    p.add_argument("--no-zero-init", dest="zero_init", action="store_false", default=None,
                   help="every rank builds the whole model first")  # fmt: skip
    p.add_argument(
        "--no-loss-scaling", dest="loss_scaling", action="store_false", default=None, help="fp16-mixed"
    )
    p.add_argument("--gpu", metavar="NAME", help="a GPU of the catalogue: its memory")
    for name in ("device-memory", "cpu-memory", "nvme"):
        p.add_argument("--" + name, metavar="SIZE", help="of one GPU" if name[0] == "d" else "of one node")
    p.add_argument("--intra-node", metavar="SPEED", help="nvlink3|nvlink4|nvlink5|pcie3|pcie4|pcie5 or 300GB/s")
    p.add_argument("--inter-node", metavar="SPEED", help="per node: hdr|ndr|xdr|efa|100gbe or 400Gbps")
    p.add_argument("--network-share", metavar="SHARE", help="of the specification (default: 0.8)")
    p.add_argument("--find", metavar="micro-batch|sequence-length", help="the largest that fits")
    p.add_argument("--tricks", action="store_true", help="rank what would make it fit")
    p.add_argument("--emit", metavar="deepspeed|accelerate|trainer|peft", help="print that configuration")
    p.add_argument("--sweep", metavar="FLAG=A,B", action="append", help="every combination (repeatable)")
    p.add_argument("--html", metavar="FILE", help="write the plan as one HTML file")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument("--explain", action="store_true", help="print every line with its formula and source")
    return p


def parse_speed(text: str, field: str) -> int:
    """``ndr``, ``nvlink4``, ``400Gbps``, ``50GB/s`` -> bytes per second. Raises DeploymentError."""
    from tonnage.planner.training.communication import LINKS, NETWORKS

    low = text.strip().lower()
    if low in NETWORKS:
        return NETWORKS[low]
    if low in LINKS:
        return LINKS[low] * 10**9 // 8
    for suffix, factor in (("gbps", 10**9 / 8), ("gbit/s", 10**9 / 8), ("gb/s", 10**9)):
        number = low.removesuffix(suffix)
        if number != low and number.strip().replace(".", "", 1).isdecimal() and float(number) > 0:
            return int(float(number) * factor)
    known = ", ".join([*NETWORKS, *LINKS])
    raise DeploymentError(f"{text[:40]!r} is not a speed", field=field, hint=f"{known}, 400Gbps or 50GB/s")


def setup_from(args: argparse.Namespace) -> TrainingSetup:
    """Flags -> TrainingSetup. Raises DeploymentError naming the flag."""
    values: dict[str, Any] = {}
    for name, _, _ in _TEXT:
        values[name.replace("-", "_")] = getattr(args, name.replace("-", "_"))
    for name, _ in _NUMBERS:
        text = getattr(args, name.replace("-", "_"))
        values[name.replace("-", "_")] = None if text is None else parse_count(text, "--" + name)
    for name, _ in _SWITCHES:
        values[name.replace("-", "_")] = getattr(args, name.replace("-", "_"))
    for name in ("zero_init", "loss_scaling"):
        values[name] = getattr(args, name)
    for name in ("device_memory", "cpu_memory", "nvme"):
        text = getattr(args, name)
        values[name] = None if text is None else parse_size(text, "--" + name.replace("_", "-"))
    for name in ("intra_node", "inter_node"):
        text = getattr(args, name)
        values[name] = None if text is None else parse_speed(text, "--" + name.replace("_", "-"))
    if args.target_modules is not None:
        values["target_modules"] = tuple(
            part.strip() for part in args.target_modules.split(",") if part.strip()
        )
    if args.network_share is not None:
        try:
            values["network_share"] = float(args.network_share)
        except ValueError:
            raise DeploymentError(f"{args.network_share!r} is not a number", field="--network-share") from None
    if args.gpu is not None:
        if values["device_memory"] is not None:
            raise DeploymentError("contradicts --device-memory", field="--gpu", hint="give one of them")
        from tonnage.planner.devices.find import find_gpu

        values["device_memory"] = find_gpu(args.gpu).memory_bytes
    known = set(TrainingSetup.__annotations__)
    return TrainingSetup(**{k: v for k, v in values.items() if v is not None and k in known})


def run(argv: list[str]) -> int:
    """Run ``tonnage train`` with ``argv`` (without the sub-command's name). Returns the exit code."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except TonnageError as error:
        return _refuse(error)
    try:
        return _run(args)
    except TonnageError as error:
        return _refuse(error)


def _run(args: argparse.Namespace) -> int:
    # imported here: --help needs none of it
    from tonnage.planner.training.build import Planner
    from tonnage.planner.training.model import load_training_model

    setup = setup_from(args)
    planner = Planner(load_training_model(args.model))
    if args.sweep:
        return _sweep(args, planner, setup)
    found = None
    if args.find:
        from tonnage.planner.training.search import FIELDS, largest

        field = args.find.replace("-", "_")
        if field not in FIELDS:
            raise DeploymentError(f"{args.find!r} is not micro-batch or sequence-length", field="--find")
        found = largest(planner, setup, field)
        setup = found.plan.setup
    plan = found.plan if found else planner.plan(setup)
    if args.emit:
        from tonnage.planner.training.emit import emit

        print(emit(args.emit, plan, planner.model.architecture.model_type))
        return FITS
    rows: tuple[Trick, ...] = ()
    if args.tricks:
        from tonnage.planner.training.tricks import tricks

        rows = tricks(planner, setup)
    if args.html:
        from tonnage.planner.training.html import page

        try:
            with open(args.html, "w", encoding="utf-8") as file:
                file.write(page(plan, rows))
        except OSError as error:
            raise DeploymentError(f"{args.html}: {error.strerror}", field="--html") from None
    from tonnage.planner.training import render

    if args.json:
        import json

        result = render.plan_to_dict(plan, args.explain)
        if found:
            result["largest"] = {"field": found.field, "value": found.value, "aligned": found.aligned}
        if args.tricks:
            result["tricks"] = [_trick(t) for t in rows]
        print(json.dumps(result, indent=2))
    else:
        render.print_plan(plan, args.explain, sys.stdout)
        if found:
            aligned = f" ({found.aligned:,} as a multiple of {found.multiple})" if found.aligned else ""
            print(f"Largest {args.find} that fits: {found.value:,}{aligned}")
        for line in render.trick_lines(rows) if rows else ():
            print(line)
        if plan.fits is False and not rows:
            print("--tricks ranks what would make it fit.")
    return DOES_NOT_FIT if plan.fits is False else FITS


def _trick(trick: Any) -> dict[str, Any]:
    from tonnage.planner.records import asdict

    return {**asdict(trick), "changes": dict(trick.changes)}


def _sweep(args: argparse.Namespace, planner: Any, setup: TrainingSetup) -> int:
    from tonnage.planner.training.sweep import parse_axis, sweep

    axes = [parse_axis(text) for text in args.sweep]
    names = [name for name, _ in axes]
    rows = sweep(planner, setup, axes)
    if args.json:
        import json

        print(json.dumps({
            "fields": names,
            "rows": [
                {"values": list(r.values), "gpu_bytes": r.gpu_bytes, "cpu_bytes": r.cpu_bytes,
                 "nvme_bytes": r.nvme_bytes, "fits": r.fits, "refused": r.refused}
                for r in rows
            ],
        }))  # fmt: skip
        return FITS
    print("\t".join([*names, "gpu_bytes", "cpu_bytes", "nvme_bytes", "fits"]))
    for r in rows:
        values = [str(v) for v in r.values]
        tail = (
            [f"refused: {r.refused}"]
            if r.refused
            else [str(r.gpu_bytes), str(r.cpu_bytes), str(r.nvme_bytes), str(r.fits)]
        )
        print("\t".join(values + tail))
    return FITS


def _refuse(error: TonnageError) -> int:
    print(f"tonnage train: {error}", file=sys.stderr)
    return BAD_INPUT
