"""Command lines that serve a plan: what ``tonnage serve`` and ``vllm serve`` have in common."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from tonnage.planner.plans import Plan


def tonnage_serve(plan: Plan, more: Iterable[str] = ()) -> str:
    """This project's server with the plan's engine."""
    flags = plan.deployment
    line = ["tonnage", "serve", plan.model.id, "--backend", flags.engine, *common_flags(plan)]
    if flags.device != "cpu":
        line += ["--device", flags.device]
    if flags.tensor_parallel_size > 1:
        line += ["--tensor-parallel-size", str(flags.tensor_parallel_size)]
    return shlex.join([*line, *more])


def common_flags(plan: Plan) -> list[str]:
    """Flags that vLLM and this project's server spell alike."""
    flags = plan.deployment
    line = ["--max-model-len", str(flags.max_model_len), "--max-num-seqs", str(flags.max_num_seqs),
            "--max-num-batched-tokens", str(flags.max_num_batched_tokens), "--dtype", flags.dtype]  # fmt: skip
    if flags.kv_cache_memory_bytes is not None:
        line += ["--kv-cache-memory-bytes", str(flags.kv_cache_memory_bytes)]
    else:
        line += ["--gpu-memory-utilization", f"{flags.gpu_memory_utilization:g}"]
    if flags.kv_cache_dtype != flags.dtype:
        line += ["--kv-cache-dtype", flags.kv_cache_dtype]
    if not flags.enable_prefix_caching:
        line.append("--no-enable-prefix-caching")
    return line
