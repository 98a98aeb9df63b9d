"""``tonnage fit-log FILE... [--model M]``: plan against log, term by term; with many logs, the fitted terms."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from tonnage.planner.engines.log import LogFigures
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.fitlog.read import read_log
from tonnage.planner.flags import add_flags, flags_of, given
from tonnage.planner.planning.build import plan_source
from tonnage.planner.plans import Deployment, Plan
from tonnage.planner.records import dataclass, replace
from tonnage.planner.source.resolve import resolve_model
from tonnage.planner.units import gib

OK, BAD_INPUT = 0, 2
_LEAST_LOGS = 3  # fewer leave nothing to fit on when one is left out
_BYTES = ("weights_bytes", "activation_bytes", "non_torch_bytes", "cuda_graph_bytes", "kv_pool_bytes")
# Flags of tonnage plan that are asked for, and those a log may say.
_ASKED = ("gpu", "device_memory", "engine_version", "tensor_parallel_size")
_LOGGED = (
    "gpu_memory_utilization", "dtype", "kv_cache_dtype", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "block_size", "tensor_parallel_size", "pipeline_parallel_size", "enforce_eager",
    "swa_full_tokens_ratio",
)  # fmt: skip
_FITTED = ("activation_bytes", "non_torch_bytes", "cuda_graph_bytes")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DeploymentError(message, hint=f"{self.prog} --help lists the options")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One log: (term, planned, logged) where both are known, and why others are left out."""

    name: str
    rows: tuple[tuple[str, float, float], ...]
    notes: tuple[str, ...] = ()


def parser() -> argparse.ArgumentParser:
    p = _Parser(
        prog="tonnage fit-log", description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False
    )
    p.add_argument("logs", nargs="+", metavar="FILE", help="start-up log of vLLM, SGLang or llama.cpp")
    p.add_argument("--model", help="folder with config.json or hub id (default: the model the log names)")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    add_flags(p.add_argument_group("where the log does not say it"), Deployment, _ASKED)
    return p


def run(argv: list[str]) -> int:
    """Returns the exit code: 0 compared, 2 bad input."""
    try:
        args = parser().parse_args(argv)
        compared = [compare(read_log(Path(name)), name, args) for name in args.logs]
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except TonnageError as error:
        print(f"tonnage fit-log: {error}", file=sys.stderr)
        return BAD_INPUT
    refit = refit_terms(compared)
    if args.json:
        out = [
            {"log": c.name, "terms": {name: {"planned": p, "logged": v} for name, p, v in c.rows}}
            for c in compared
        ]
        print(json.dumps({"logs": out, "refit": refit}, indent=2))
        return OK
    for comparison in compared:
        _print(comparison)
    if refit:
        print(f"Refitted to {len(compared)} logs, each left out once (factor on the planned term):")
        for name, (factor, before, after) in refit.items():
            print(f"  {name:<18} x {factor:.3f}   median error {100 * before:.1f} % -> {100 * after:.1f} %")
    elif len(compared) > 1:
        print(f"No refit: {_LEAST_LOGS} logs with the same term are the least.")
    return OK


def compare(found: LogFigures, name: str, args: argparse.Namespace) -> Comparison:
    """Plan what the log's engine was started with. Raises TonnageError naming what is missing."""
    model = args.model or found.model
    if model is None:
        raise DeploymentError("the log does not name its model", field="--model", hint=f"{name} needs it")
    plan = plan_source(resolve_model(model), deployment_of(found, args))
    planned = planned_figures(plan)
    notes = []
    logged = found.flags.get("quantization")
    if why := engine_of(plan.deployment.engine).unlike_logged(plan, logged):
        planned.pop("weights_bytes", None)
        notes.append(f"weights not compared: {why}")
    if args.gpu is None and args.device_memory is None and "device_bytes" not in found.figures:
        left = [key for key in _FITTED if planned.pop(key, None) and key in found.figures]
        if left:
            notes.append(f"{', '.join(left)} not compared: they depend on the GPU (--gpu)")
    rows = [(key, planned[key], found.figures[key]) for key in planned if key in found.figures]
    return Comparison(name, tuple(rows), tuple(notes))


