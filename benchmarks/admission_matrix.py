"""The admission matrix: vLLM's own scheduler against Tonnage's modes over costs, kinds of lengths and loads.

    python benchmarks/vllm_admission.py --matrix --json --check       everything
    python benchmarks/vllm_admission.py --matrix --quick --check      a part of it, a few minutes

vLLM's real scheduler and block pool run without a model, under a clock: a step takes what `step_costs` says of
its batch. A cell is a cost, a kind of lengths (`admission_loads`), a pool, a loop and a state:

- loops: `closed-N` with N clients, or `open-F`: Poisson arrivals at F times the request rate that vLLM's
  scheduler sustains in its closed loop under the same cost.
- states: `cold` is a new scheduler; a `warm` one has served 200 requests of the same kind, which
  do not count.

Each cell pools its seeds: percentiles of all times together, tokens of all seeds over the seconds of all.
vLLM's scheduler runs once per cell, and every mode is compared with it. Aims are in `admission_aims`.

The last line on stdout is one JSON object: `cells` (figures and ratios to vLLM's scheduler), `summary` and
`missed` (cells that miss an aim, by mode and aim). Progress goes to stderr, one line per cell.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from admission_aims import PEER, check, ratios, summarized
from admission_loads import KINDS, Load, load
from step_costs import StepCost, named, parsed

BLOCK = 16
LIMITS = {"length": 2400, "sequences": 256, "batched": 2048}
POOLS = {
    200: ("closed-64", "closed-128"),
    1500: ("closed-256",),
}  # the last loop gives the rate of the open ones
OPEN = ("open-0.7", "open-0.95", "open-1.2")
STATES = ("cold", "warm")
WARM_REQUESTS, WARM_SEED = 200, 1000
STALLED = 2000  # steps in a row without a token: the scheduler is stuck


@dataclass
class Figures:
    """Measurements of one scheduler in one cell, over all seeds."""

    tokens: int = 0
    seconds: float = 0.0
    requests: int = 0
    first: list[float] = field(default_factory=list)
    """Seconds from arrival to first token, one per request."""
    between: list[float] = field(default_factory=list)
    """Seconds between two tokens of a request."""
    preemptions: int = 0
    computed: int = 0
    """Tokens in all batches, recomputed tokens included."""
    recomputed: int = 0
    recompute_seconds: float = 0.0
    lost: int = 0
    steps: int = 0

    def add(self, other: Figures) -> None:
        """Add the measurements of another seed."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def shown(self) -> dict[str, Any]:
        """Return the figures of a cell."""
        return {
            "tokens_per_second": round(self.tokens / self.seconds, 3),
            "ttft_p50_s": round(quantile(self.first, 0.5), 6),
            "ttft_p99_s": round(quantile(self.first, 0.99), 6),
            "between_tokens_p99_s": round(quantile(self.between, 0.99), 6),
            "preemptions": self.preemptions,
            "computed": self.computed,
            "recomputed": self.recomputed,
            "recompute_share": round(self.recompute_seconds / self.seconds, 4),
            "lost": self.lost,
            "steps": self.steps,
        }


def quantile(values: list[float], share: float) -> float:
    """Return the value below which `share` of the values lie, or 0 without values."""
    ordered = sorted(values) or [0.0]
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# -- one scheduler under a clock ------------------------------------------------------------------------------


@cache
def _steps() -> Any:
    """Return the module that builds vLLM's scheduler without a model."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
    import vllm_steps

    return vllm_steps


def _quiet() -> None:
    """Silence vLLM's notes about missing accelerators in a worker process."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    _steps()
    logging.getLogger("vllm").setLevel(logging.ERROR)


