"""The sign of a replay's verdict beside published pairs of servers with and without a KV tier.

Each pair is a workload as its source describes it, replayed with and without the tier. A tier pays if the mean
time to first token falls by more than 1 %. What a source does not state is in `assumed`. tiers_truth.py prints
the pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tonnage.cache.admission import Policy
from tonnage.cache.replay.simulator import Setup, Simulator
from tonnage.cache.replay.step_time import StepTime
from tonnage.cache.replay.tier_curve import chunk_uses, optimum, tier_curve
from tonnage.cache.replay.tier_verdict import TierVerdict
from tonnage.cache.replay.tiers import TierSetup
from tonnage.cache.replay.trace import Trace, TraceRequest
from tonnage.planner.devices.catalogue import find_gpu
from tonnage.planner.plans import Plan

BLOCK = 256  # tokens per hash id of the made traces
GB = 10**9
GH200 = (4.0e12, 989e12)  # NVIDIA's data sheet of the GH200 with 96 GB of HBM3
RTX_4090 = (1.008e12, 165.2e12)  # NVIDIA's Ada architecture paper, FP16 with FP32 accumulation, dense
MI300X = (5.3e12, 1307.4e12)  # AMD's data sheet, bfloat16 dense
PCIE_4, PCIE_5, C2C = 31.5e9, 63.0e9, 450e9  # as server/commands/replay_tiers.py


@dataclass(frozen=True)
class Pair:
    """A published comparison of one server with and without a tier.

    Attributes:
        source: Where it was published.
        model: Config that is planned.
        gpu: Device of the catalogue.
        pays: Whether the published times to first token fell by more than 1 %.
        requests: The workload.
        host_bytes: Size of the tier on each rank.
        link: Bytes per second from host memory to one GPU.
        assumed: What the source does not state.
        flags: Flags of the plan.
        pool_tokens: Tokens of the GPU's pool, where the source states them; None: as planned.
        speed: Bytes and 16-bit operations per second of the device, where the catalogue has none.
    """

    source: str
    model: str
    gpu: str
    pays: bool
    requests: tuple[TraceRequest, ...]
    host_bytes: int
    link: float
    assumed: str
    flags: dict[str, Any]
    pool_tokens: int | None = None
    speed: tuple[float, float] | None = None


def prompts(rows: list[tuple[float, int, int]], output: int, shared: int = 0) -> tuple[TraceRequest, ...]:
    """Return requests from (arrival, document, tokens); equal documents begin with equal tokens.

    ``shared`` tokens at the beginning are equal in all prompts.
    """
    made = []
    for arrival, document, tokens in rows:
        blocks, common = -(-tokens // BLOCK), shared // BLOCK
        ids = tuple(place if place < common else (1 + document) * 10_000 + place for place in range(blocks))
        made.append(TraceRequest(arrival, tokens, output, hash_ids=ids, hash_block=BLOCK))
    return tuple(sorted(made, key=lambda request: request.arrival))


def rounds(documents: int, tokens: int, count: int, output: int, gap: float) -> tuple[TraceRequest, ...]:
    """Return ``count`` rounds in which documents are read in turn, ``gap`` seconds apart."""
    rows = [
        (gap * (turn * documents + each), each, tokens) for turn in range(count) for each in range(documents)
    ]
    return prompts(rows, output)


def sessions(
    users: int, turns: int, first: int, more: int, output: int, gap: float
) -> tuple[TraceRequest, ...]:
    """Return sessions of ``users`` that start together; each turn adds ``more`` tokens to the prompt."""
    return prompts(
        [(gap * turn, user, first + turn * more) for turn in range(turns) for user in range(users)], output
    )


PAIRS = (
    Pair("github.com/vllm-project/vllm/issues/44294", "Qwen/Qwen3-8B", "l40s-48g", False,
         prompts([(0.1 * each, each, 10_496) for each in range(50)], 128, shared=10_240), 64 << 30, PCIE_4,
         "10 requests a second, 256 own tokens each, 64 GiB", {"max_model_len": 16384}),
    Pair("github.com/LMCache/LMCache/issues/1741", "meta-llama/Llama-3.1-70B-Instruct", "gh200-96g", False,
         rounds(50, 10_000, 2, 100, 2.0), 60 * GB, C2C, "a request every 2 s",
         {"max_model_len": 16384, "tensor_parallel_size": 2}, None, GH200),
    Pair("github.com/sgl-project/sglang/issues/12809", "Qwen/Qwen2.5-14B", "a100-80g", False,
         rounds(64, 4_096, 2, 100, 1.0), 16 * GB, PCIE_4,
         "the model by its name, the GPU, prompts of 4,096 tokens (50 GB together)", {"max_model_len": 8192}),
    Pair("github.com/sgl-project/sglang/issues/7059", "meta-llama/Meta-Llama-3.1-8B", "h100-80g", False,
         rounds(64, 32_000, 1, 2_048, 0.0), 256 << 30, PCIE_5,
         "the model, one GPU, 2,048 of 32,000 output tokens; the prompts share nothing",
         {"max_model_len": 65536}),
    Pair("github.com/LMCache/LMCache/issues/1241 (pool of 87,584 tokens)", "Qwen/Qwen3-30B-A3B",
         "rtx4090-24g", True,
         sessions(10, 4, 20_000, 3_000, 200, 40.0), 64 << 30, PCIE_4,
         "sessions of 20,000 to 29,000 tokens, 64 GiB",
         {"max_model_len": 32000, "quantization": "fp8"}, 87_584, RTX_4090),
    Pair("github.com/LMCache/LMCache/issues/1241 (pool of 18,144 tokens)", "Qwen/Qwen2.5-32B",
         "rtx4090-24g", False,
         sessions(10, 4, 8_000, 3_000, 200, 40.0), 64 << 30, PCIE_4,
         "sessions of 8,000 to 17,000 tokens, 64 GiB",
         {"max_model_len": 18144, "quantization": "fp8"}, 18_144, RTX_4090),
    Pair("vllm.ai blog 2026-05-18 PegaFlow (cold and warm)", "meta-llama/Meta-Llama-3.1-8B", "h100-80g", True,
         rounds(8, 10_000, 2, 1, 0.25), 64 << 30, PCIE_5,
         "H100 for H800; the pool keeps less than a round, since warm prompts come from the tier",
         {"max_model_len": 16384}, 40_000),
    Pair("github.com/ROCm/rocm-blogs/pull/337", "MiniMaxAI/MiniMax-M2.5", "mi300x-192g", True,
         sessions(32, 2, 100_000, 1_000, 100, 600.0), 1 << 40, PCIE_5,
         "1 TiB, a second turn after 600 s, a pool of 275,000 tokens (its crossover)",
         {"max_model_len": 131072, "tensor_parallel_size": 2}, 275_000, MI300X),
)  # fmt: skip


def judge(pair: Pair, plan_of: Callable[..., Plan]) -> TierVerdict:
    """Return the verdict on a pair's workload; bytes and operations are those of one rank."""
    plan, gpu = plan_of(pair.model, gpu=pair.gpu, **pair.flags), find_gpu(pair.gpu)
    ranks, layout = pair.flags.get("tensor_parallel_size", 1), plan.kv_cache.layout
    token_bytes = sum(layout.token_bytes(group) for group in layout.groups)
    pool = plan.kv_cache.num_blocks if pair.pool_tokens is None else pair.pool_tokens // layout.block_size + 1
    bandwidth, flops = pair.speed or (gpu.bandwidth, gpu.flops)
    assert bandwidth is not None
    assert flops is not None
    step_time = StepTime(
        plan.rank.weights_bytes, plan.model.active_parameters // ranks, token_bytes, bandwidth, flops
    )
    setup = Setup(layout, pool, 64, pair.flags["max_model_len"], 8192, 32_000, Policy(), step_time)
    trace = Trace(pair.source, "made", pair.requests)
    tiers = TierSetup(pair.host_bytes, token_bytes, host_bandwidth=pair.link)
    uses, without = chunk_uses(trace), Simulator(trace, setup).run()
    tiered = Simulator(trace, replace(setup, tiers=tiers)).run()
    chunks = pair.host_bytes // (BLOCK * token_bytes) + pool * layout.block_size // BLOCK
    return TierVerdict(
        without, tiered, tiers, step_time, tier_curve(uses), BLOCK * token_bytes, optimum(uses, chunks)
    )
