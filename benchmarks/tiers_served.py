"""Sessions on a real engine whose KV cache is four times the pool, without and with host and disk tiers.

    python benchmarks/tiers_served.py --json             all variants
    python benchmarks/tiers_served.py --check            exit 1 and name the aims missed
    python benchmarks/tiers_served.py --sessions 6       fewer sessions: about ten minutes on two quiet cores
    python benchmarks/tiers_served.py --engine hf        the hf engine with --kv-offloading-size and -disk

Sessions take turns, so the pool has given up a session's blocks when its next turn comes. Each variant runs in
a process of its own:

- ``none``: the pool alone
- ``host``: a host tier that holds all sessions (vLLM's, with our worker for CPUs)
- ``disk``: a small host tier and our disk tier, which holds all sessions
- ``large``: a pool that holds all sessions. Its tokens must equal those of the tiers bit for bit. A prompt
  behind cached blocks is computed in other chunks than a whole one, so its tokens may differ from ``none``
- ``long``: three prompts of 3,000 tokens, each computed, stored in the folder, and answered again from the pool
- ``restart``: a new engine on this folder and the same prompts

Aims: the median time to the first token of turns 2 to 6 is at most 0.4 of ``none``. After the restart the
long prompts are answered at least 9 times faster than computed, by the median of three (LMCache's published
43.3 s -> 4.8 s). Tokens are equal. Prompts that hit nothing lose at most 1 % of the throughput: they are
asked in pairs, one of which is not offloaded, and the CPU time of the whole engine is compared (vLLM only:
the hf engine offloads every request). With --engine hf, the peak of the engine's memory is compared with the
plan, too. The last line is JSON.
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
import tempfile
import time
from pathlib import Path
from typing import Any

# One process and one compute thread for each engine: two threads wait for each other at every layer, so a third
# process on two cores would slow them down tenfold.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
VARIANTS = ("none", "host", "disk", "large", "long", "restart")
FIRST, NEW, ANSWER, TURNS = 400, 48, 4, 6  # tokens of a session's first turn, of a later one, and of an answer
SESSION_LEN = 768  # max_model_len of the sessions' engines, tokens
LONG, LONG_LEN = 3000, 3072  # tokens of a prompt that is known after the restart, and max_model_len there
LONG_PROMPTS = 3
FRESH, FRESH_PROMPTS = 500, 16  # tokens of a prompt that hits nothing, and pairs of them
KV_TOKEN = 46_080  # bytes of a token of the demo model in float32, by its plan
TTFT_RATIO, RESTART_RATIO, CACHED, THROUGHPUT, MEMORY = 0.4, 9.0, 0.95, 0.99, 1.03


def session_tokens() -> int:
    """Return the tokens of a session at its end."""
    return FIRST + (TURNS - 1) * NEW + TURNS * ANSWER


def options_of(variant: str, folder: str, sessions: int) -> dict[str, Any]:
    """Return the engine arguments of a variant."""
    total, length = sessions * session_tokens(), SESSION_LEN
    pool = total * 2 if variant == "large" else total // 4
    if variant in ("long", "restart"):
        length = pool = LONG_LEN
    made: dict[str, Any] = {
        "max_model_len": length, "kv_cache_memory_bytes": (max(pool, length) + 256) * KV_TOKEN,
    }  # fmt: skip
    if variant not in ("none", "large"):
        tier = {
            "type": "tonnage", "module_path": "tonnage.server.engines.vllm.disk_tier", "path": folder,
            "size": 4 * (total + LONG_PROMPTS * LONG) * KV_TOKEN,
        }  # fmt: skip
        made["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "tonnage.server.engines.vllm.cpu_offloading",
                "offload_prompt_only": False,  # as in the pool, blocks of answers are kept
                "cpu_bytes_to_use": 2 * (total if variant == "host" else length) * KV_TOKEN,
                "secondary_tiers": [] if variant == "host" else [tier],
            },
        }
    return made


class Engine:
    """A vLLM in this process, asked for one answer after another."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        from tonnage.server.demo.model import ensure_demo

        self._params = SamplingParams
        self._llm = LLM(
            model=str(ensure_demo()), dtype="float32", max_num_seqs=8,
            enforce_eager=True, disable_log_stats=False, **options,
        )  # fmt: skip

    def ask(self, tokens: list[int], count: int = ANSWER, offload: bool = True) -> tuple[list[int], float, int]:
        """Return the answer's tokens, the seconds to its first token, and the prompt's cached tokens."""
        more = {} if offload else {"extra_args": {"kv_transfer_params": {"max_offload_tokens": 0}}}
        params = self._params(max_tokens=count, temperature=0, ignore_eos=True, **more)
        (found,) = self._llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
        assert found.metrics is not None
        return list(found.outputs[0].token_ids), found.metrics.first_token_latency, found.num_cached_tokens or 0


