"""Compare the plans of every stored config with another checkout's plans, to the byte.

    python tests/tools/compare_plans.py OTHER [--configs FOLDER]

``OTHER`` is a second checkout of this repository, for example ``git worktree add ../before REVISION``.

Each side runs in its own process through the command line, which changes less often than the modules. The
commands are ``tonnage plan`` and ``tonnage train`` with ``--json --explain``; rejections are compared too. The
program prints the differences and one final JSON object. The exit code is 1 if there are differences.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "tests" / "data" / "configs"

ALL = ("--target-modules", "all-linear")
SMALL = ("--max-model-len", "256")
VLLM = ("plan", "--engine", "vllm", "--engine-version")
DEPLOYMENTS: tuple[tuple[str, ...], ...] = (
    ("plan", "--device-memory", "64GiB"),
    ("plan", "--device-memory", "64GiB", "--quantization", "nf4", *SMALL),
    ("plan", "--device-memory", "64GiB", "--kv-cache-memory-bytes", "2GiB", "--dtype", "float32", *SMALL),
    (*VLLM, "0.32.0", "--gpu", "h100-80g"),
    (*VLLM, "0.32.0", "--gpu", "h100-80g", "--kv-cache-dtype", "fp8", "--quantization", "fp8", *SMALL),
    (*VLLM, "0.32.0", "--gpu", "h200-141g", "--tensor-parallel-size", "8"),
    (*VLLM, "0.32.0", "--gpu", "a100-40g", "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"),
    (*VLLM, "0.32.0", "--gpu", "h200-141g", "--tensor-parallel-size", "4", "--enable-expert-parallel"),
    (*VLLM, "0.32.0", "--gpu", "h100-80g", "--enable-lora", "--max-loras", "4", "--max-lora-rank", "32"),
    (*VLLM, "0.32.0", "--gpu", "h100-80g", "--cpu-offload-gb", "4", "--enforce-eager"),
    (*VLLM, "0.19.0", "--gpu", "l40s-48g", *SMALL),
    (*VLLM, "0.11.0", "--gpu", "a100-80g"),
    (*VLLM, "0.32.0", "--device", "cpu", "--device-memory", "64GiB", "--block-size", "128"),
    ("plan", "--engine", "sglang", "--engine-version", "0.5.0", "--gpu", "h100-80g"),
    ("plan", "--engine", "llama.cpp", "--gpu", "rtx4090-24g", "--max-model-len", "2048"),
    ("train", "--gpu", "h100-80g"),
    ("train", "--gpu", "h100-80g", "--method", "lora", *ALL, "--checkpointing", "full"),
    ("train", "--gpu", "a100-80g", "--method", "qlora", *ALL, "--attention", "eager", "--micro-batch", "2"),
    ("train", "--gpu", "h100-80g", "--strategy", "zero3", "--gpus", "8", "--optimizer", "adamw-8bit"),
    ("train", "--gpu", "h100-80g", "--strategy", "fsdp", "--gpus", "4", "--precision", "bf16"),
)  # fmt: skip
# Fields that describe the run instead of the plan.
_NOT_COMPARED = ("plan_id", "planner", "tonnage_version")


def dump(configs: Path) -> dict[str, Any]:
    """Return every answer of this process's tonnage: ``"config | flags"`` -> JSON, or the text of a refusal."""
    from tonnage.server.cli import main

    answers: dict[str, Any] = {}
    files = sorted(configs.glob("*.json"))
    with tempfile.TemporaryDirectory() as made:
        for number, path in enumerate(files):
            folder = Path(made) / path.stem
            folder.mkdir()
            (folder / "config.json").write_bytes(path.read_bytes())
            for command, *flags in DEPLOYMENTS:
                out, err = io.StringIO(), io.StringIO()
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                    code = main([command, str(folder), *flags, "--json", "--explain"])
                said = out.getvalue().replace(made, "")
                key = f"{path.stem} | {command} {' '.join(flags)}"
                answers[key] = json.loads(said) if code in (0, 1) else err.getvalue().replace(made, "")
            if sys.stderr.isatty():
                print(f"\r{number + 1} of {len(files)} configs", end="", file=sys.stderr, flush=True)
    return answers


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """Return the differences between two JSON values as ``path: before -> after``."""
    if isinstance(before, dict) and isinstance(after, dict):
        found = []
        for key in sorted(before.keys() | after.keys()):
            if key not in _NOT_COMPARED:
                found += differences(before.get(key), after.get(key), f"{path}.{key}")
        return found
    named = _by_name(before), _by_name(after)
    if named[0] and named[1]:  # the order of terms and lines is not compared
        return differences(*named, path)
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [
            line
            for at, pair in enumerate(zip(before, after, strict=True))
            for line in differences(*pair, f"{path}[{at}]")
        ]
    return [] if before == after else [f"{path}: {_short(before)} -> {_short(after)}"]


def _by_name(value: Any) -> dict[str, Any]:
    """Return a list of named objects as a dict by name and occurrence, or an empty dict for another list."""
    if not isinstance(value, list) or not all(isinstance(item, dict) and "name" in item for item in value):
        return {}
    found: dict[str, Any] = {}
    for item in value:
        name = str(item["name"])
        found[f"{name} {sum(key.rpartition(' ')[0] == name for key in found)}"] = item
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."


def ask(checkout: Path, configs: Path) -> dict[str, Any]:
    """Return the answers of ``dump`` with the packages of ``checkout``."""
    with tempfile.TemporaryDirectory() as side:
        packages = Path(side) / "tonnage"
        packages.mkdir()
        for name in ("planner", "cache", "server"):
            (packages / name).symlink_to(checkout / name)
        code = (
            f"import sys, json; sys.path[:0] = [{side!r}, {str(Path(__file__).parent)!r}]\n"
            "import pathlib, compare_plans, tonnage.planner\n"
            f"assert tonnage.planner.__file__.startswith({side!r}), tonnage.planner.__file__\n"
            f"answers = compare_plans.dump(pathlib.Path({str(configs)!r}))\n"
            f"pathlib.Path({side!r}, 'answers.json').write_text(json.dumps(answers))\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, cwd=side)
        answers: dict[str, Any] = json.loads((Path(side) / "answers.json").read_text())
        return answers


def main() -> int:
    """Compare both checkouts; return 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", metavar="OTHER", type=Path, help="a second checkout")
    parser.add_argument("--configs", metavar="FOLDER", type=Path, default=CONFIGS, help="of config.json files")
    arguments = parser.parse_args()
    checkouts, configs = (arguments.other.resolve(), ROOT), arguments.configs.resolve()
    with ThreadPoolExecutor(2) as both:
        before, after = both.map(lambda checkout: ask(checkout, configs), checkouts)
    compared = {key: differences(before.get(key), after.get(key)) for key in before | after}
    different = {key: found for key, found in compared.items() if found}
    for key, found in different.items():
        print(key)
        print("".join(f"  {line}\n" for line in found[:6]), end="")
    refused = sum(isinstance(answer, str) for answer in after.values())
    print(json.dumps({"answers": len(after), "refused": refused, "different": len(different)}))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
