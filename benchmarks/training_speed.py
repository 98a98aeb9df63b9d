"""Measure ``tonnage train CONFIG_DIR --json`` as a whole process, and a sweep over 10,000 settings.

    python benchmarks/training_speed.py FOLDER_WITH_CONFIG [--runs 20]

The figures are median CPU milliseconds (user + system) with bytecode written (PYTHONDONTWRITEBYTECODE is
ignored). An empty interpreter, the lower bound of every Python tool, alternates with the command. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

from tonnage.planner.training.build import Planner
from tonnage.planner.training.model import load_training_model
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.sweep import parse_axis, sweep

AXES = (
    "micro-batch=1,2,3,4,5,6,7,8,9,10", "sequence-length=512,1024,2048,4096,8192",
    "strategy=ddp,zero1,zero2,zero3", "checkpointing=none,full", "gradient-accumulation=1,2,4,8,16",
    "optimizer=adamw,adamw-8bit,lion,sgd,adafactor",
)  # fmt: skip
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
TRAIN = "import sys; from tonnage.server.cli import main; sys.exit(main())"


def cpu_ms(command: list[str]) -> float:
    """Run a command and return its CPU milliseconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main() -> None:
    """Run both measurements and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    commands = {
        "python": [sys.executable, "-c", "pass"],
        "train": [sys.executable, "-c", TRAIN, "train", options.folder, "--json"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(options.runs + 1):
        for name, command in commands.items():
            times[name].append(cpu_ms(command))
    planner = Planner(load_training_model(options.folder))
    setup = TrainingSetup(gpus=8, device_memory=80 << 30)
    begun = time.process_time()
    settings = sum(1 for _ in sweep(planner, setup, [parse_axis(axis) for axis in AXES]))
    seconds = time.process_time() - begun
    found = {f"{name}_cpu_ms": round(statistics.median(values[1:]), 1) for name, values in times.items()}
    print(json.dumps({**found, "settings": settings, "sweep_cpu_s": round(seconds, 3), "runs": options.runs}))


if __name__ == "__main__":
    main()
