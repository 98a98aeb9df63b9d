"""Measures whether the time of an answer tells one tenant which prompts another tenant has sent.

    python benchmarks/tenant_timing.py                          hf and vLLM, 1,000 pairs: about fifteen minutes
    python benchmarks/tenant_timing.py --engine hf --pairs 200
    python benchmarks/tenant_timing.py --engine hf --tier       with a KV tier in host memory and on disk
    python benchmarks/tenant_timing.py --check                  exit 1 if the time tells anything

For each pair, one tenant sends a new prompt. Then another tenant sends this prompt and one that the server has
not seen, in random order. Prefix caches of tenants are separate, so both must take the same time. `share` is
the part of the pairs in which the known prompt was answered earlier: 0.5 without any difference. The limit is
three standard errors. As a control, the first tenant sends its own prompt again, from the prefix cache. There
the share must be close to 1, or the benchmark would see no difference at all. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from typing import Any

from abuse.raw_http import COMPLETIONS, answer, connection, request
from abuse.server_process import ABUSER, VICTIM, AttackedServer, running_server

from tonnage.server.demo.model import ensure_demo

ENGINES = ("hf", "vllm")
TOKENS = 96  # of a prompt: six blocks of 16
CONTROLS = 100
LEAST_CONTROL = 0.9  # share of the pairs of one tenant in which the prefix cache is seen


async def seconds(server: AttackedServer, key: str, prompt: list[int]) -> float:
    """Return how long the answer to a prompt took, of one token."""
    async with connection(server.address) as (reader, writer):
        since = time.perf_counter()
        writer.write(request(COMPLETIONS, key, {"prompt": prompt, "max_tokens": 1}))
        said = await answer(reader)
    if said != "200":
        raise SystemExit(f"the server answered {said}")
    return time.perf_counter() - since


async def differences(server: AttackedServer, asker: str, pairs: int, chance: random.Random) -> list[float]:
    """Return the seconds of the known prompt less those of the unknown one, for each pair of ``asker``."""
    found = []
    for number in range(pairs):
        if number % 50 == 0:
            print(f"{server.engine}: pair {number} of {pairs}", file=sys.stderr)
        known, unknown = ([chance.randrange(1000, 40_000) for _ in range(TOKENS)] for _ in range(2))
        await seconds(server, VICTIM, known)
        order = [known, unknown]
        chance.shuffle(order)
        took = {id(prompt): await seconds(server, asker, prompt) for prompt in order}
        found.append(took[id(known)] - took[id(unknown)])
    return found


def summary(found: list[float]) -> dict[str, Any]:
    """Return the share of pairs in which the known prompt was faster, and the median difference."""
    return {
        "pairs": len(found),
        "share": round(sum(each < 0 for each in found) / len(found), 4),
        "median_difference_ms": round(1e3 * statistics.median(found), 3),
    }


async def measure(engine: str, pairs: int, seed: int, tier: bool) -> dict[str, Any]:
    """Return the figures of one engine."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        more = ("--kv-offloading-size", "0.5", "--kv-offloading-disk", f"{folder}/kv,4GiB") if tier else ()
        server = stack.enter_context(running_server(engine, more=more))
        await differences(server, ABUSER, 5, chance)  # warms up
        control = summary(await differences(server, VICTIM, min(CONTROLS, pairs), chance))
        other = summary(await differences(server, ABUSER, pairs, chance))
    limit = 3 * 0.5 / pairs**0.5
    missed = []
    if control["share"] < LEAST_CONTROL:
        missed.append(f"{engine}: the control shows no prefix cache")
    if abs(other["share"] - 0.5) > limit:
        missed.append(f"{engine}: the time tells which prompts are known")
    return {"own_prompts": control, "of_another_tenant": other, "limit": round(limit, 4), "missed": missed}


def main() -> int:
    """Measure the engines; return 1 with ``--check`` if an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--tier", action="store_true", help="with a KV tier; hf only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="exit 1 and name the aims missed")
    parser.add_argument("--json", action="store_true", help="accepted: the last line is always JSON")
    options = parser.parse_args()
    if options.tier and options.engine != ["hf"]:
        parser.error("--tier needs --engine hf")
    ensure_demo()
    engines = {
        engine: asyncio.run(measure(engine, options.pairs, options.seed, options.tier))
        for engine in options.engine
    }
    missed = [each for found in engines.values() for each in found["missed"]]
    for each in missed:
        print(f"missed: {each}", file=sys.stderr)
    print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg(), "engines": engines}))
    return int(options.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
