"""Compare peaks of published training runs with ``tonnage train``'s formulas.

    python benchmarks/training_accuracy.py --receipts tests/data/training/measured_receipts.tsv --json
    python benchmarks/training_accuracy.py --stacks tests/data/training/published_stacks.tsv
    python benchmarks/training_accuracy.py --activations

--receipts scores the rows whose quantity is ``peak torch memory, bf16 b=B s=S sdpa|eager full|lora=R pure|amp
[ckpt]``
of a run marked ``(train)``. No formula is fitted, so no model is scored by terms that were tuned to it. The
peer's own
prediction, printed in the row, is scored too.

--stacks compares ``tonnage train --stack`` with totals that the stacks publish. Each row's settings are the
flags in its column; ``conditions`` names the settings that its source does not state. A row is covered if its
total, to the last printed digit, is inside the plan's interval. ``allocator`` marks totals of torch's
allocator, without CUDA's context and paged states. Calculated rows are listed and not scored. The benchmark
fails if a total lies above its interval, because the plan is then too small.

--activations compares by model type the planned bytes that a step keeps for its backward pass with the bytes
that autograd kept of a tiny real model on this machine (tests/helpers/training_rows.py; torch and
transformers; a minute). A type is exact within 0.05 % in six modes, or estimated and inside its plan's
interval. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from tonnage.planner.errors import TonnageError
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.training.activations import ESTIMATE_HIGH, ESTIMATE_LOW
from tonnage.planner.training.build import Planner
from tonnage.planner.training.model import model_from
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.sweep import parse_axis

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (ROOT / "tests" / "data" / "configs", ROOT / "tests" / "data" / "training")
LIMIT = 0.03
EXACT = 0.0005
_SETTING = re.compile(
    r"peak torch memory, (?P<dtype>bf16) b=(?P<batch>\d+) s=(?P<length>\d+) (?P<attention>sdpa|eager|flash) "
    r"(?:full|lora=(?P<rank>\d+)) (?P<precision>pure|amp)(?P<ckpt> ckpt)?"
)
_OUTSIDE_TORCH = ("CUDA context", "NCCL buffers")  # max_memory_allocated sees the caching allocator only


def config_of(model: str, folders: list[Path]) -> dict[str, Any] | None:
    """Return the config of a model named without its organization, from the first folder that has it."""
    for folder in folders:
        candidates = [folder / f"{model}.json"]
        candidates += sorted(folder.glob(f"*__{model}.json")) + sorted(folder.glob(f"*__{model}/config.json"))
        candidates += sorted(folder.glob(f"*__Meta-{model}.json")) + sorted(
            folder.glob(f"*__Meta-{model}/config.json")
        )
        for path in candidates:
            if path.is_file():
                return dict(json.loads(path.read_text()))
    return None


def setup_of(match: re.Match[str]) -> TrainingSetup:
    """Return the conditions of a run (bench.py of vramcalc 0.1.2).

    They are torch AdamW with foreach kernels, adapters on q, k, v and o, an fp32 base under autocast, and
    transformers
    4.57, which passes SDPA an explicit mask.
    """
    lora = match["rank"] is not None
    pure = match["precision"] == "pure"
    return TrainingSetup(
        method="lora" if lora else "full",
        rank=int(match["rank"] or 16),
        target_modules=("q_proj", "k_proj", "v_proj", "o_proj") if lora else None,
        precision="bf16" if pure else "bf16-mixed",
        base_dtype=None if pure else "fp32",
        attention=match["attention"],
        materialized_mask=match["attention"] == "sdpa",
        micro_batch=int(match["batch"]),
        sequence_length=int(match["length"]),
        checkpointing="full" if match["ckpt"] else "none",
    )


def score(row: dict[str, str], folders: list[Path]) -> dict[str, Any] | None:
    """Return the result of one row, or None if it is no training run of this format."""
    match = _SETTING.fullmatch(row["quantity"])
    if match is None or "(train)" not in row["engine"]:
        return None
    out: dict[str, Any] = {"model": row["model"], "setting": match[0].partition(", ")[2]}
    config = config_of(row["model"], folders)
    if config is None:
        return {**out, "miss": "no config of that model"}
    try:
        plan = Planner(model_from(row["model"], build_architecture(config))).plan(setup_of(match))
    except TonnageError as error:
        return {**out, "miss": str(error)}
    measured = float(row["value"]) * 1e9
    ours = sum(x.bytes for x in plan.lines if x.place == "gpu" and x.name not in _OUTSIDE_TORCH)
    out |= {"measured_gb": measured / 1e9, "planned_gb": round(ours / 1e9, 3), "error": ours / measured - 1}
    out["moment"] = plan.moment
    peer = re.search(r"predicted ([\d.]+) GB", row["raw_receipt"])
    if peer:
        out["peer_error"] = float(peer[1]) * 1e9 / measured - 1
    return out


def summary(rows: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """Return the errors of all rows under ``key``."""
    errors = [abs(row[key]) for row in rows if key in row]
    return {
        "scored": len(errors),
        "median_error": round(statistics.median(errors), 5) if errors else None,
        "worst_error": round(max(errors), 5) if errors else None,
        "misses": sum(error > LIMIT for error in errors),
    }


def kept_by_autograd(models: Any, row: str) -> dict[str, Any]:
    """Return a tiny model's planned and kept bytes in every mode, and the mode with the largest error."""
    modes = []
    for precision in ("fp32", "bf16", "bf16-mixed"):
        for attention in ("sdpa", "eager"):
            real = models.real_model(row, attention, "bfloat16" if precision == "bf16" else "float32")
            kept = models.saved_bytes(real, 2, 96, autocast=precision == "bf16-mixed")
            setup = TrainingSetup(precision=precision, attention=attention)
            planned = models.planned_bytes(row, setup, frozenset(), 2, 96)
            modes.append({"mode": f"{precision} {attention}", "planned": planned, "kept": kept})
    worst = max(modes, key=lambda mode: abs(mode["planned"] / mode["kept"] - 1))
    estimated = bool(models.training_model(row).estimated)
    low, high = (ESTIMATE_LOW, ESTIMATE_HIGH) if estimated else (1 - EXACT, 1 + EXACT)
    held = all(mode["planned"] * low <= mode["kept"] <= mode["planned"] * high for mode in modes)
    return {"row": row, "estimated": estimated, "held": held, "worst": worst, "modes": modes}