class HFEngine:
    """Our hf engine with one compute thread, asked for one answer after another."""

    def __init__(self, options: dict[str, Any]) -> None:
        from tonnage.planner.deployment import Deployment
        from tonnage.planner.planning.build import make_plan
        from tonnage.server.demo.model import ensure_demo
        from tonnage.server.engines.hf import engine

        ensure_demo()
        tier: dict[str, Any] = {}
        if "kv_transfer_config" in options:
            extra = options.pop("kv_transfer_config")["kv_connector_extra_config"]
            tier["kv_offloading_bytes"] = extra["cpu_bytes_to_use"]
            for disk in extra["secondary_tiers"]:
                tier["kv_offloading_disk"] = f"{disk['path']},{disk['size']}"
        plan = make_plan("demo", Deployment(dtype="float32", max_num_seqs=8, **options, **tier))
        self._loop, self._engine = asyncio.new_event_loop(), engine.HFEngine(plan, threads=1)
        self._loop.run_until_complete(self._engine.start())
        self._number = 0

    def ask(self, tokens: list[int], count: int = ANSWER) -> tuple[list[int], float, int]:
        """Return the answer's tokens, the seconds to its first token, and the prompt's cached tokens."""
        return self._loop.run_until_complete(self._ask(tokens, count))

    async def _ask(self, tokens: list[int], count: int) -> tuple[list[int], float, int]:
        from tonnage.server.engines.request import GenerationRequest, SamplingParams

        self._number += 1
        params = SamplingParams(max_tokens=count, temperature=0.0)
        request = GenerationRequest(str(self._number), tuple(tokens), params)
        found: list[int] = []
        since, first, cached = time.perf_counter(), 0.0, 0
        async for chunk in self._engine.generate(request):
            if chunk.error is not None:
                raise SystemExit(chunk.error)
            first = first or time.perf_counter() - since
            found += chunk.token_ids
            cached = chunk.cached_tokens
        return found, first, cached

    def close(self) -> float:
        """Stop the engine; return the peak of its memory as a share of the plan."""
        memory = self._engine.stats().memory
        self._loop.run_until_complete(self._engine.stop())
        assert memory is not None
        assert memory.process_peak is not None
        return memory.process_peak / self._engine.plan.rank.used_bytes


def prompt(chance: random.Random, count: int) -> list[int]:
    """Return random tokens."""
    return [chance.randrange(1000, 40_000) for _ in range(count)]


def run(variant: str, folder: str, sessions: int, name: str) -> dict[str, Any]:
    """Run one variant in this process, or with the hf engine in a child of it."""
    options, chance = options_of(variant, folder, sessions), random.Random(0)
    if name == "vllm":
        return ask_all(variant, Engine(options), chance, sessions)
    engine = HFEngine(options)
    try:
        return ask_all(variant, engine, chance, sessions)
    finally:
        print(f"{variant}: {(share := engine.close()):.3f} of the planned memory", file=sys.stderr)
        Path(folder).parent.joinpath("memory").write_text(str(share))


