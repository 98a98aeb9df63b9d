"""Measure the quality cost of a narrower KV cache: perplexity with each --kv-cache-dtype.

The text (README.md and LICENSE of this repository) is cut into windows of ``--window`` tokens. Each window is
a prompt, and the engine returns its log probabilities. They are computed in chunks of
``--max-num-batched-tokens`` through the paged pool, as in serving. Beside perplexity are the bytes of a
token, and the largest difference from ``auto`` at one token.

    python benchmarks/kv_quality.py --json                  (half an hour on 2 busy cores, because all but
                                                            bfloat16 use the reference attention)
    python benchmarks/kv_quality.py --json --windows 1 --kv-cache-dtypes auto,fp8,int8_per_token_head
"""

from __future__ import annotations

import argparse
import json
import math
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from tonnage.planner.deployment import Deployment
from tonnage.planner.model.dtypes import HF_KV_DTYPE_BYTES
from tonnage.planner.planning.build import make_plan
from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines.hf.child import EngineLoop
from tonnage.server.engines.request import GenerationRequest, SamplingParams

ROOT = Path(__file__).parents[1]


def measure(
    model: str, windows: list[list[int]], dtype: str, kv_cache_dtype: str, chunk: int
) -> dict[str, Any]:
    """Return perplexity and memory with one cache dtype."""
    plan = make_plan(
        model,
        Deployment(
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_memory_bytes=256 << 20,
            max_model_len=len(windows[0]) + 16,
            max_num_batched_tokens=chunk,
            enable_prefix_caching=False,
        ),
    )
    ours, theirs = Pipe()
    with ours, theirs:
        loop = EngineLoop(plan, theirs, torch.get_num_threads())
        scored: dict[str, list[float]] = {}
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        for number, window in enumerate(windows):
            loop.add(GenerationRequest(str(number), tuple(window), params))
        while not loop.scheduler.idle:
            for part in loop.step():
                if part.error:
                    raise SystemExit(part.error)
                scored[part.request_id] = [one.logprob for one in part.prompt_logprobs if one is not None]
    logprobs = [value for name in sorted(scored, key=int) for value in scored[name]]
    layout = plan.kv_cache.layout
    return {
        "kv_cache_dtype": kv_cache_dtype,
        "bytes_per_token": layout.bytes_per_token,
        "planned_bytes": plan.rank.kv_pool_bytes,
        "measured_bytes": loop.runner.pool.nbytes,
        "tokens": len(logprobs),
        "perplexity": math.exp(-sum(logprobs) / len(logprobs)),
        "logprobs": logprobs,
    }


def main() -> None:
    """Measure each cache dtype and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="folder (default: the demo model)")
    parser.add_argument("--dtype", default="bfloat16")
    names = ("auto", *HF_KV_DTYPE_BYTES)
    parser.add_argument("--kv-cache-dtypes", default=",".join(names), help="the first is the reference")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    folder = args.model or str(ensure_demo())
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    text = (ROOT / "README.md").read_text() + (ROOT / "LICENSE").read_text()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    windows = [ids[at : at + args.window] for at in range(0, len(ids) - args.window, args.window)][
        : args.windows
    ]
    rows = []
    for name in args.kv_cache_dtypes.split(","):
        row = measure(folder, windows, args.dtype, name, args.max_num_batched_tokens)
        assert row["planned_bytes"] == row["measured_bytes"], row
        first = rows[0] if rows else row
        change = row["perplexity"] / first["perplexity"] - 1
        row["worst_token"] = max(abs(a - b) for a, b in zip(row["logprobs"], first["logprobs"], strict=True))
        row["change_percent"] = 100 * change
        rows.append(row)
        print(
            f"{name:22} {row['bytes_per_token']:7,} bytes a token  perplexity {row['perplexity']:.4f} "
            f"({100 * change:+.2f} %), one token at most {row['worst_token']:.2f} nats",
            flush=True,
        )
    if args.json:
        for row in rows:
            del row["logprobs"]
        print(json.dumps({"dtype": args.dtype, "window": args.window, "rows": rows}))


if __name__ == "__main__":
    main()