class Server:
    """A scheduler, the engine core's loop around it, and the clock that both follow."""

    def __init__(self, mode: str, blocks: int, cost: StepCost) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        from tonnage.server.engines.vllm.scheduler import TonnageScheduler

        self.now, self.cost, self.steps = 0.0, cost, _steps()
        ours = mode != PEER
        config = self.steps.config(
            blocks + 1, mode=mode if ours else None, block_size=BLOCK, asynchronous=False, **LIMITS
        )
        self.scheduler = self.steps.scheduler(TonnageScheduler if ours else Scheduler, config)
        if ours:
            self.scheduler.clock = lambda: self.now
        self.peaks: dict[str, int] = {}  # tokens that a preempted request had computed
        self._count_peaks()
        self.world = self.steps.World(self.scheduler)

    def _count_peaks(self) -> None:
        plain, peaks = self.scheduler._preempt_request, self.peaks

        def counted(request: Any, *args: Any, **named: Any) -> None:
            peaks[request.request_id] = max(peaks.get(request.request_id, 0), request.num_computed_tokens)
            plain(request, *args, **named)

        self.scheduler._preempt_request = counted

    def serve(self, load: Load, loop: str, rate: float, name: str) -> Figures:
        """Run a load to its end and return the measurements.

        Args:
            load: The requests.
            loop: `closed-N` or `open-F`.
            rate: Requests per second of an open loop.
            name: Prefix of the request ids, unique for this server.
        """
        world, scheduler, figures = self.world, self.scheduler, Figures(requests=len(load.outputs))
        start, preempted, taken = self.now, world.preemptions, world.steps
        count = len(load.outputs)
        closed = loop.startswith("closed-")
        if closed:
            times = deque([start] * int(loop.removeprefix("closed-")))
        else:
            times = deque(start + at for at in load.arrivals(rate))
        freed: list[float] = []  # clients of a closed loop that wait for their burst
        last: dict[str, float] = {}  # arrival or last token of each request
        got: dict[str, int] = {}
        added = done = idle = 0
        while done < count and idle < STALLED:
            while added < count and times and times[0] <= self.now:
                id, at = f"{name} {added}", times.popleft()
                last[id], got[id] = at, 0
                prompt, output = load.prompts[added], load.outputs[added]
                made = self.steps.request(id, prompt, load.max_tokens, arrival=at, block_size=BLOCK)
                world.add(made, min(output, load.max_tokens))
                added += 1
            if not scheduler.has_unfinished_requests():
                if not times:
                    times.extend(freed)
                    freed.clear()
                if not times:
                    break  # a request left the scheduler without an end: it is lost
                self.now = max(self.now, times[0])
                continue
            tokens, ended = self._step(figures)
            idle = 0 if tokens else idle + 1
            for id in tokens:
                (figures.between if got[id] else figures.first).append(self.now - last[id])
                last[id] = self.now
                got[id] += 1
            done += len(ended)
            if closed and ended:
                freed += [self.now] * len(ended)
                while len(freed) >= load.burst:
                    times.extend(freed[: load.burst])
                    del freed[: load.burst]
        figures.tokens, figures.seconds = sum(got.values()), self.now - start
        expected = (min(output, load.max_tokens) for output in load.outputs)
        figures.lost = sum(got.get(f"{name} {number}", 0) != tokens for number, tokens in enumerate(expected))
        figures.preemptions, figures.steps = world.preemptions - preempted, world.steps - taken
        return figures

    def _step(self, figures: Figures) -> tuple[list[str], list[str]]:
        """Run one step; return the ids of the requests that got a token, and of the requests that ended."""
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

        scheduler, world = self.scheduler, self.world
        output = scheduler.schedule()
        world.steps += 1
        scheduled = output.num_scheduled_tokens
        requests = scheduler.requests
        # Without async scheduling num_computed_tokens already counts this step, and nothing else is in flight.
        computed = {id: requests[id].num_computed_tokens for id in scheduled}
        again = 0
        if self.peaks:
            for id, number in scheduled.items():
                peak = self.peaks.get(id)
                if peak is not None:
                    again += max(0, min(computed[id], peak) - (computed[id] - number))
                    if computed[id] >= peak:
                        del self.peaks[id]
        figures.computed += output.total_num_scheduled_tokens
        figures.recomputed += again
        figures.recompute_seconds += again * self.cost.prefill / 1000
        decode = list(scheduled.values()).count(1)
        context = sum(computed.values()) if self.cost.context else 0
        self.now += self.cost.seconds(output.total_num_scheduled_tokens - decode, decode, context)
        got, sampled = [], []
        outputs, eos = world.outputs, self.steps.EOS
        for id, reached in computed.items():
            request = requests[id]
            if reached < request.num_tokens:
                sampled.append([])  # a part of the prompt
                continue
            got.append(id)
            sampled.append([eos if request.num_output_tokens + 1 >= outputs[id] else 7])
        if scheduled:
            ids = list(scheduled)
            back = ModelRunnerOutput(ids, {id: at for at, id in enumerate(ids)}, sampled)
        else:
            back = EMPTY_MODEL_RUNNER_OUTPUT
        ended = [
            each.request_id
            for outs in scheduler.update_from_output(output, back).values()
            for each in outs.outputs
            if each.finish_reason is not None
        ]
        return got, ended


# -- cells ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ground:
    """A cost, a kind of lengths and a pool, with the loops, states and modes to run on it."""

    cost_name: str
    cost: StepCost
    kind: str
    blocks: int
    loops: tuple[str, ...]
    states: tuple[str, ...]
    modes: tuple[str, ...]
    seeds: int
    requests: int
    first_seed: int = 0


def measured(ground: Ground, mode: str, loop: str, state: str, rate: float) -> Figures:
    """Return the measurements of a mode in one cell, over all seeds."""
    total = Figures()
    for seed in range(ground.first_seed, ground.first_seed + ground.seeds):
        server = Server(mode, ground.blocks, ground.cost)
        if state == "warm":
            first = load(ground.kind, WARM_REQUESTS, WARM_SEED + seed)
            server.serve(first, loop, rate, "warm")
        total.add(server.serve(load(ground.kind, ground.requests, seed), loop, rate, "counted"))
    return total


