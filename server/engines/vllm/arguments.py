"""What vLLM is started with so that it is the plan's: keywords of its AsyncEngineArgs, and its environment.
Written against vLLM 0.32."""

from __future__ import annotations

import os
from typing import Any

from tonnage.cache.admission import Policy
from tonnage.planner.errors import DeploymentError
from tonnage.planner.plans import Plan
from tonnage.server.engines.sharing import Sharing

# Key of vLLM's additional config under which `BackendScheduler` finds what it is to do beside admission.
BACKEND = "tonnage_backend"

# What the user has set wins.
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for the plan and for --json
    "VLLM_NO_USAGE_STATS": "1",  # vLLM would report each start to its authors
    # vLLM on a CPU leaves one core to its scheduler (utils/ompmultiprocessing.py, 0.32), which on two cores
    # halves the compute. Here every core computes.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    # A day: --engine-ready-timeout is the limit, and vLLM's 600 s would undercut a longer one.
    "VLLM_ENGINE_READY_TIMEOUT_S": "86400",
}


def engine_arguments(plan: Plan, *, enforce_eager: bool, quantization: str | None = None) -> dict[str, Any]:
    """The keywords of AsyncEngineArgs that make vLLM allocate what the plan says.

    Raises DeploymentError for what would silently change the plan.
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
        # 0 would mean: as much as is free. An encoder's pool has no use for the byte.
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
        # Text lives in the API process, but without it vLLM has no thread for grammars.
        "skip_tokenizer_init": False,
        "generation_config": "vllm",  # no defaults from the model's file: the request says all
        "disable_log_stats": True,  # no log lines; our own stat logger still gets the numbers
        "enable_log_requests": False,
        "worker_extension_cls": "tonnage.server.engines.vllm.worker.WorkerExtension",
    }


def scheduling_arguments(plan: Plan, policy: Policy, sharing: Sharing, *, grammars: bool) -> dict[str, Any]:
    """The keywords that put our scheduler into vLLM's engine core, with ``grammars`` bounded ones too. None for
    an encoder: it keeps no block, vLLM's own will do. ``kv_events_config`` is not vLLM's object yet."""
    if not plan.kv_cache.layout.groups:
        return {}
    admission = {
        "admission_mode": str(policy.mode), "watermark": policy.watermark, "target_itl": policy.target_itl
    }  # fmt: skip
    return {
        "scheduler_cls": "tonnage.server.engines.vllm.scheduler.ours.BackendScheduler",
        "additional_config": {
            "tonnage": {key: value for key, value in admission.items() if value is not None},
            BACKEND: {"grammars": grammars, "prefixes": [list(prefix) for prefix in sharing.prefixes]},
        },
        "kv_events_config": sharing.events,
        "scheduling_policy": "priority",  # by the place in line that each request is given
    }
