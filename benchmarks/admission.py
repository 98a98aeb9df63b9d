"""Compare admission policies on one trace: steps, preemptions, recomputation, stalls.

The loop is closed: all requests are waiting at the start, in trace order, and up to 256 run at once. A step
gives each running request one token, then admits whole prompts up to 16,384 tokens. With ``--chunk N``,
prefill is chunked and a step has N tokens for decodes and chunks together. There is no prefix cache. Every
block comes from the real KVCacheManager, and every decision from the real Admission. ``--check`` verifies all
invariants at every step.

    python benchmarks/admission.py --trace TRACE --n 2000 --blocks 4096 --max-tokens 1000 --json

- ``auto`` chooses between vLLM's rule and the predictive rule; ``auto_warm`` has learned from the trace once
  before.
- ``greedy`` is vLLM's rule, ``no_evict`` the rule of TensorRT-LLM and mini-sglang.
- ``oracle`` is the predictive rule with the true lengths and no watermark.
- ``guaranteed_max`` and ``guaranteed_q90`` are guaranteed mode with max_tokens or another learned quantile as
  forecast. The guarantee is the same, the waiting times differ.

Fewer steps are better. A stalled sequence is skipped in a step, which the number of steps does not show.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from invariants import check_step

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.cache.admission.forecast import LengthForecast
from tonnage.cache.replay.simulator import Setup, Simulator
from tonnage.cache.replay.step_time import StepTime
from tonnage.cache.replay.trace import Trace, read_trace
from tonnage.planner.model.layout import KVGroup, KVLayout

LAYOUT = KVLayout((KVGroup("full", (0,)),), 16, 1, 8, 128, "bfloat16", 2)
# The result counts steps, but ``auto`` weighs their duration: 17 ms, or 1 ms per token if that is more (the CPU
# of benchmarks/vllm_admission.py).
STEP = StepTime(17, 1, 1e-9, 1000.0, 2000.0)
POLICIES = {
    "guaranteed": Policy(),
    "guaranteed_max": Policy(length_quantile=1.0),
    "guaranteed_q90": Policy(length_quantile=0.9),
    "predictive": Policy(AdmissionMode.PREDICTIVE),
    "auto": Policy(AdmissionMode.AUTO),
    "auto_warm": Policy(AdmissionMode.AUTO),
    "greedy": Policy(AdmissionMode.GREEDY),
    "no_evict": Policy(AdmissionMode.NO_EVICT),
    "oracle": Policy(AdmissionMode.PREDICTIVE, watermark=0.0),
}


class Oracle(LengthForecast):
    """A forecast with the true output length of each request, which is passed as the tenant's name."""

    def left(self, output: np.ndarray, output_left: np.ndarray, keys: list[str] | None = None) -> np.ndarray:
        """Return the true number of tokens that each sequence still generates."""
        true = np.array([int(key) for key in keys or ()], dtype=np.int64)
        return np.maximum(true - output, 1)


def simulate(trace: Trace, name: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Replay ``trace`` with one policy and return its figures."""
    policy = POLICIES[name]
    if name == "oracle":
        outputs = [min(r.output_tokens, arguments.max_tokens) for r in trace.requests]
        requests = tuple(replace(r, tenant=str(o)) for r, o in zip(trace.requests, outputs, strict=True))
        trace = replace(trace, requests=requests)
    longest = max(request.prompt_tokens for request in trace.requests) + arguments.max_tokens
    setup = Setup(
        layout=LAYOUT,
        num_blocks=arguments.blocks + 1,
        max_num_seqs=arguments.running,
        max_model_len=longest,
        budget=arguments.chunk or 16_384,
        max_tokens=arguments.max_tokens,
        policy=policy,
        step_time=STEP,
        whole_prompts=not arguments.chunk,
        scale=None,
        enable_prefix_caching=False,
        lookahead=arguments.lookahead,
        leap=False,
        check=check_step if arguments.check else None,
    )
    simulator = Simulator(trace, setup)
    if name == "oracle":
        simulator.manager.admission.rules.forecast = Oracle(policy.quantile)
    if name == "auto_warm":
        first = Simulator(trace, setup)
        first.run()
        taught = first.manager.admission
        simulator.manager.admission.auto = taught.auto
        simulator.manager.admission.rules.forecast = taught.rules.forecast
    begin = time.process_time()
    result = simulator.run()
    cpu = time.process_time() - begin
    return {
        "steps": result.steps,
        "preemptions": result.preemptions,
        "recomputed_share": round(result.recomputed_share, 4),
        "stalls": result.stalls,
        "stall_share": round(result.stall_share, 5),
        "longest_stall": result.longest_stall,
        "mean_running": round(result.mean_running, 1),
        "finished": result.finished,
        "rejected": result.rejected,
        "cpu_seconds": round(cpu, 1),
    }


def main() -> None:
    """Replay the trace with each policy and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--n", type=int, default=2000)
    parser.add_argument("--blocks", type=int, default=4096)
    parser.add_argument("--max-tokens", type=int, default=1000)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--chunk", type=int, help="tokens per step (default: whole prompts)")
    parser.add_argument(
        "--lookahead", type=int, help="queue entries considered behind a blocked head (default: by mode)"
    )
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--check", action="store_true", help="check all invariants after every step (slow)")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace, limit=arguments.n)
    answer: dict[str, object] = {}
    for name in arguments.policies.split(","):
        answer[name] = simulate(trace, name, arguments)
        if not arguments.json:
            print(f"{name:15} {answer[name]}", file=sys.stderr)
    answer["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
