"""The ``sglang.launch_server`` command of a plan, with the flags that reproduce the plan's memory use.

Names and choices of the flags are from arg_groups/fields and server_args.py of 0.5.23. For an older release,
the command uses that release's spelling of a flag.
"""

from __future__ import annotations

import shlex

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.serve_line import changed, model_and_revision
from tonnage.planner.engines.version import parse_version
from tonnage.planner.plans import Plan
from tonnage.planner.units import GiB, ceil_div

# Oldest SGLang release, of those whose source was read, that has separate CUDA graph flags for prefill and for
# decode. It deprecates --disable-cuda-graph.
_PER_PHASE = (0, 5, 23)
_KV_NAMES = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2", "bfloat16": "bfloat16"}
_HICACHE = (
    "enable_hierarchical_cache", "hicache_ratio", "hicache_size", "hicache_mem_layout",
    "hicache_storage_backend",
)  # fmt: skip
_UTILIZATION = 0.9  # default of --gpu-memory-utilization (base.Engine.default_utilization)


def serve_line(plan: Plan) -> str:
    """Return the ``python -m sglang.launch_server`` command of ``plan``."""
    flags = plan.deployment
    line = ["python", "-m", "sglang.launch_server", "--model-path", *model_and_revision(plan.model.id)]
    if "max_model_len" not in plan.defaults:
        line += ["--context-length", str(flags.max_model_len)]
    if "dtype" not in plan.defaults:
        line += ["--dtype", flags.dtype]
    line += [*_ranks(flags), *_memory(plan), *_cache(plan)]
    if flags.enforce_eager and parse_version(flags.engine_version or "") >= _PER_PHASE:
        line += ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
    elif flags.enforce_eager:
        line.append("--disable-cuda-graph")
    if flags.enable_lora:
        line += ["--enable-lora", "--max-loras-per-batch", str(flags.max_loras),
                 "--max-lora-rank", str(flags.max_lora_rank), "--lora-target-modules", "all"]  # fmt: skip
    if flags.speculative_model is not None:
        line += _draft(flags, any("EAGLE3" in note for note in plan.notes))
    return shlex.join(line)


def _ranks(flags: Deployment) -> list[str]:
    line = ["--tp-size", str(flags.tensor_parallel_size)] if flags.tensor_parallel_size > 1 else []
    line += [] if flags.device == "cuda" else ["--device", flags.device]
    if flags.pipeline_parallel_size > 1:
        line += ["--pp-size", str(flags.pipeline_parallel_size)]
    if flags.data_parallel_size > 1:
        line += ["--dp-size", str(flags.data_parallel_size)]
    # SGLang divides the experts among the tensor-parallel ranks of one replica, so each replica holds all of
    # them.
    if flags.enable_expert_parallel:
        line += ["--ep-size", str(flags.tensor_parallel_size)]
    return line


def _memory(plan: Plan) -> list[str]:
    flags, line = plan.deployment, []
    # Without --mem-fraction-static, SGLang derives it from the GPU's memory and the batch, as the plan does.
    if not {"mem_fraction_static", "gpu_memory_utilization"} <= plan.defaults:
        line += ["--mem-fraction-static", str(flags.mem_fraction_static)]
    if "max_num_seqs" not in plan.defaults:
        line += ["--max-running-requests", str(flags.max_num_seqs)]
    if "max_num_batched_tokens" not in plan.defaults:
        line += ["--chunked-prefill-size", str(flags.max_num_batched_tokens)]
    line += changed(flags, ("swa_full_tokens_ratio", "mamba_full_memory_ratio"))
    if flags.cpu_offload_bytes:
        line += ["--cpu-offload-gb", str(ceil_div(flags.cpu_offload_bytes, GiB))]
    return line


def _cache(plan: Plan) -> list[str]:
    flags = plan.deployment
    line = []
    if plan.kv_cache.layout.block_size > 1:
        line += ["--page-size", str(plan.kv_cache.layout.block_size)]
    if flags.kv_cache_dtype != flags.dtype and flags.kv_cache_dtype in _KV_NAMES:
        line += ["--kv-cache-dtype", _KV_NAMES[flags.kv_cache_dtype]]
    if not flags.enable_prefix_caching:
        line.append("--disable-radix-cache")
    if flags.kv_cache_memory_bytes is not None:
        line += ["--max-total-tokens", str(plan.kv_cache.tokens)]
    return line + changed(flags, _HICACHE)


def notes(flags: Deployment, states: bool) -> tuple[str, ...]:
    """Return notes on the settings of ``flags`` that SGLang's serve command cannot express.

    ``states`` is whether the model has slots of recurrent states.
    """
    found = []
    if flags.kv_cache_memory_bytes is not None:
        why = (
            "SGLang has no --kv-cache-memory-bytes: its --max-total-tokens only lowers what "
            "--mem-fraction-static leaves"
        )
        found.append(f"{why}, and no slots of states" if states else why)
    if flags.gpu_memory_utilization != _UTILIZATION:
        found.append("SGLang has no --gpu-memory-utilization: its share is --mem-fraction-static")
    if flags.cpu_offload_bytes % GiB:
        found.append(
            "SGLang's --cpu-offload-gb is of whole GiB: more is kept in the host's memory than planned"
        )
    if flags.enable_expert_parallel and flags.data_parallel_size > 1:
        found.append("SGLang's --ep-size divides experts over the ranks of one replica, not over --dp-size")
    return tuple(found)


def _draft(flags: Deployment, eagle3: bool) -> list[str]:
    steps = flags.num_speculative_tokens
    found = ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1",
             "--speculative-num-draft-tokens", str(steps + 1)]  # fmt: skip
    if flags.speculative_model == "mtp":
        return ["--speculative-algorithm", "NEXTN", *found]
    path = ["--speculative-draft-model-path", str(flags.speculative_model)]
    return ["--speculative-algorithm", "EAGLE3" if eagle3 else "EAGLE", *path, *found]