def stack_row(row: dict[str, str], folders: list[Path]) -> dict[str, Any]:
    """Return the plan for one published total of a stack."""
    given: dict[str, Any] = {"stack": row["stack"], "gpus": int(row["gpus"])}
    for part in row["setting"].split():
        name, values = parse_axis(part)
        given[name] = values[0]
    config = config_of(row["model"], folders)
    assert config is not None, row["model"]
    plan = Planner(model_from(row["model"], build_architecture(config))).plan(TrainingSetup(**given))
    outside = set(_OUTSIDE_TORCH) if row["allocator"] == "yes" else set()
    if row["allocator"] == "yes" and given.get("optimizer", "").startswith("paged"):
        outside.add("optimizer states")  # cudaMallocManaged, by bitsandbytes
    lines = [line for line in plan.lines if line.place == "gpu" and line.name not in outside]
    unit = {"GiB": 2**30, "GB": 10**9}[row["unit"]]
    planned, low, high = (sum(getattr(line, k) for line in lines) / unit for k in ("bytes", "low", "high"))
    published = float(row["published"])
    last = 0.5 * 10 ** -len(row["published"].partition(".")[2])  # half of the last digit printed
    return {
        "stack": row["stack"] + (f", {row['gpus']} GPUs" if row["gpus"] != "1" else ""),
        "model": row["model"], "setting": row["setting"], "source": row["source"],
        "conditions": row["conditions"], "measured": row["measured"] == "yes", "unit": row["unit"],
        "published": published, "planned": round(planned, 2), "low": round(low, 2), "high": round(high, 2),
        "error": round(planned / published - 1, 4), "covered": low - last <= published <= high + last,
        "above_the_interval": published > high + last,
        "moment": plan.moment,
    }  # fmt: skip


