"""The AsyncEngineArgs and environment variables that make vLLM allocate the planned memory.

Written against vLLM 0.32.
"""

from __future__ import annotations

import os
from typing import Any

from tonnage.cache.admission import Policy
from tonnage.planner.errors import DeploymentError
from tonnage.planner.plans import Plan
from tonnage.server.engines.sharing import Sharing

# Key in vLLM's additional config. Its value selects the features that `BackendScheduler` adds to admission.
BACKEND = "tonnage_backend"

# Default environment variables for vLLM's processes. A variable that the user has set keeps its value.
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    # vLLM logs to stderr, because stdout carries the plan and the output of --json.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    # By default vLLM reports usage statistics to its authors.
    "VLLM_NO_USAGE_STATS": "1",
    # By default, vLLM on a CPU reserves one core for its scheduler (utils/ompmultiprocessing.py, 0.32). On a
    # machine with two cores that halves the compute, so no core is reserved.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    # vLLM waits at most one day (86,400 s) for its engine to start. Tonnage enforces --engine-ready-timeout
    # itself; vLLM's default of 600 s would end a longer timeout early.
    "VLLM_ENGINE_READY_TIMEOUT_S": "86400",
}


def engine_arguments(plan: Plan, *, enforce_eager: bool, quantization: str | None = None) -> dict[str, Any]:
    """Return the AsyncEngineArgs keywords that make vLLM allocate exactly the planned memory.

    Args:
        plan: the plan of the model and its KV pool.
        enforce_eager: run without torch.compile and CUDA graphs.
        quantization: vLLM's name of the method that quantizes the weights while loading; None for none.

    Raises:
        DeploymentError: an environment variable would silently change the plan.
    """
    if os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        raise DeploymentError(
            # vLLM on a CPU takes the size of its KV pool from this variable (platforms/cpu.py, 0.32)
            "the variable is set and would override the planned KV pool",
            field="VLLM_CPU_KVCACHE_SPACE",
            hint="unset it and use --kv-cache-memory-bytes",
        )
    deployment = plan.deployment
    return {
        "model": plan.model.path,
        "dtype": deployment.dtype,
        "quantization": quantization,
        "max_model_len": deployment.max_model_len,
        "max_num_seqs": deployment.max_num_seqs,
        "max_num_batched_tokens": deployment.max_num_batched_tokens,
        "block_size": deployment.block_size,
        # vLLM has no name for a float32 cache. "auto" is the model's own dtype, which is float32 here.
        "kv_cache_dtype": "auto"
        if deployment.kv_cache_dtype == deployment.dtype
        else deployment.kv_cache_dtype,
        # vLLM reads 0 as all free memory, so an encoder, which has no KV cache, gets one byte.
        "kv_cache_memory_bytes": max(1, plan.rank.kv_pool_bytes),
        "gpu_memory_utilization": deployment.gpu_memory_utilization,
        "enable_prefix_caching": deployment.enable_prefix_caching,
        "enforce_eager": enforce_eager,
        "tensor_parallel_size": deployment.tensor_parallel_size,
        "pipeline_parallel_size": deployment.pipeline_parallel_size,
        "data_parallel_size": deployment.data_parallel_size,
        "enable_expert_parallel": deployment.enable_expert_parallel,
        "enable_lora": deployment.enable_lora,
        "max_loras": deployment.max_loras,
        "max_lora_rank": deployment.max_lora_rank,
        "trust_remote_code": False,
        # The API process handles text, but vLLM compiles grammars only if it has a tokenizer of its own.
        "skip_tokenizer_init": False,
        # The model's generation_config.json is ignored, because each request states every sampling parameter.
        "generation_config": "vllm",
        "disable_log_stats": True,  # vLLM logs no statistics; our stat logger receives them nevertheless
        "enable_log_requests": False,
        "worker_extension_cls": "tonnage.server.engines.vllm.worker.WorkerExtension",
    }


def scheduling_arguments(plan: Plan, policy: Policy, sharing: Sharing, *, grammars: bool) -> dict[str, Any]:
    """Return the AsyncEngineArgs keywords that make vLLM's engine core use Tonnage's scheduler.

    An encoder keeps no KV blocks, so it gets no keywords and runs vLLM's own scheduler.

    Args:
        plan: the plan that vLLM is started with.
        policy: the admission policy.
        sharing: the KV event publisher, and prefixes whose KV blocks requests with different cache salts share.
        grammars: whether the scheduler also bounds the memory and time of grammars.

    Returns:
        The keywords. The value of `kv_events_config` still has to be converted to vLLM's own class.
    """
    if not plan.kv_cache.layout.groups:
        return {}
    admission = {
        "admission_mode": str(policy.mode), "watermark": policy.watermark, "target_itl": policy.target_itl,
        "keys": policy.keys,
    }  # fmt: skip
    return {
        "scheduler_cls": "tonnage.server.engines.vllm.scheduler.backend_scheduler.BackendScheduler",
        "additional_config": {
            "tonnage": {key: value for key, value in admission.items() if value is not None},
            BACKEND: {"grammars": grammars, "prefixes": [list(prefix) for prefix in sharing.prefixes]},
        },
        "kv_events_config": sharing.events,
        # vLLM's priority of a request is its position in the queue, set by `QueuePositions`.
        "scheduling_policy": "priority",
    }
