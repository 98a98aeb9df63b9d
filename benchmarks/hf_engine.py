"""Compare output tokens per second of HFEngine, vLLM on a CPU, and transformers (generate, generate_batch).

All sides have the same model, prompts, lengths and dtype. Each runs in its own process, the sides alternate,
and medians are compared. vLLM runs with its defaults (one core reserved for its API) and on all cores, eager
and compiled; the better of eager and compiled counts. The time from process start to the first answer is
measured too.

    python benchmarks/hf_engine.py --json                 everything (about half an hour on 2 cores)
    python benchmarks/hf_engine.py --json --cases 16x64 --sides tonnage,vllm-eager --rounds 1
    python benchmarks/hf_engine.py --json --model FOLDER  another model, for example Gemma-3-270M
    GOMP_SPINCOUNT=1000 python benchmarks/hf_engine.py --json --step 16x64
        one decode step of tonnage in this process, alternating layers as one call each and as separate modules
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

# requests, prompt tokens, output tokens
CASES = {"1x64": (1, 16, 64), "16x64": (16, 16, 64), "32x512+64": (32, 512, 64)}
POOL = 1 << 30
Result = dict[str, float]  # seconds of the case, start (seconds from process start), threads, cpu seconds


def prompts(folder: str, count: int, tokens: int) -> list[list[int]]:
    """Return the token ids of ``count`` different prompts of words, the same for every side."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    words = [word for word in Path(__file__).read_text().split() if word.isalpha()]
    draw = random.Random(0)
    return [tokenizer.encode(" ".join(draw.choices(words, k=2 * tokens))).ids[:tokens] for _ in range(count)]


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its ended children."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)


async def measured(
    one: Callable[[str, list[int], int], Awaitable[int]], ids: list[list[int]], tokens: int
) -> tuple[float, float]:
    """Measure one side: return the seconds from process start to the first answer, and of the case.

    ``one`` generates for one prompt and returns its number of output tokens.
    """
    assert await one("warm-up", ids[0][:4], 4) == 4
    ready = time.time() - STARTED
    # A short warm-up round with the same shapes loads kernels and fills the allocators.
    await asyncio.gather(*(one(f"w{i}", prompt[::-1], 2) for i, prompt in enumerate(ids)))
    start = time.perf_counter()
    made = await asyncio.gather(*(one(str(i), prompt, tokens) for i, prompt in enumerate(ids)))
    seconds = time.perf_counter() - start
    assert made == [tokens] * len(ids), made
    return ready, seconds


def run_tonnage(folder: str, ids: list[list[int]], tokens: int, threads: int) -> Result:
    """Measure this project's engine."""
    from tonnage.planner.deployment import Deployment
    from tonnage.planner.planning.build import make_plan
    from tonnage.server.engines.hf import HFEngine
    from tonnage.server.engines.request import GenerationRequest, SamplingParams

    plan = make_plan(folder, Deployment(dtype="bfloat16", kv_cache_memory_bytes=POOL, max_model_len=2048))

    async def whole() -> Result:
        engine = HFEngine(plan, threads=threads)

        async def one(name: str, prompt: list[int], length: int) -> int:
            request = GenerationRequest(name, tuple(prompt), SamplingParams(max_tokens=length, temperature=0.0))
            return sum([len(chunk.token_ids) async for chunk in engine.generate(request)])

        await engine.start()
        try:
            ready, seconds = await measured(one, ids, tokens)
        finally:
            await engine.stop()
        return {"seconds": seconds, "start": ready, "threads": threads}

    return asyncio.run(whole())


def vllm_side(*, eager: bool, all_cores: bool) -> Callable[..., Result]:
    """Return the measurement of vLLM, eager or compiled, on all cores or with one reserved."""

    def run(folder: str, ids: list[list[int]], tokens: int, threads: int) -> Result:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(POOL >> 30)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if all_cores:
            os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
        from vllm import AsyncEngineArgs, SamplingParams
        from vllm.v1.engine.async_llm import AsyncLLM

        async def whole() -> Result:
            arguments = AsyncEngineArgs(
                folder, dtype="bfloat16", max_model_len=2048, enforce_eager=eager, disable_log_stats=True
            )
            llm = AsyncLLM.from_engine_args(arguments)

            async def one(name: str, prompt: list[int], length: int) -> int:
                params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
                made = 0
                async for output in llm.generate({"prompt_token_ids": prompt}, params, name):
                    made = len(output.outputs[0].token_ids)
                return made

            try:
                ready, seconds = await measured(one, ids, tokens)
            finally:
                llm.shutdown()
            return {
                "seconds": seconds,
                "start": ready,
                "threads": threads if all_cores else max(1, threads - 1),
            }

        return asyncio.run(whole())

    return run