def stacks(path: Path, folders: list[Path], json_only: bool) -> int:
    """Score all published totals; return 1 if one lies above its interval."""
    with path.open() as file:
        rows = [stack_row(row, folders) for row in csv.DictReader(file, delimiter="\t")]
    scored = [row for row in rows if row["measured"]]
    if not json_only:
        for row in rows:
            inside = ("covered" if row["covered"] else "OUTSIDE") if row["measured"] else "not scored"
            print(
                f"{row['stack']:<18}{row['model']:<14}{row['published']:>7} {row['unit']:<4}{row['planned']:>8}"
                f" ({row['low']} to {row['high']}){100 * row['error']:>+7.1f} %  {inside:<11}{row['setting']}"
            )
    by_stack = {}
    for name in dict.fromkeys(row["stack"] for row in scored):
        errors = [abs(row["error"]) for row in scored if row["stack"] == name]
        by_stack[name] = {
            "rows": len(errors), "mean_error": round(statistics.mean(errors), 4),
            "median_error": round(statistics.median(errors), 4), "worst_error": max(errors),
        }  # fmt: skip
    covered = sum(row["covered"] for row in scored)
    above = sum(row["above_the_interval"] for row in scored)  # planned too small
    counts = {"scored": len(scored), "covered": covered, "above_the_interval": above}
    print(json.dumps({**counts, "stacks": by_stack, "rows": rows}))
    return 0 if scored and not above else 1


def activations(json_only: bool, chosen: list[str]) -> int:
    """Compare planned and kept activations by model type; return 1 if one misses."""
    sys.path.append(str(ROOT / "tests" / "helpers"))
    import training_models as models

    rows = []
    for row in models.ROWS:
        if chosen and row.partition("-")[0] not in chosen:
            continue
        rows.append(found := kept_by_autograd(models, row))
        worst = found["worst"]
        error = f"{100 * (worst['planned'] / worst['kept'] - 1):+.3f} %"
        state = ("estimated" if found["estimated"] else "exact") + ("" if found["held"] else ", MISSED")
        if not json_only:
            print(
                f"{row:<20}{worst['mode']:<18}{worst['planned']:>12,}{worst['kept']:>12,}{error:>12}  {state}"
            )
    types = {"exact": set(), "estimated": set()}
    for found in rows:
        types["estimated" if found["estimated"] else "exact"].add(found["row"].partition("-")[0])
    types["exact"] -= types["estimated"]  # a type is exact only if all its rows are
    missed = [found["row"] for found in rows if not found["held"]]
    named = {name: sorted(found) for name, found in types.items()}
    counts = {"exact_types": len(named["exact"]), "estimated_types": len(named["estimated"])}
    print(json.dumps({**counts, "missed": missed, **named, "rows": rows}))
    return 1 if missed or not rows else 0


def main() -> int:
    """Run the selected comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--receipts", type=Path, help="TSV as tests/data/training/measured_receipts.tsv")
    what.add_argument("--stacks", type=Path, help="TSV as tests/data/training/published_stacks.tsv")
    what.add_argument("--activations", action="store_true", help="compare by model type, measured here")
    parser.add_argument("--types", nargs="+", default=[], help="with --activations: only these model types")
    parser.add_argument("--configs", type=Path, help="additional folder of configs, searched first")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    options = parser.parse_args()
    if options.activations:
        return activations(options.json, options.types)
    folders = ([options.configs] if options.configs else []) + list(FOLDERS)
    if options.stacks:
        return stacks(options.stacks, folders, options.json)
    try:
        with options.receipts.open() as file:
            receipts = list(csv.DictReader(file, delimiter="\t"))
    except OSError as error:
        print(f"{options.receipts}: {error.strerror}", file=sys.stderr)
        return 2
    rows = [found for row in receipts if (found := score(row, folders)) is not None]
    ours = summary(rows, "error")
    ours["misses"] += sum("miss" in row for row in rows)
    if not options.json:
        for row in rows:
            error = f"{100 * row['error']:+.2f} %" if "error" in row else row["miss"]
            print(f"{row['model']:<16}{row['setting']:<42}{error:>10}  {row.get('moment', '')}")
    print(
        json.dumps(
            {"rows": len(rows), **ours, "peer": {"vramcalc 0.1.2": summary(rows, "peer_error")}, "runs": rows}
        )
    )
    return 0 if rows and not ours["misses"] else 1


if __name__ == "__main__":
    sys.exit(main())
