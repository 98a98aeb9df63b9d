"""The AsyncEngineArgs and environment variables that make vLLM allocate what the plan says.

Written against vLLM 0.32.
"""

from __future__ import annotations

import os
from typing import Any

from tonnage.cache.admission import Policy
from tonnage.planner.errors import DeploymentError
from tonnage.planner.plans import Plan
from tonnage.server.engines.sharing import Sharing

# Key of vLLM's additional config that tells `BackendScheduler` what to do besides admission.
BACKEND = "tonnage_backend"

# Defaults for environment variables. A variable that the user has set keeps its value.
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for the plan and for --json
    "VLLM_NO_USAGE_STATS": "1",  # vLLM would report each start to its authors
    # vLLM on a CPU leaves one core to its scheduler (utils/ompmultiprocessing.py, 0.32), which on two cores
    # halves the compute. Here every core computes.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    # One day. The limit is --engine-ready-timeout, and vLLM's 600 s would cut a longer one short.
    "VLLM_ENGINE_READY_TIMEOUT_S": "86400",
}


def engine_arguments(plan: Plan, *, enforce_eager: bool, quantization: str | None = None) -> dict[str, Any]:
    """Return the keywords of AsyncEngineArgs that make vLLM allocate what the plan says.

    Raises:
        DeploymentError: an environment variable would silently change the plan.
    """
    if os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        raise DeploymentError(
            "is set and would override the planned KV pool",  # platforms/cpu.py, vLLM 0.32
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
        # vLLM has no name for a cache in float32: auto is the model's own dtype.
        "kv_cache_dtype": "auto"
        if deployment.kv_cache_dtype == deployment.dtype
        else deployment.kv_cache_dtype,
        # vLLM reads 0 as all free memory. An encoder has no KV cache, and one byte changes nothing there.
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
        # Text stays in the API process, but without a tokenizer vLLM has no thread for grammars.
        "skip_tokenizer_init": False,
        "generation_config": "vllm",  # no defaults from the model's file: the request states every parameter
        "disable_log_stats": True,  # no log lines; our own stat logger still gets the numbers
        "enable_log_requests": False,
        "worker_extension_cls": "tonnage.server.engines.vllm.worker.WorkerExtension",
    }


def scheduling_arguments(plan: Plan, policy: Policy, sharing: Sharing, *, grammars: bool) -> dict[str, Any]:
    """Return the AsyncEngineArgs keywords that put our scheduler into vLLM's engine core.

    An encoder keeps no KV blocks, so it gets no keywords and runs vLLM's own scheduler.

    Args:
        plan: the plan that vLLM is started with.
        policy: the admission policy.
        sharing: prefixes shared between cache salts, and the options of KV events.
        grammars: whether the scheduler also bounds the memory and time of grammars.

    Returns:
        The keywords. The value of `kv_events_config` still has to be converted to vLLM's own class.
    """
    if not plan.kv_cache.layout.groups:
        return {}
    admission = {
        "admission_mode": str(policy.mode), "watermark": policy.watermark, "target_itl": policy.target_itl
    }  # fmt: skip
    return {
        "scheduler_cls": "tonnage.server.engines.vllm.scheduler.backend_scheduler.BackendScheduler",
        "additional_config": {
            "tonnage": {key: value for key, value in admission.items() if value is not None},
            BACKEND: {"grammars": grammars, "prefixes": [list(prefix) for prefix in sharing.prefixes]},
        },
        "kv_events_config": sharing.events,
        "scheduling_policy": "priority",  # the queue position of a request is its priority
    }