def run_ground(ground: Ground) -> list[dict[str, Any]]:
    """Run all loops, states and modes of one cost, kind and pool, and return their cells.

    It prints one line per cell on stderr.
    """
    saturated, cells = POOLS[ground.blocks][-1], []
    known: dict[tuple[str, str], Figures] = {}
    if any(loop.startswith("open-") for loop in ground.loops):
        known[saturated, "cold"] = measured(ground, PEER, saturated, "cold", 0.0)
    for loop in ground.loops:
        rate = 0.0
        if loop.startswith("open-"):
            sustained = known[saturated, "cold"]
            rate = float(loop.removeprefix("open-")) * sustained.requests / sustained.seconds
        for state in ground.states:
            start = time.perf_counter()
            peer = known.get((loop, state)) or measured(ground, PEER, loop, state, rate)
            figures = {PEER: peer.shown()}
            figures |= {mode: measured(ground, mode, loop, state, rate).shown() for mode in ground.modes}
            name = f"{ground.cost_name}/{ground.kind}/{ground.blocks}/{loop}/{state}"
            cell = {"cell": name, "rate": round(rate, 4), "figures": figures, "ratios": ratios(figures)}
            cell["seconds"] = round(time.perf_counter() - start, 2)
            cells.append(cell)
            print(line(cell), file=sys.stderr, flush=True)
    return cells


def line(cell: dict[str, Any]) -> str:
    """Return the progress line of a cell.

    It shows the ratios of tokens/s, P50 and P99 to first token, and P99 between tokens.
    """
    parts = [cell["cell"], f"{cell['seconds']:.1f} s"]
    for mode, each in cell["ratios"].items():
        shown = " ".join(f"{value:.3f}" for value in each.values())
        preempted = [cell["figures"][name]["preemptions"] for name in (mode, PEER)]
        parts.append(f"{mode} {shown}, preemptions {preempted[0]} of {preempted[1]}")
    return ": ".join((parts[0], ", ".join(parts[1:])))


# -- command line ---------------------------------------------------------------------------------------------


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Return the parsed options of `--matrix`."""
    parser = argparse.ArgumentParser(
        prog="vllm_admission.py --matrix",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    loops = (*(loop for closed in POOLS.values() for loop in closed), *OPEN)
    parser.add_argument("--modes", nargs="+", default=["auto"], choices=("auto", "guaranteed", "predictive"))
    parser.add_argument("--costs", nargs="+", help=f"of {', '.join(named())} and the names given with --cost")
    parser.add_argument(
        "--cost", action="append", default=[], type=parsed, metavar="NAME=FIXED,PREFILL,DECODE,CONTEXT",
        help="one more cost: ms per step, prompt token, decoding sequence, 1,000 tokens of context",
    )  # fmt: skip
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--pools", nargs="+", type=int, choices=POOLS, help="usable blocks of 16 tokens")
    parser.add_argument("--loops", nargs="+", choices=loops)
    parser.add_argument("--states", nargs="+", choices=STATES)
    parser.add_argument("--seeds", type=int, help="seeds in each cell: 2")
    parser.add_argument("--first-seed", type=int, default=0, help="auto was tuned on 0 and 1")
    parser.add_argument("--requests", type=int, help="per cell and seed; 300 at 200 blocks, 600 at 1,500")
    parser.add_argument(
        "--quick", action="store_true",
        help="one seed, 200 blocks, warm, costs cpu and gpu, closed-128 and open-0.95",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--check", action="store_true", help="exit 1 if an aim is missed")
    parser.add_argument(
        "--json", action="store_true", help="accepted for symmetry: stdout is always one JSON line"
    )
    given = parser.parse_args(words)
    quick = given.quick
    given.known = named() | dict(given.cost)
    given.costs = given.costs or (["cpu", "gpu"] if quick else list(given.known))
    if unknown := set(given.costs) - set(given.known):
        parser.error(
            f"unknown costs {sorted(unknown)}: choose from {', '.join(given.known)}, or add one with --cost"
        )
    given.pools = given.pools or ([200] if quick else list(POOLS))
    given.loops = given.loops or (["closed-128", "open-0.95"] if quick else loops)
    given.states = given.states or (["warm"] if quick else STATES)
    given.seeds = given.seeds or (1 if quick else 2)
    return given


def grounds(given: argparse.Namespace) -> list[Ground]:
    """Return the grounds of the matrix, the longest first."""
    return [
        Ground(
            cost, given.known[cost], kind, blocks,
            tuple(loop for loop in given.loops if loop in (*POOLS[blocks], *OPEN)),
            tuple(given.states), tuple(given.modes), given.seeds,
            given.requests or (300 if blocks == 200 else 600),
            given.first_seed,
        )
        for blocks in sorted(given.pools, reverse=True)
        for cost in given.costs
        for kind in given.kinds
    ]  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Run the matrix; return the exit code."""
    given = arguments(words)
    start = time.perf_counter()
    cells: list[dict[str, Any]] = []
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn"), _quiet) as pool:
        for done in as_completed([pool.submit(run_ground, ground) for ground in grounds(given)]):
            cells += done.result()
    cells.sort(key=lambda cell: str(cell["cell"]))
    result: dict[str, Any] = {"costs": {name: vars(given.known[name]) for name in given.costs}, "cells": cells}
    result |= summarized(cells, given.modes)
    result["seconds"] = round(time.perf_counter() - start, 1)
    print(json.dumps(result))
    return check(result) if given.check else 0
