"""One command that says in eight minutes whether Tonnage holds on this machine's GPU.

    python benchmarks/gpu_check.py --html gpu.html               a checkout, no installation
    python benchmarks/gpu_check.py --device cpu --json           the same steps on small models
    python benchmarks/gpu_check.py --steps attention memory

It needs Python 3.11 or 3.12, torch 2.11, transformers 5.17, numba, safetensors and tokenizers; no network, no
FastAPI, no vLLM. A measurement that needs more is skipped, and its row names the package. Models are made on
the spot with random weights.

Each step runs in a child process with a time limit, and a step that fails does not end the others. Rows are
printed as they are measured: `ok`, `off` (outside the plan, or unequal), `info`, `skipped` or `failed`. The
last line is one JSON object. The exit code is 1 if a step failed or a row is off (docs/gpu.md).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
import types
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("torch", "transformers", "numba", "safetensors", "tokenizers")
NAMES = (
    "device", "first-step", "attention", "memory", "host", "engine", "out-of-memory", "formats", "vllm",
)  # fmt: skip
# vLLM on a CPU takes minutes for its start alone, so a check of the CPU runs it only by name.
ON_CPU = tuple(name for name in NAMES if name != "vllm")


def import_checkout() -> None:
    """Make the checkout importable as ``tonnage``, whether or not the project is installed."""
    package = types.ModuleType("tonnage")
    package.__path__ = [str(ROOT), str(ROOT / "planner" / "_tonnage")]
    package.__file__ = str(ROOT / "planner" / "_tonnage" / "__init__.py")
    exec(compile(Path(package.__file__).read_text(), package.__file__, "exec"), package.__dict__)
    sys.modules["tonnage"] = package
    if importlib.util.find_spec("xxhash") is None:
        from gpu_check import hashes

        sys.modules["xxhash"] = hashes  # type: ignore[assignment]


def parsed() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: cuda if torch finds a GPU, else cpu"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="no step begins after this time (8)")
    parser.add_argument("--steps", nargs="+", choices=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--html", metavar="FILE", help="also write a page")
    parser.add_argument("--json", action="store_true", help="print only the last line on stdout")
    parser.add_argument("--models", metavar="FOLDER", type=Path, help="keep the random models in this folder")
    parser.add_argument("--model", metavar="FOLDER", type=Path, help="a real model for the attention step")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Run the check and return its exit code."""
    arguments = parsed()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"gpu_check: {', '.join(missing)} not installed: pip install {' '.join(NEEDED)}", file=sys.stderr)
        return 2
    import_checkout()
    device = arguments.device or default_device()
    names = arguments.steps or list(ON_CPU if device == "cpu" else NAMES)
    if arguments.child:
        from gpu_check.steps import child

        child(names, device, arguments.models, arguments.model)
        return 0
    if device == "cuda" and default_device() != "cuda":
        print("gpu_check: torch finds no CUDA device here; --device cpu runs the same steps", file=sys.stderr)
        return 2
    return check(arguments, device, names)


def default_device() -> str:
    """Return ``cuda`` if torch finds a GPU, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def check(arguments: argparse.Namespace, device: str, names: list[str]) -> int:
    """Run the steps in child processes, print their rows, and return the exit code."""
    from gpu_check.processes import Check, Outcome
    from gpu_check.rows import Row

    shown = sys.stderr if arguments.json else sys.stdout

    def tell(step: str, found: Row | Outcome) -> None:
        if isinstance(found, Row):
            print(f"  {found.text()}", file=shown, flush=True)
        else:
            why = f": {found.why}" if found.why else ""
            print(f"{step}: {found.status} in {found.seconds:.1f} s{why}", file=shown, flush=True)

    with tempfile.TemporaryDirectory(prefix="gpu-check-") as made:
        folder = arguments.models or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, __file__, "--child", "--device", device, "--models", str(folder)]
        command += ["--model", str(arguments.model)] if arguments.model else []
        begin = time.monotonic()
        deadline = begin + 60 * arguments.minutes
        run = Check([*command, "--steps"], names, deadline, fresh=device == "cuda", tell=tell)
        outcomes = run.run()
    bad = {name: found for name, found in outcomes.items() if found.status in ("failed", "off")}
    answer = {
        "device": device,
        "seconds": round(time.monotonic() - begin, 1),
        "bad": sorted(bad),
        "steps": {name: asdict(found) for name, found in outcomes.items()},
    }
    unwritten = False
    if arguments.html:
        from gpu_check.page import write_page

        from tonnage.planner.errors import DeploymentError

        try:
            write_page(arguments.html, device, outcomes)
        except DeploymentError as error:
            print(f"gpu_check: {error}", file=sys.stderr)
            unwritten = True
    print(json.dumps(answer))
    return 1 if bad else 2 if unwritten else 0


if __name__ == "__main__":
    sys.exit(main())
