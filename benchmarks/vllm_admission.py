"""Compare vLLM's own scheduler with Tonnage's admission inside it: real vLLM with a small pool.

    python benchmarks/vllm_admission.py --json             three rounds, closed loop and Poisson arrivals
    python benchmarks/vllm_admission.py --schedule-only    CPU time of schedule() at 256 running; half a minute
    python benchmarks/vllm_admission.py --simulate         the same loops without a model; a minute
    python benchmarks/vllm_admission.py --matrix           many loads without a model: admission_matrix.py

One engine (AsyncLLM, the demo model) per mode stays up, and the modes alternate round by round. A first loop of
``--cold`` requests is not counted, because predictive mode learns lengths from then on, as in a server. It
takes 15 to
20 minutes on 2 cores.

- Lengths are from the Azure conversations (tests/data/traces), divided by ``--prompt-scale`` and
  ``--output-scale``.
- Each request sets max_tokens to 1,000, scaled alike, and ends where the trace says: a logits processor
  produces the end token.
- By default, prompts have 14 tokens and outputs 94 on average, in a pool of 3,072. vLLM then preempts more
  often than it serves requests.
- The Poisson rate is ``--load`` times the default mode's rate in its first closed loop. It is above the
  capacity of every mode; below it, all modes would generate the same tokens.

The last line is one JSON object. ``cold`` is the first loop. ``modes`` has for each loop and mode the medians
over the rounds (preemptions, recomputed tokens and lost requests are sums). ``ratios`` is each mode over the
default, and ``schedule`` the result of ``--schedule-only``.

``--simulate`` runs vLLM's CPU scheduler (a step is scheduled after the previous one has returned) under a
clock of ``--step-ms`` per step and ``--token-ms`` per token. There is no first loop: lengths are learned in
round 0. A fourth mode is predictive with an explicit quantile, which turns off its additional caution with
few requests (`tonnage.cache.admission.forecast`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.cache.replay.trace import read_trace

ROOT = Path(__file__).parents[1]
TRACE = ROOT / "tests" / "data" / "traces" / "azure_conversation_300.csv"
MODES = ("default", "auto", "guaranteed", "predictive")
SCHEDULER = "tonnage.server.engines.vllm.scheduler.TonnageScheduler"
MAX_TOKENS = 1000  # max_tokens of each request, before scaling
BLOCK = 32  # smallest block of vLLM 0.32's CPU attention
VOCABULARY, TOKEN_BYTES = 49_152, 30 * 2 * 3 * 64 * 2  # SmolLM2-135M; K and V of a token in bf16, all layers


def lengths(arguments: argparse.Namespace) -> list[tuple[int, int]]:
    """Return the (prompt, output) tokens of each request."""
    trace = read_trace(TRACE, limit=arguments.requests).requests
    return [
        (
            max(1, round(request.prompt_tokens / arguments.prompt_scale)),
            max(1, round(request.output_tokens / arguments.output_scale)),
        )
        for request in trace
    ]


# -- one engine, in a process of its own ----------------------------------------------------------------------


def engine(mode: str, arguments: argparse.Namespace) -> None:
    """Serve one mode: read a line of JSON for each run and print one with its result."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    from tonnage.server.demo.model import ensure_demo

    seen = {"preemptions": 0, "recomputed": 0}

    class Seen(StatLoggerBase):
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def log_engine_initialized(self) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if iteration_stats is not None:
                seen["preemptions"] += iteration_stats.num_preempted_reqs
            if scheduler_stats is not None and scheduler_stats.prefix_cache_stats is not None:
                found = scheduler_stats.prefix_cache_stats
                # Recomputed are a preempted request's tokens, except cached ones and the token of its
                # resumption.
                seen["recomputed"] += found.preempted_queries - found.preempted_hits - found.preempted_requests

    flags: dict[str, Any] = {}
    if mode != "default":
        flags = {
            "scheduler_cls": SCHEDULER,
            "additional_config": {"tonnage": {"admission_mode": mode}},
        }
    made = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(ensure_demo()), dtype="bfloat16", enforce_eager=True, block_size=BLOCK,
            kv_cache_memory_bytes=(arguments.blocks + 1) * BLOCK * TOKEN_BYTES, max_model_len=arguments.length,
            max_num_seqs=arguments.sequences, max_num_batched_tokens=arguments.batched,
            logits_processors=["ends_at:EndsAt"], seed=0, **flags,
        ),
        stat_loggers=[Seen],
    )  # fmt: skip

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        print(json.dumps({"ready": True}), flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            before = dict(seen)
            found = await run(made, json.loads(line))
            found.update({key: seen[key] - before[key] for key in seen})
            print(json.dumps(found), flush=True)
        made.shutdown()

    asyncio.run(serve())


async def run(engine: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Run one load and return its figures.

    ``order`` has ``lengths``, ``max_tokens``, ``seed``, and either ``rate`` (requests per second) or
    ``clients``.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    draw = random.Random(order["seed"])
    loads = [
        (number, [draw.randrange(100, VOCABULARY) for _ in range(prompt)], output)
        for number, (prompt, output) in enumerate(order["lengths"])
    ]
    first: list[float] = []
    between: list[float] = []
    done: list[int] = []

    async def one(number: int, prompt: list[int], output: int) -> None:
        sampling = SamplingParams(
            temperature=0, max_tokens=order["max_tokens"], output_kind=RequestOutputKind.DELTA,
            detokenize=False, extra_args={"ends_at": output},
        )  # fmt: skip
        asked = last = time.perf_counter()
        count = 0
        async for out in engine.generate({"prompt_token_ids": prompt}, sampling, f"{order['seed']}-{number}"):
            now = time.perf_counter()
            if out.outputs[0].token_ids:
                (between if count else first).append(now - (last if count else asked))
                last, count = now, count + len(out.outputs[0].token_ids)
        if count == output:
            done.append(count)

    start = time.perf_counter()
    if order.get("rate"):
        tasks = []
        for load in loads:
            tasks.append(asyncio.create_task(one(*load)))
            await asyncio.sleep(draw.expovariate(order["rate"]))
        await asyncio.gather(*tasks)
    else:
        waiting = iter(loads)

        async def client() -> None:
            for load in waiting:
                await one(*load)

        await asyncio.gather(*(client() for _ in range(order["clients"])))
    seconds = time.perf_counter() - start
    return {
        "tokens_per_second": sum(done) / seconds,
        "requests_per_second": len(loads) / seconds,
        "ttft_p50_s": quantile(first, 0.5),
        "ttft_p99_s": quantile(first, 0.99),
        "between_tokens_p99_s": quantile(between, 0.99),
        "lost": len(loads) - len(done),
    }


def quantile(values: list[float], share: float) -> float:
    """Return the value below which ``share`` of the values lie, or 0 without values."""
    ordered = sorted(values) or [0.0]
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# -- all modes in turns ---------------------------------------------------------------------------------------

ENDS_AT = '''
"""A logits processor that ends a request where it is told."""
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

END = 2  # SmolLM2's <|im_end|>


class EndsAt(AdapterLogitsProcessor):
    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        ends_at = (params.extra_args or {}).get("ends_at")
        if ends_at is None:
            return None

        def one(output_ids, logits):
            if len(output_ids) + 1 >= ends_at:
                logits[:] = float("-inf")
                logits[END] = 0
            else:
                logits[END] = float("-inf")
            return logits

        return one
'''


def compare(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Run all modes in turns, each in its own process, and return their figures."""
    Path(folder, "ends_at.py").write_text(ENDS_AT)
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment["VLLM_LOGGING_LEVEL"] = "WARNING"
    engines: dict[str, subprocess.Popen[str]] = {}
    try:
        for mode in MODES:
            command = [sys.executable, __file__, "--engine", mode, *sys.argv[1:]]
            engines[mode] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
                start_new_session=True,
            )  # fmt: skip
            answer(engines[mode])  # one start at a time
        order = first_order(arguments)
        order["lengths"] = order["lengths"][: arguments.cold]
        cold = {mode: one_run(engines[mode], order, f"cold {mode}") for mode in MODES if arguments.cold}
        rate, found = in_turns(
            arguments, MODES, order, lambda mode, name: one_run(engines[mode], order, f"{name} {mode}")
        )
    finally:
        # vLLM's engine core is a child that outlives its parent; both are in a session of their own.
        for process in engines.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    modes = {shape: {mode: over(rounds) for mode, rounds in modes.items()} for shape, modes in found.items()}
    return {"cold": cold, "rate": round(rate, 3), "modes": modes}


def first_order(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `run` for the first loop."""
    return {
        "max_tokens": round(MAX_TOKENS / arguments.output_scale), "clients": arguments.clients,
        "lengths": lengths(arguments), "rate": 0, "seed": 0,
    }  # fmt: skip


def in_turns(
    arguments: argparse.Namespace, modes: Sequence[str], order: dict[str, Any], one: Callable[[str, str], Any]
) -> tuple[float, dict[str, dict[str, list[dict[str, Any]]]]]:
    """Run all loops and rounds, with the modes in turns.

    ``one`` runs a mode under a name and returns its result. ``order`` is changed for each run.

    Returns:
        The rate of the Poisson loops in requests per second, and the results by loop, mode and round.
    """
    order["lengths"] = lengths(arguments)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {shape: {} for shape in arguments.loops}
    rate = arguments.rate
    for number in range(arguments.rounds):
        for shape in arguments.loops:
            order["seed"] += 1
            for at in range(len(modes)):
                mode = modes[(at + number) % len(modes)]
                order["rate"] = rate if shape == "poisson" else 0
                result = one(mode, f"round {number} {shape}")
                found[shape].setdefault(mode, []).append(result)
                rate = rate or arguments.load * result["requests_per_second"]
    return rate, found


def one_run(process: subprocess.Popen[str], order: dict[str, Any], name: str) -> dict[str, Any]:
    """Run one load in an engine's process and return the result."""
    start = time.perf_counter()
    assert process.stdin is not None
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    result = answer(process)
    print(f"{name}, {time.perf_counter() - start:.0f} s: {result}", file=sys.stderr, flush=True)
    return result


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the next line of JSON that an engine's process prints."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return dict(json.loads(line))
    raise SystemExit(f"the engine ended with {process.wait()}")


def over(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures over all rounds: sums of counts, medians of all others."""
    sums = ("preemptions", "recomputed", "lost")
    return {
        key: sum(each[key] for each in rounds)
        if key in sums
        else round(statistics.median(each[key] for each in rounds), 4)
        for key in rounds[0]
    }


def ratios(modes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return each mode's figures divided by the default's."""
    base = modes["default"]
    keys = ("tokens_per_second", "preemptions", "ttft_p50_s", "ttft_p99_s", "between_tokens_p99_s")
    return {
        mode: {key: round(each[key] / base[key], 4) for key in keys if base[key]}
        for mode, each in modes.items()
        if mode != "default"
    }


# -- the same without a model --------------------------------------------------------------------------------


def simulate(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of `compare` from a simulation, with the preemptions of each round."""
    sys.path.append(str(ROOT / "tests" / "helpers"))
    import vllm_steps as steps
    from vllm.v1.core.sched.scheduler import Scheduler

    from tonnage.server.engines.vllm.scheduler import TonnageScheduler

    named = {"length_quantile": Policy(AdmissionMode.PREDICTIVE).quantile}
    options: dict[str, dict[str, Any]] = {mode: {"mode": mode} for mode in MODES if mode != "default"}
    options |= {"default": {}, "predictive, quantile named": {"mode": "predictive", **named}}
    worlds = {}
    for mode, flags in options.items():
        config = steps.config(
            arguments.blocks + 1, length=arguments.length, sequences=arguments.sequences, block_size=BLOCK,
            batched=arguments.batched, asynchronous=False, **flags,
        )  # fmt: skip
        cls = Scheduler if mode == "default" else TonnageScheduler
        worlds[mode] = steps.World(steps.scheduler(cls, config))
    order = first_order(arguments)
    order |= {"step": arguments.step_ms / 1000, "token": arguments.token_ms / 1000}
    modes = (*MODES, "predictive, quantile named")
    rate, found = in_turns(
        arguments, modes, order, lambda mode, name: one_simulated(worlds[mode], order, f"{name} {mode}", steps)
    )
    shown = {shape: {mode: over(rounds) for mode, rounds in each.items()} for shape, each in found.items()}
    for shape, each in found.items():
        for mode, rounds in each.items():
            shown[shape][mode]["preemptions_by_round"] = [one["preemptions"] for one in rounds]
    return {"rate": round(rate, 3), "modes": shown}


def one_simulated(world: Any, order: dict[str, Any], name: str, steps: Any) -> dict[str, Any]:
    """Run one load on a simulated engine and return its figures, with seconds of the simulated clock."""
    draw = random.Random(order["seed"])
    loads, scheduler = deque(enumerate(order["lengths"])), world.scheduler
    if order["rate"]:
        times = deque(accumulate(draw.expovariate(order["rate"]) for _ in loads))
    else:
        times = deque(repeat(0.0, order["clients"]))
    now, done, preempted, taken = 0.0, 0, world.preemptions, world.steps
    last: dict[str, float] = {}  # time of each request's arrival or last token
    first: list[float] = []
    between: list[float] = []
    while done < len(order["lengths"]):
        while loads and times and times[0] <= now:
            number, (prompt, output) = loads.popleft()
            tokens = [draw.randrange(100, VOCABULARY) for _ in range(prompt)]
            id = f"{name} {number}"
            last[id] = times.popleft()
            world.add(steps.request(id, tokens, order["max_tokens"], block_size=BLOCK), output)
        if not scheduler.has_unfinished_requests():
            now = times[0]
            continue
        step = scheduler.schedule()
        now += order["step"] + order["token"] * step.total_num_scheduled_tokens
        before = {id: world.produced.get(id, 0) for id in step.num_scheduled_tokens}
        world.scheduled(step)
        for id, count in before.items():
            if world.produced.get(id, 0) > count:
                (between if count else first).append(now - last[id])
                last[id] = now
            if id in world.ended:
                done += 1
                times.append(now)
    return {
        "tokens_per_second": (len(first) + len(between)) / now,
        "requests_per_second": done / now,
        "ttft_p50_s": quantile(first, 0.5),
        "ttft_p99_s": quantile(first, 0.99),
        "between_tokens_p99_s": quantile(between, 0.99),
        "preemptions": world.preemptions - preempted,
        "steps": world.steps - taken,
    }


# -- CPU time of schedule() -----------------------------------------------------------------------------------


def schedule(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the CPU microseconds of ``schedule()`` per step with 256 running requests and a full pool.

    There is no model. The schedulers alternate. Ratios compare the best turn of each, because other programs
    on the machine can only add time.
    """
    sys.path.append(str(ROOT / "tests" / "helpers"))
    import vllm_steps as steps
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from tonnage.server.engines.vllm.scheduler import TonnageScheduler

    worlds = {}
    for mode in MODES:
        cls = AsyncScheduler if mode == "default" else TonnageScheduler
        made = steps.scheduler(
            cls,
            steps.config(
                arguments.schedule_blocks + 1, mode=None if mode == "default" else mode,
                length=8192, sequences=256, batched=8192,
            ),
        )  # fmt: skip
        world = worlds[mode] = steps.World(made)
        draw = random.Random(0)
        for number in range(6000):
            output = min(400, 1 + int(draw.expovariate(1 / 200)))
            world.add(steps.request(f"r{number}", draw.randrange(64, 600), 400), output)
        for _ in range(300):
            world.step()
    taken: dict[str, list[float]] = {mode: [] for mode in worlds}
    running = dict.fromkeys(worlds, 0)
    gc.disable()
    for _ in range(20):
        for mode, world in worlds.items():
            plain, spent = world.scheduler.schedule, 0.0
            for _ in range(50):
                start = time.process_time()
                output = plain()
                spent += time.process_time() - start
                world.scheduled(output)
                running[mode] += len(world.scheduler.running)
            taken[mode].append(spent / 50 * 1e6)
    gc.enable()
    best = {mode: min(values) for mode, values in taken.items()}
    return {
        mode: {
            "us_best": round(best[mode]),
            "us_median": round(statistics.median(taken[mode])),
            "running": round(running[mode] / 1000),
            "preemptions": worlds[mode].preemptions,
            "ratio_best": round(best[mode] / best["default"], 3),
            "ratio_median": round(statistics.median(taken[mode]) / statistics.median(taken["default"]), 3),
        }
        for mode in worlds
    }


def main() -> None:
    """Run the selected measurements and print one JSON object."""
    if "--matrix" in sys.argv:
        from admission_matrix import main as matrix

        sys.exit(matrix([word for word in sys.argv[1:] if word != "--matrix"]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--matrix", action="store_true",
        help="costs x lengths x loads under a clock; its options are --modes, --costs, --cost, --kinds, "
        "--pools, --loops, --states, --seeds, --first-seed, --requests, --quick, --jobs, --check "
        "(--matrix --help)",
    )  # fmt: skip
    parser.add_argument("--engine", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", type=int, default=200, help="requests of a first loop that is not counted")
    parser.add_argument("--loops", nargs="+", choices=("closed", "poisson"), default=("closed", "poisson"))
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--load", type=float, default=2.0)
    parser.add_argument("--rate", type=float, default=0.0, help="Poisson arrivals per second instead of --load")
    parser.add_argument("--prompt-scale", type=float, default=64)
    parser.add_argument("--output-scale", type=float, default=2.5)
    parser.add_argument("--blocks", type=int, default=96, help=f"usable blocks of {BLOCK} tokens")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--batched", type=int, default=1024)
    parser.add_argument("--schedule-only", action="store_true")
    parser.add_argument("--serve-only", action="store_true")
    parser.add_argument("--schedule-blocks", type=int, default=8000)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--step-ms", type=float, default=17)
    parser.add_argument("--token-ms", type=float, default=1)
    parser.add_argument("--json", action="store_true", help="print only the last line on stdout")
    arguments = parser.parse_args()
    if arguments.engine:
        engine(arguments.engine, arguments)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the engines together with this process
    result: dict[str, Any] = {}
    if not arguments.serve_only and not arguments.simulate:
        result["schedule"] = schedule(arguments)
    if not arguments.schedule_only:
        if arguments.simulate:
            result |= simulate(arguments)
        else:
            with tempfile.TemporaryDirectory() as folder:
                result |= compare(arguments, folder)
        result["ratios"] = {shape: ratios(each) for shape, each in result["modes"].items()}
        result["load"] = {
            "pool_tokens": arguments.blocks * BLOCK,
            "prompt_tokens": sum(prompt for prompt, _ in lengths(arguments)),
            "output_tokens": sum(output for _, output in lengths(arguments)),
            "max_tokens": round(MAX_TOKENS / arguments.output_scale),
            "requests": arguments.requests,
            "clients": arguments.clients,
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