def ask_all(variant: str, engine: Engine | HFEngine, chance: random.Random, sessions: int) -> dict[str, Any]:
    """Ask the engine of a variant for all answers."""
    engine.ask(prompt(random.Random(2), 64))  # warms up
    if variant in ("long", "restart"):
        chance = random.Random(1)
        longs = [prompt(chance, LONG) for _ in range(LONG_PROMPTS)]
        pairs = [(engine.ask(long), engine.ask(long)) for long in longs]
        return {
            "ttft_s": statistics.median(seconds for (_, seconds, _), _ in pairs),
            "cached_tokens": sum(cached for (_, _, cached), _ in pairs),
            "answers": [again if variant == "long" else tokens for (tokens, _, _), (again, _, _) in pairs],
        }
    histories = [prompt(chance, FIRST) for _ in range(sessions)]
    later: list[float] = []
    cached_tokens, answers = 0, []
    for turn in range(TURNS):
        for history in histories:
            if turn:
                history += prompt(chance, NEW)
            tokens, seconds, cached = engine.ask(history)
            history += tokens
            answers.append(tokens)
            if turn:
                later.append(seconds)
                cached_tokens += cached
        print(f"{variant}: turn {turn + 1} of {TURNS}", file=sys.stderr, flush=True)
    found = {
        "ttft_median_s": statistics.median(later), "ttft_p99_s": statistics.quantiles(later, n=100)[98],
        "cached_tokens": cached_tokens, "answers": answers,
    }  # fmt: skip
    if isinstance(engine, HFEngine):
        return found
    plain, stored = [], []
    for _ in range(FRESH_PROMPTS):  # pairs of new prompts, so that both kinds meet the same load
        for took, offload in chance.sample([(plain, False), (stored, True)], 2):
            tokens, used = prompt(chance, FRESH), time.process_time()
            engine.ask(tokens, 1, offload=offload)
            took.append(time.process_time() - used)
    return found | {"fresh_plain_cpu_s": sum(plain), "fresh_stored_cpu_s": sum(stored)}


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Return the figures that have aims, as ratios to the engine without a tier."""
    none = found["none"]
    made = {
        "restart_times_faster": found["long"]["ttft_s"] / found["restart"]["ttft_s"],
        "restart_cached": found["restart"]["cached_tokens"] / (LONG_PROMPTS * LONG),
        "restart_equal_answers": equal(found["restart"]["answers"], found["long"]["answers"]),
    }
    for name in ("host", "disk"):
        made[f"{name}_ttft"] = found[name]["ttft_median_s"] / none["ttft_median_s"]
        each = found[name]
        if "fresh_plain_cpu_s" in each:
            made[f"{name}_throughput_without_hits"] = each["fresh_plain_cpu_s"] / each["fresh_stored_cpu_s"]
        if "memory" in each:
            made[f"{name}_memory_of_plan"] = each["memory"]
        made[f"{name}_equal_answers"] = equal(found[name]["answers"], found["large"]["answers"])
    return made


def missed(made: dict[str, float]) -> list[str]:
    """Return the aims that the figures miss."""
    wrong = []
    for name in ("host", "disk"):
        if (ratio := made[f"{name}_ttft"]) > TTFT_RATIO:
            wrong.append(f"{name}: {ratio:.2f} of the time to the first token, aim {TTFT_RATIO}")
        if (share := made.get(f"{name}_memory_of_plan", 0.0)) > MEMORY:
            wrong.append(f"{name}: {share:.3f} of the planned memory, aim {MEMORY}")
        if (share := made.get(f"{name}_throughput_without_hits", 1.0)) < THROUGHPUT:
            wrong.append(f"{name}: {share:.3f} of the throughput without hits, aim {THROUGHPUT}")
    if (faster := made["restart_times_faster"]) < RESTART_RATIO:
        wrong.append(f"restart: {faster:.1f} times faster than computing {LONG} tokens, aim {RESTART_RATIO}")
    if (share := made["restart_cached"]) < CACHED:
        wrong.append(f"restart: {share:.2f} of the known tokens are cached, aim {CACHED}")
    for name in ("host", "disk", "restart"):
        if made[f"{name}_equal_answers"] < 1:
            wrong.append(f"{name}: tokens differ from those of a prefix in the pool")
    return wrong


def equal(one: list[list[int]], other: list[list[int]]) -> float:
    """Return the share of equal answers."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def main() -> int:
    """Run the variants in processes of their own and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "hf"), default="vllm")
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--check", action="store_true", help="exit 1 and name the aims missed")
    parser.add_argument("--json", action="store_true", help="accepted: the last line is always JSON")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant is not None:
        result = run(options.variant, f"{options.folder}/kv", options.sessions, options.engine)
        Path(options.folder, "result.json").write_text(json.dumps(result))
        return 0
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for variant in VARIANTS:
            command = [sys.executable, __file__, "--variant", variant, "--folder", folder]
            command += ["--sessions", str(options.sessions), "--engine", options.engine]
            subprocess.run(command, stdout=sys.stderr, check=True, env=os.environ | ENVIRONMENT)
            found[variant] = json.loads(Path(folder, "result.json").read_text())
            if options.engine == "hf":
                found[variant]["memory"] = float(Path(folder, "memory").read_text())
    made = ratios(found)
    wrong = missed(made)
    for each in wrong:
        print(f"missed: {each}", file=sys.stderr)
    for each in found.values():
        each.pop("answers", None)
    machine = {"cores": os.cpu_count(), "load": os.getloadavg()}
    made = {name: round(value, 4) for name, value in made.items()}
    result = {
        "machine": machine,
        "engine": options.engine,
        "sessions": options.sessions,
        "ratios": made,
        "missed": wrong,
    }
    print(json.dumps(result | {"variants": found}))
    return int(options.check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