def deployment_of(found: LogFigures, args: argparse.Namespace) -> Deployment:
    """Flags the log printed. The pool is the log's own where the device's memory is not known."""
    asked = given(args, Deployment)
    if "gpu" not in asked and "device_bytes" in found.figures:
        asked.setdefault("device_memory", int(found.figures["device_bytes"]))
    if found.version is not None:
        asked.setdefault("engine_version", found.version)
    said = {name: value for name in _LOGGED if (value := _logged(name, found.flags.get(name))) is not None}
    if length := found.figures.get("max_model_len"):
        said["max_model_len"] = int(length)
    flags = Deployment(**{"engine": found.engine or "vllm", "device": "cuda", **asked, **said})
    memory = flags.device_memory
    if engine_of(flags.engine).sized_by_context:  # allocates the context it was given, whatever the device has
        if flags.max_model_len is None:
            raise DeploymentError(
                "the log says neither n_ctx nor the cells of a cache",
                field="n_ctx",
                hint="give all of its start",
            )
        return replace(flags, device_memory=memory or 1 << 50)
    if args.gpu is None and memory is None:
        pool = int(found.figures.get("kv_pool_bytes", 0))
        if pool <= 0:
            what = f"prints a pool of {gib(pool)}" if pool else "prints no pool"
            raise DeploymentError(f"needed: the log {what}", field="--gpu", hint="or --device-memory")
        flags = replace(flags, device_memory=1 << 50, kv_cache_memory_bytes=pool)
    return flags


def _logged(name: str, text: str | None) -> Any:
    """The value of a flag that a log says; None for one that is no number."""
    flag = flags_of(Deployment)[name]
    if text is None or (flag.kind == "int" and not text.isdigit()):
        return None
    return text == "True" if flag.kind == "bool" else flag.read(text)


def planned_figures(plan: Plan) -> dict[str, float]:
    rank, cache = plan.rank, plan.kv_cache
    given = plan.deployment.kv_cache_memory_bytes is not None
    out: dict[str, float] = {
        "weights_bytes": rank.weights_bytes + rank.lora_bytes,
        "activation_bytes": rank.activation_bytes,
        "non_torch_bytes": rank.framework_bytes,
        "cuda_graph_bytes": rank.cuda_graph_bytes,
        "num_blocks": cache.num_blocks,
        "tokens": cache.tokens,
        "max_concurrency": cache.max_concurrency,
    }
    if not given:
        out["kv_pool_bytes"] = rank.kv_pool_bytes
    return {key: value for key, value in out.items() if value}


def refit_terms(compared: Sequence[Comparison]) -> dict[str, tuple[float, float, float]]:
    """term -> (factor that fits all logs, median error as planned, median error of logs left out)."""
    out = {}
    for name in _FITTED:
        pairs = [(p, v) for c in compared for key, p, v in c.rows if key == name and p > 0 and v > 0]
        if len(pairs) < _LEAST_LOGS:
            continue
        before = median(abs(p - v) / v for p, v in pairs)
        after = []
        for i, (planned, logged) in enumerate(pairs):
            factor = median(v / p for j, (p, v) in enumerate(pairs) if j != i)
            after.append(abs(planned * factor - logged) / logged)
        out[name] = (median(v / p for p, v in pairs), before, median(after))
    return out


def _print(comparison: Comparison) -> None:
    print(f"{comparison.name}:")
    if comparison.rows:
        print(f"  {'term':<18}{'planned':>18}{'logged':>18}{'difference':>12}")
    for name, planned, logged in comparison.rows:
        share = f"{100 * (planned - logged) / logged:+.2f} %" if logged else ""
        print(f"  {name:<18}{_shown(name, planned):>18}{_shown(name, logged):>18}{share:>12}")
    for note in comparison.notes:
        print(f"  {note}")


def _shown(name: str, value: float) -> str:
    return gib(int(value)) if name in _BYTES else f"{value:,.2f}".rstrip("0").rstrip(".")
