"""Shell commands that serve a plan with vLLM."""

from __future__ import annotations

import json
import shlex

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.serve_line import (
    RANKS,
    SHARED,
    changed,
    common_flags,
    model_and_revision,
    prefix_flags,
    tonnage_serve,
)
from tonnage.planner.engines.vllm.graphs import given_sizes
from tonnage.planner.engines.vllm.multimodal import IMAGE_FLAGS
from tonnage.planner.flags import flags_of
from tonnage.planner.plans import Plan
from tonnage.planner.units import GiB


def serve_lines(plan: Plan, made_while_loading: tuple[str, ...]) -> tuple[str, ...]:
    """Return the commands that serve ``plan`` with this project's server and with vLLM's own server.

    ``made_while_loading`` is the quantization formats that vLLM makes while loading, which need a flag.
    """
    line = ["vllm", "serve", *model_and_revision(plan.model.id), *common_flags(plan)]
    line += [*changed(plan.deployment, RANKS), *own_flags(plan.deployment, made_while_loading)]
    asked = plan.deployment.quantization
    made = ("--quantization", asked) if asked in made_while_loading else ()
    return tonnage_serve(plan, made), shlex.join(line)


def loaded_as(scheme: str) -> str:
    """Return vLLM's name of a format to which vLLM can quantize 16-bit weights while it loads them."""
    return "bitsandbytes" if scheme == "nf4" else scheme


# Flags of ``vllm serve`` that are printed if they differ from their defaults. The first list is printed before
# the sizes of CUDA graphs, the second after them. The third list has the flags with values in GiB.
_BEFORE_GRAPHS = (
    *SHARED, "decode_context_parallel_size", "num_gpu_blocks_override", "mamba_ssm_cache_dtype",
    "mamba_cache_mode", "runner", *IMAGE_FLAGS,
)  # fmt: skip
_AFTER_GRAPHS = (
    "max_cudagraph_capture_size", "kv_offloading_backend", "kv_transfer_config", "load_format",
    "safetensors_load_strategy", "enable_sleep_mode",
)  # fmt: skip
_IN_GIB = ("cpu_offload_bytes", "kv_offloading_bytes", "mm_processor_cache_bytes")


def own_flags(flags: Deployment, made_while_loading: tuple[str, ...]) -> list[str]:
    """Return the options of ``vllm serve`` that differ from their defaults, except devices, sizes and dtypes.

    ``made_while_loading`` is the quantization formats that vLLM makes while loading, which need a flag.
    """
    line = [*prefix_flags(flags), *changed(flags, _BEFORE_GRAPHS)]
    if flags.quantization in made_while_loading:
        line += ["--quantization", loaded_as(flags.quantization)]
    for name in ("cudagraph_capture_sizes", "cuda_graph_sizes"):
        if sizes := given_sizes(getattr(flags, name)):
            line += [flags_of(Deployment)[name].option, *map(str, sizes)]
    line += changed(flags, _AFTER_GRAPHS)
    for name in _IN_GIB:
        flag, size = flags_of(Deployment)[name], getattr(flags, name)
        if size != flag.default:
            line += [flag.option, f"{size / GiB:g}"]
    if flags.enable_lora:
        line += ["--enable-lora", "--max-loras", str(flags.max_loras)]
        line += ["--max-lora-rank", str(flags.max_lora_rank)]
    if flags.speculative_model:
        draft = {"method": "mtp"} if flags.speculative_model == "mtp" else {"model": flags.speculative_model}
        draft_flags = {**draft, "num_speculative_tokens": flags.num_speculative_tokens}
        line += ["--speculative-config", json.dumps(draft_flags)]
    return line
