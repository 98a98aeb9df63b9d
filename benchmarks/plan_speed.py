"""How long ``tonnage plan`` takes as a whole process, file cache warm. Prints one JSON object.

    python benchmarks/plan_speed.py [--runs 20] [MODEL ...]

``python_ms`` is an empty interpreter in the same run: what no Python tool can be faster than.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

PLAN = "import sys; from tonnage.server.cli import main; sys.exit(main())"


def median_ms(command: list[str], runs: int) -> tuple[float, float]:
    """(median, best) wall milliseconds of ``runs`` runs after two warm-up runs."""
    times = []
    for _ in range(runs + 2):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(1000 * (time.perf_counter() - start))
    return round(statistics.median(times[2:]), 1), round(min(times[2:]), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["demo"])
    parser.add_argument("--runs", type=int, default=20)
    arguments = parser.parse_args()
    result = {}
    for model in arguments.models:
        command = [sys.executable, "-c", PLAN, "plan", model, "--json"]
        result[model] = dict(zip(("median_ms", "best_ms"), median_ms(command, arguments.runs), strict=True))
    python = median_ms([sys.executable, "-c", "pass"], arguments.runs)
    print(json.dumps({"plan": result, "python_ms": python[0], "runs": arguments.runs}))


if __name__ == "__main__":
    main()
