"""Measure ``tonnage plan`` as a whole process and a sweep within one, with peers in the same run.

    python benchmarks/plan_speed.py [--runs 20] [--peers FOLDER] [--json] [MODEL]

- ``cold_ms``: median wall time of `tonnage plan MODEL --gpu h100-80g --json`, a new process each time, with
  warm file cache and bytecode (PYTHONDONTWRITEBYTECODE is ignored).
- ``rss_mib``: its peak resident set. The system counts at least the resident set of this parent process.
- ``plans_per_second``: combinations of a sweep in one process per CPU second.
- ``python_ms``: an empty interpreter, the lower bound of every Python tool.

--peers installs vramcalc, vramscout and hf-mem from PyPI into a virtual environment in FOLDER. The folder is
kept and must not be this project's environment. The peers' cheapest commands (their import time) alternate
with this one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "tests/data/configs/meta-llama__Meta-Llama-3.1-8B.json"
PLAN = "import sys; from tonnage.server.cli import main; sys.exit(main())"
# Cheapest command of each peer. hf-mem reads only from the hub, so its import time is the lower bound.
PEERS = {
    "vramcalc": ["vramcalc", "estimate", "--help"],
    "vramscout": ["vramscout", "--help"],
    "hf-mem": ["hf-mem", "--help"],
}
SWEEP_TARGET = 10_000
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run_once(command: list[str]) -> tuple[float, float, float]:
    """Return wall milliseconds, peak resident set in MiB and CPU milliseconds of one process."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    _, status, usage = os.wait4(process.pid, 0)
    elapsed = 1000 * (time.perf_counter() - begun)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):  # 1: the plan does not fit
        raise SystemExit(f"{' '.join(command)} failed with {process.returncode}")
    return elapsed, usage.ru_maxrss / 1024, 1000 * (usage.ru_utime + usage.ru_stime)


def measure(commands: dict[str, list[str]], runs: int) -> dict[str, dict[str, float]]:
    """Return medians over ``runs`` rounds in which every command runs once, after one warm-up round."""
    seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in commands}
    for turn in range(runs + 1):
        for name, command in commands.items():
            found = run_once(command)
            if turn:
                seen[name].append(found)
    return {
        name: {
            "ms": round(statistics.median(wall for wall, _, _ in found), 1),
            "cpu_ms": round(statistics.median(cpu for _, _, cpu in found), 1),
            "best_ms": round(min(wall for wall, _, _ in found), 1),
            "rss_mib": round(statistics.median(size for _, size, _ in found), 1),
        }
        for name, found in seen.items()
    }


def sweep_speed(folder: str) -> dict[str, float]:
    """Return the CPU seconds of a sweep of at least 10,000 combinations."""
    from tonnage.planner.deployment import Deployment
    from tonnage.planner.devices.catalogue import catalogue
    from tonnage.planner.source.resolve import resolve_model
    from tonnage.planner.sweep.grid import Grid, sweep

    gpus = tuple(gpu for gpu in catalogue() if gpu.vendor != "apple")
    dtypes, ranks = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16"), (1, 2, 4, 8)
    schemes = ("as is", "gptq")
    repeat = -(-SWEEP_TARGET // (len(gpus) * len(dtypes) * len(ranks) * len(schemes)))
    grid = Grid(gpus * repeat, schemes, dtypes, ranks)
    source, flags = resolve_model(folder), Deployment(engine="vllm", max_model_len=8192)
    times = []
    for _ in range(5):
        begun = time.process_time()
        rows = sweep(source, flags, grid)
        times.append(time.process_time() - begun)
    seconds = statistics.median(times)
    return {
        "sweep_combinations": len(rows),
        "sweep_seconds": round(seconds, 4),
        "plans_per_second": round(len(rows) / seconds),
    }


def install_peers(folder: Path) -> dict[str, list[str]]:
    """Return the commands of the peers that could be installed."""
    if not (folder / "bin/pip").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    found = {}
    for name, command in PEERS.items():
        print(f"installing {name} ...", file=sys.stderr)
        install = [str(folder / "bin/pip"), "install", "-q", name]
        done = subprocess.run(install, capture_output=True, text=True, timeout=600, env=ENVIRONMENT)
        program = folder / "bin" / command[0]
        if done.returncode == 0 and program.exists():
            found[name] = [str(program), *command[1:]]
        else:
            print(f"{name} could not be installed: {done.stderr.strip()[-200:]}", file=sys.stderr)
    return found


def main() -> None:
    """Run all measurements and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder with config.json (default: Llama-3.1-8B of the tests)")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="install the peers there and time them")
    parser.add_argument("--json", action="store_true", help="accepted: the last line is always one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model
        if folder is None:
            folder = str(Path(scratch) / "model")
            os.mkdir(folder)
            shutil.copy(MODEL, Path(folder) / "config.json")
        commands = {
            "plan": [sys.executable, "-c", PLAN, "plan", folder, "--gpu", "h100-80g", "--json"],
            "python": [sys.executable, "-c", "pass"],
        }
        if options.peers:
            commands |= install_peers(options.peers)
        found = measure(commands, options.runs)
        result = {
            "cold_ms": found["plan"]["ms"],
            "cold_best_ms": found["plan"]["best_ms"],
            "cold_cpu_ms": found["plan"]["cpu_ms"],
            "rss_mib": found["plan"]["rss_mib"],
            "python_ms": found["python"]["ms"],
            "python_cpu_ms": found["python"]["cpu_ms"],
            **sweep_speed(folder),
            "peers": {name: found[name] for name in PEERS if name in found},
            "runs": options.runs,
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
