"""Output tokens per second of HFEngine and of transformers' continuous batching (``generate_batch``).

Same model, prompts, lengths, dtype, thread count and OpenMP wait policy; each side in a process of its own, the
sides alternate, medians are compared. Prints a table, and one JSON object as the last line with ``--json``.

    python benchmarks/hf_engine.py --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

WORDS = Path(__file__).read_text().split()


def prompts(count: int, words: int) -> list[list[int]]:
    """Token ids of ``count`` different short prompts, the same on both sides."""
    from tokenizers import Tokenizer

    from tonnage.server.demo_model import ensure_demo

    tokenizer = Tokenizer.from_file(str(ensure_demo() / "tokenizer.json"))
    draw = random.Random(0)
    return [tokenizer.encode(" ".join(draw.choices(WORDS, k=words))).ids for _ in range(count)]


def run_tonnage(ids: list[list[int]], tokens: int, threads: int) -> float:
    """Seconds from the first submit to the last token."""
    from tonnage.planner.build import make_plan
    from tonnage.planner.plan import Deployment
    from tonnage.server.engines.base import GenerationRequest, SamplingParams
    from tonnage.server.engines.hf import HFEngine

    plan = make_plan("demo", Deployment(dtype="bfloat16", kv_cache_memory_bytes=512 << 20, max_model_len=2048))

    async def one(engine: HFEngine, name: str, prompt: list[int], length: int) -> None:
        params = SamplingParams(max_tokens=length, temperature=0.0)
        got = 0
        async for chunk in engine.generate(GenerationRequest(name, tuple(prompt), params)):
            got += len(chunk.token_ids)
        assert got == length, got

    async def whole() -> float:
        engine = HFEngine(plan, threads=threads)
        await engine.start()
        try:
            await one(engine, "warm-up", ids[0][:4], 4)
            start = time.perf_counter()
            await asyncio.gather(*(one(engine, str(i), prompt, tokens) for i, prompt in enumerate(ids)))
            return time.perf_counter() - start
        finally:
            await engine.stop()

    return asyncio.run(whole())


def run_generate_batch(ids: list[list[int]], tokens: int, threads: int) -> float:
    """Seconds of ``model.generate_batch`` on the same prompts, after a short warm-up of it."""
    import torch
    import transformers

    from tonnage.server.demo_model import ensure_demo

    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        ensure_demo(), dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()

    def generate(batch: list[list[int]], length: int) -> None:
        config = transformers.GenerationConfig(
            max_new_tokens=length, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        answers = model.generate_batch(inputs=batch, generation_config=config, progress_bar=False)
        assert all(len(answer.generated_tokens) == length for answer in answers.values())

    generate([ids[0][:4]], 4)
    start = time.perf_counter()
    generate(ids, tokens)
    return time.perf_counter() - start


SIDES = {"tonnage": run_tonnage, "generate_batch": run_generate_batch}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each request")
    parser.add_argument("--prompt-words", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        ids = prompts(args.requests, args.prompt_words)
        print("seconds", SIDES[args.side](ids, args.tokens, args.threads))
        return 0

    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    environment = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(args.threads), **os.environ}
    for number in range(args.rounds):
        for side in SIDES:
            command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("seconds ")]
            if done.returncode or not lines:
                sys.stderr.write(done.stderr)
                return 1
            rates[side].append(args.requests * args.tokens / float(lines[-1].split()[1]))
            print(f"round {number + 1}: {side:15} {rates[side][-1]:8.1f} tok/s", flush=True)
    medians = {side: statistics.median(values) for side, values in rates.items()}
    result = {
        "case": f"{args.requests}x{args.tokens}",
        "dtype": "bfloat16",
        "threads": args.threads,
        "load_average": os.getloadavg()[0],
        "tokens_per_second": medians,
        "ratio_vs_generate_batch": medians["tonnage"] / medians["generate_batch"],
    }
    print(f"HFEngine is {result['ratio_vs_generate_batch']:.2f}x generate_batch")
    if args.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