def load(folder: str, threads: int) -> Any:
    """Return the model as a transformers module."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()


def timed(generate: Callable[[list[list[int]], int], None], ids: list[list[int]], tokens: int) -> Result:
    """Measure ``generate`` after a warm-up."""
    generate([ids[0][:4]], 4)
    ready = time.time() - STARTED
    generate([prompt[::-1] for prompt in ids], 2)
    start = time.perf_counter()
    generate(ids, tokens)
    return {"seconds": time.perf_counter() - start, "start": ready}


def run_generate(folder: str, ids: list[list[int]], tokens: int, threads: int) -> Result:
    """Measure transformers' generate on one padded batch."""
    import torch
    import transformers

    model = load(folder, threads)

    def generate(batch: list[list[int]], length: int) -> None:
        config = transformers.GenerationConfig(
            max_new_tokens=length, min_new_tokens=length, do_sample=False, pad_token_id=0
        )
        width = max(map(len, batch))
        rows = torch.tensor([[0] * (width - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        with torch.inference_mode():
            out = model.generate(rows, attention_mask=mask, generation_config=config)
        assert out.shape[1] == width + length

    return {**timed(generate, ids, tokens), "threads": threads}


def run_generate_batch(folder: str, ids: list[list[int]], tokens: int, threads: int) -> Result:
    """Measure transformers' continuous batching."""
    import transformers

    model = load(folder, threads)

    def generate(batch: list[list[int]], length: int) -> None:
        config = transformers.GenerationConfig(
            max_new_tokens=length, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        answers = model.generate_batch(inputs=batch, generation_config=config, progress_bar=False)
        assert all(len(answer.generated_tokens) == length for answer in answers.values())

    return {**timed(generate, ids, tokens), "threads": threads}


def steps(folder: str, ids: list[list[int]], tokens: int, threads: int) -> dict[str, Any]:
    """Return milliseconds and CPU time of a decode step (median, minimum), with scheduler and sampling."""
    from multiprocessing import Pipe

    from tonnage.planner.deployment import Deployment
    from tonnage.planner.planning.build import make_plan
    from tonnage.server.engines.hf.child import EngineLoop
    from tonnage.server.engines.request import GenerationRequest, SamplingParams

    plan = make_plan(folder, Deployment(dtype="bfloat16", kv_cache_memory_bytes=POOL, max_model_len=2048))
    with Pipe()[0] as unused:
        loop = EngineLoop(plan, unused, threads)
    layers = {m: m.forward for m in loop.runner.model.modules() if type(m.forward).__name__ == "OneCall"}
    for number, prompt in enumerate(ids):
        params = SamplingParams(max_tokens=tokens, temperature=0.0)
        loop.scheduler.add(GenerationRequest(str(number), tuple(prompt), params))
    start = time.perf_counter()
    while loop.scheduler.entries or not all(one.decodes for one in loop.scheduler.running.values()):
        loop.step()
    prefill = time.perf_counter() - start
    times: dict[str, list[float]] = {"one call": [], "modules": []}
    cpu: dict[str, list[float]] = {"one call": [], "modules": []}
    while len(loop.scheduler.running) == len(ids):
        for side in times:
            for module, forward in layers.items():
                if side == "modules":
                    del module.forward
                else:
                    module.forward = forward
            clock, mine = time.perf_counter(), time.process_time()
            loop.step()
            times[side].append(1e3 * (time.perf_counter() - clock))
            cpu[side].append(1e3 * (time.process_time() - mine))
            if len(loop.scheduler.running) < len(ids):
                break
    return {
        "layers in one call": len(layers),
        "prefill_seconds": round(prefill, 3),
        "step_ms": {side: round(statistics.median(found[1:]), 2) for side, found in times.items()},
        "least_step_ms": {side: round(min(found), 2) for side, found in times.items()},
        "cpu_ms": {side: round(statistics.median(found[1:]), 2) for side, found in cpu.items()},
    }


SIDES: dict[str, Callable[..., Result]] = {
    "tonnage": run_tonnage,
    "vllm-eager": vllm_side(eager=True, all_cores=False),
    "vllm-compiled": vllm_side(eager=False, all_cores=False),
    "vllm-eager-all-cores": vllm_side(eager=True, all_cores=True),
    "vllm-compiled-all-cores": vllm_side(eager=False, all_cores=True),
    "generate": run_generate,
    "generate_batch": run_generate_batch,
}


def in_its_own_process(side: str, case: str, folder: str, threads: int, limit: float) -> Result | str:
    """Run one engine in a new process and return its figures, or the reason for a failure."""
    command = [sys.executable, __file__, "--side", side, "--cases", case, "--model", folder]
    # The hf engine sets its own OpenMP wait policy. For torch alone on a shared machine, sleeping is fastest.
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if side.startswith("generate"):
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    before = cpu_seconds()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {limit:.0f} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return last[:200]
    return {**json.loads(lines[-1].removeprefix("result ")), "process_cpu": cpu_seconds() - before}


def best(medians: dict[str, float], *sides: str) -> float | None:
    """Return the largest median of ``sides``, or None."""
    return max((medians[side] for side in sides if side in medians), default=None)


def ratio(a: float | None, b: float | None) -> float | None:
    """Return a / b, rounded, or None if one is missing."""
    return round(a / b, 3) if a and b else None


def summary(results: dict[str, list[Result]], requests: int, tokens: int) -> dict[str, Any]:
    """Return the report of one case: rates, start times and ratios."""
    rates = {
        side: statistics.median(requests * tokens / one["seconds"] for one in found)
        for side, found in results.items()
        if found
    }
    starts = {
        side: statistics.median(one["start"] for one in found) for side, found in results.items() if found
    }
    ours, vllm_start = rates.get("tonnage"), [starts[s] for s in starts if s.startswith("vllm")]
    return {
        "tokens_per_second": {side: round(rate, 1) for side, rate in rates.items()},
        "threads": {side: int(found[0]["threads"]) for side, found in results.items() if found},
        "seconds_to_first_answer": {side: round(value, 1) for side, value in starts.items()},
        "ratio_vs_vllm": ratio(ours, best(rates, "vllm-eager", "vllm-compiled")),
        "ratio_vs_vllm_all_cores": ratio(ours, best(rates, "vllm-eager-all-cores", "vllm-compiled-all-cores")),
        "ratio_vs_generate": ratio(ours, rates.get("generate")),
        "ratio_vs_generate_batch": ratio(ours, rates.get("generate_batch")),
        "start_vs_vllm": ratio(starts.get("tonnage"), min(vllm_start, default=None)),
    }


def main() -> int:
    """Run the selected cases and sides, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES), help=f"comma-separated: {', '.join(CASES)}")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"comma-separated: {', '.join(SIDES)}")
    parser.add_argument("--model", default="", help="model folder (default: the demo model)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit", type=float, default=900, help="time limit of one side in seconds")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--step", choices=CASES, help="measure only a decode step of this case")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        requests, prompt, tokens = CASES[args.cases]
        ids = prompts(args.model, requests, prompt)
        print("result", json.dumps(SIDES[args.side](args.model, ids, tokens, args.threads)))
        return 0
    cases, sides = args.cases.split(","), args.sides.split(",")
    for name, known in (*((case, CASES) for case in cases), *((side, SIDES) for side in sides)):
        if name not in known:
            parser.error(f"{name!r} is not one of {', '.join(known)}")
    from tonnage.server.demo.model import ensure_demo

    folder = args.model or str(ensure_demo())
    if args.step:
        requests, prompt, tokens = CASES[args.step]
        found = steps(folder, prompts(folder, requests, prompt), tokens, args.threads)
        found |= {"case": args.step, "threads": args.threads, "load_average": os.getloadavg()[0]}
        print(
            json.dumps(found) if args.json else "\n".join(f"{name}: {value}" for name, value in found.items())
        )
        return 0
    report: dict[str, Any] = {"model": Path(folder).name, "dtype": "bfloat16", "cores": args.threads}
    for case in cases:
        requests, prompt, tokens = CASES[case]
        results: dict[str, list[Result]] = {side: [] for side in sides}
        failed: dict[str, str] = {}
        for number in range(args.rounds):
            for side in sides:
                found = in_its_own_process(side, case, folder, args.threads, args.limit)
                if isinstance(found, str):
                    failed[side] = found
                    print(f"{case} round {number + 1}: {side:24} failed: {found}", flush=True)
                    continue
                results[side].append(found)
                rate = requests * tokens / found["seconds"]
                print(
                    f"{case} round {number + 1}: {side:24} {rate:8.1f} tok/s, {found['threads']:.0f} threads, "
                    f"first answer after {found['start']:.1f} s, {found['process_cpu']:.1f} CPU s in all",
                    flush=True,
                )
        report[case] = summary(results, requests, tokens)
        if failed:
            report[case]["failed"] = failed
        report[case]["load_average"] = os.getloadavg()[0]
    if args.json:
        print(json.dumps(report))
    return 0


STARTED = time.time()

if __name__ == "__main__":
    sys.exit(main())
