"""The command lines that serve a plan with vLLM."""

from __future__ import annotations

import shlex

from tonnage.planner.engines.serve_line import common_flags, tonnage_serve
from tonnage.planner.plans import Plan


def serve_lines(plan: Plan, made_while_loading: tuple[str, ...]) -> tuple[str, ...]:
    """Under this project's server, and vLLM's own. ``made_while_loading``: formats that need a flag."""
    line = ["vllm", "serve", plan.model.id, *common_flags(plan), *_own_flags(plan, made_while_loading)]
    return tonnage_serve(plan), shlex.join(line)


def loaded_as(scheme: str) -> str:
    """vLLM's name of a format that it makes while loading."""
    return "bitsandbytes" if scheme == "nf4" else scheme


def _own_flags(plan: Plan, made_while_loading: tuple[str, ...]) -> list[str]:
    flags = plan.deployment
    line: list[str] = []
    for name in ("tensor", "pipeline", "data"):
        value = getattr(flags, f"{name}_parallel_size")
        if value > 1:
            line += [f"--{name}-parallel-size", str(value)]
    if flags.decode_context_parallel_size > 1:
        line += ["--decode-context-parallel-size", str(flags.decode_context_parallel_size)]
    if flags.enable_expert_parallel:
        line.append("--enable-expert-parallel")
    if flags.enforce_eager:
        line.append("--enforce-eager")
    if flags.num_gpu_blocks_override is not None:
        line += ["--num-gpu-blocks-override", str(flags.num_gpu_blocks_override)]
    if flags.quantization in made_while_loading:
        line += ["--quantization", loaded_as(flags.quantization)]
    if flags.cpu_offload_bytes:
        line += ["--cpu-offload-gb", f"{flags.cpu_offload_bytes / (1 << 30):g}"]
    if flags.enable_lora:
        line += ["--enable-lora", "--max-loras", str(flags.max_loras)]
        line += ["--max-lora-rank", str(flags.max_lora_rank)]
    if flags.speculative_model:
        import json

        draft = {"method": "mtp"} if flags.speculative_model == "mtp" else {"model": flags.speculative_model}
        draft_flags = {**draft, "num_speculative_tokens": flags.num_speculative_tokens}
        line += ["--speculative-config", json.dumps(draft_flags)]
    return line
