"""Compare the planner with every public figure in the repository, section by section.

    python benchmarks/planner_accuracy.py [--sections ...] [--json]
    python benchmarks/planner_accuracy.py --configs DIR --truth param_truth.tsv
        --checkpoints checkpoint_sizes.tsv --vllm vllm_kv_truth.tsv --reports field_reports.jsonl
        --receipts measured_receipts.tsv --startups startups_vllm_0190.jsonl --json

Without inputs, it uses the copies in tests/data. Each input is optional, and a section without its inputs is
left
out. Each section is a module of ``benchmarks/accuracy`` with ``NAME`` and ``score(inputs) -> Section | None``.
Importing transformers is blocked before planning, so no figure comes from an instantiated model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib import import_module
from pathlib import Path

SECTIONS = (
    "weights", "kv", "vllm_blocks", "tokens_given_pool", "pool_from_flags", "model_load", "llama_cpp",
    "sglang", "startups", "published",
)  # fmt: skip

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
COPIES = {
    "configs": DATA / "configs",
    "truth": DATA / "configs/param_truth.tsv",
    "checkpoints": DATA / "configs/checkpoint_sizes.tsv",
    "vllm": DATA / "configs/vllm_kv_truth.tsv",
    "reports": DATA / "field_reports.jsonl",
    "receipts": DATA / "training/measured_receipts.tsv",
    "startups": DATA / "startups/vllm_0190.jsonl",
    "published": DATA / "startups/published.jsonl",
}


def main() -> int:
    """Score the selected sections and print them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, what in (
        ("configs", "folder of <org>__<model>/config.json (or <org>__<model>.json)"),
        ("truth", "parameter counts (TSV)"),
        ("checkpoints", "sizes of published checkpoints (TSV)"),
        ("vllm", "allocations of vLLM's own functions (TSV)"),
        ("reports", "start-up reports of real engines (JSON lines)"),
        ("receipts", "published measurements (TSV)"),
        ("startups", "start-ups with every term logged (JSON lines)"),
        ("published", "start-ups that no coefficient was fitted to (JSON lines)"),
    ):
        parser.add_argument(f"--{name}", type=Path, help=what)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    options = parser.parse_args()
    sys.modules["transformers"] = None  # type: ignore[assignment]
    from accuracy.common import Inputs

    given = {name: path for name in COPIES if (path := getattr(options, name)) is not None}
    inputs = Inputs(**(given or COPIES))
    out = {}
    for name in options.sections:
        try:
            module = import_module(f"accuracy.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"accuracy.{name}":
                raise
            continue
        begun = time.process_time()
        section = module.score(inputs)
        if section is None:
            continue
        out[name] = section.to_json()
        if not options.json:
            print(f"{name}: {time.process_time() - begun:.1f} s\n{json.dumps(out[name], indent=1)}")
    print(json.dumps(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
