"""Compare the hf engine's bfloat16 kernels with torch, on the shapes of SmolLM2-135M: median milliseconds.

Usage:

    OMP_NUM_THREADS=1 python benchmarks/hf_kernels.py --json
    OMP_NUM_THREADS=2 GOMP_SPINCOUNT=1000 python benchmarks/hf_kernels.py --json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import numba
import torch
from torch.nn import functional as F

from tonnage.server.engines.hf.kernels.linear import linear

HIDDEN, INNER, KV, VOCABULARY, LAYERS = 576, 1536, 192, 49152, 30
SHAPES = [(HIDDEN, HIDDEN), (KV, HIDDEN), (KV, HIDDEN), (HIDDEN, HIDDEN)]
SHAPES += [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)]


def alternate(sides: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Run all sides in turns and return the median milliseconds of each."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            if number:  # the first round warms up
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


@torch.inference_mode()
def main() -> int:
    """Measure all shapes and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    torch.set_num_threads(threads)
    numba.set_num_threads(threads)
    weights = [torch.randn(shape).bfloat16() for _ in range(LAYERS) for shape in SHAPES]
    weights.append(torch.randn(VOCABULARY, HIDDEN).bfloat16())
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 16) for weight in weights]
    report: dict[str, object] = {"threads": threads, "load_average": os.getloadavg()[0]}
    for rows in (1, 16, 512):
        inputs = {k: torch.randn(rows, k).bfloat16() for k in (HIDDEN, INNER)}
        heads = {k: wide[:32] for k, wide in inputs.items()}  # a step computes logits for few rows

        def each(run: Callable[[torch.Tensor, int], object], inputs=inputs, heads=heads) -> None:  # type: ignore[no-untyped-def]
            for number, weight in enumerate(weights):
                chosen = heads if weight.shape[0] == VOCABULARY else inputs
                run(chosen[weight.shape[1]], number)

        report[f"linear layers and head, {rows} rows"] = alternate(
            {
                "kernels": lambda each=each: each(lambda x, i: linear(x, weights[i])),
                "torch": lambda each=each: each(lambda x, i: F.linear(x, weights[i])),
                "onednn packed": lambda each=each: each(
                    lambda x, i: torch.ops.mkldnn._linear_pointwise(x, packed[i], None, "none", [], "")
                ),
            },
            args.rounds,
        )
    for name, value in report.items():
        print(f"{name}: {value}")
    if args.json:
        print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
