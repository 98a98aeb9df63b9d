"""A Plan as the settings of a deployment: ``tonnage plan --emit helm-values | compose-env | k8s-resources``.

What is written carries the plan's bytes, so that a container with less memory than planned is refused when the
chart is rendered or the server starts, and not by the kernel under load.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from tonnage.planner.errors import DeploymentError, DoesNotFit
from tonnage.planner.plans import Plan
from tonnage.planner.units import GiB, MiB

# A container may hold this much beyond the upper ends of the plan's intervals: page tables and the kernel's
# own memory count for its cgroup too. benchmarks/memory_limit.py runs servers under plan + 3 %.
MEMORY_MARGIN = 0.03


def emit(plan: Plan, form: str) -> str:
    """The text of ``form``, one of FORMS. Raises DoesNotFit for a plan that does not fit, DeploymentError for
    another form."""
    if form not in FORMS:
        raise DeploymentError(f"{form!r} is not one of {', '.join(FORMS)}", field="--emit")
    if not plan.fits:
        raise DoesNotFit("; ".join(plan.reasons), field="--emit")
    return FORMS[form](plan)


def memory_limit_bytes(plan: Plan) -> int:
    """Memory for a container on a CPU: the plan at its upper end and MEMORY_MARGIN, in whole MiB."""
    _, high = plan.intervals.get("used_bytes", (0, plan.rank.used_bytes))
    return ceil(max(high, plan.rank.used_bytes) * (1 + MEMORY_MARGIN) / MiB) * MiB


def gpus(plan: Plan) -> int:
    """Devices of one replica: tensor x pipeline parallel; 0 on a CPU."""
    return len(plan.ranks) if plan.deployment.device != "cpu" else 0


def _settings(plan: Plan) -> dict[str, object]:
    """Settings of ``tonnage serve`` that make it compute this plan again; None: leave out."""
    chosen = plan.deployment
    return {
        "device": chosen.device,
        "device_memory": plan.rank.total_bytes if gpus(plan) else memory_limit_bytes(plan),
        "gpu_memory_utilization": chosen.gpu_memory_utilization if gpus(plan) else 1.0,
        "dtype": chosen.dtype,
        "quantization": _own_quantization(plan),
        "kv_cache_dtype": chosen.kv_cache_dtype,
        "kv_cache_memory_bytes": plan.rank.kv_pool_bytes,
        "max_model_len": chosen.max_model_len,
        "max_num_seqs": chosen.max_num_seqs,
        "max_num_batched_tokens": chosen.max_num_batched_tokens,
        "block_size": chosen.block_size,
        "tensor_parallel_size": chosen.tensor_parallel_size if chosen.tensor_parallel_size > 1 else None,
        "pipeline_parallel_size": chosen.pipeline_parallel_size if chosen.pipeline_parallel_size > 1 else None,
    }


def _own_quantization(plan: Plan) -> str | None:
    """What has to be asked for; a checkpoint that is quantized says so itself."""
    return (
        plan.deployment.quantization if plan.deployment.quantization in ("int8", "nf4", "nf4-double") else None
    )


def _comment(plan: Plan) -> str:
    cache = plan.kv_cache
    return (
        f"# {plan.model.id}, plan {plan.plan_id}: {cache.num_blocks:,} KV blocks of {cache.layout.block_size} "
        f"tokens, {cache.max_concurrency:.2f} sequences of {plan.deployment.max_model_len} tokens\n"
    )


def _compose_env(plan: Plan) -> str:
    lines = {
        "MODEL": plan.model.id,
        "BACKEND": plan.deployment.engine,
        "TARGET": "cuda" if gpus(plan) else "cpu",
        "MEMORY_LIMIT": memory_limit_bytes(plan) if not gpus(plan) else None,
        "POOL": plan.rank.kv_pool_bytes,
        "MEMORY": _settings(plan)["device_memory"],
        "UTILIZATION": _settings(plan)["gpu_memory_utilization"],
        "CONTEXT": plan.deployment.max_model_len,
        "SEQUENCES": plan.deployment.max_num_seqs,
        "BATCHED_TOKENS": plan.deployment.max_num_batched_tokens,
        "GPUS": _settings(plan)["tensor_parallel_size"],
    }
    hint = "# beside deploy/compose.yaml: -f deploy/compose.gpu.yaml\n" if gpus(plan) else ""
    settings = "".join(f"{name}={value}\n" for name, value in lines.items() if value is not None)
    return _comment(plan) + hint + settings


def _k8s_resources(plan: Plan) -> str:
    return _comment(plan) + "resources:\n" + _resources(plan, "  ")


def _resources(plan: Plan, indent: str) -> str:
    if gpus(plan):
        return f"{indent}limits:\n{indent}  nvidia.com/gpu: {gpus(plan)}\n"
    size = memory_limit_bytes(plan) // MiB
    # request = limit: what is planned is needed, so the scheduler must set it aside
    return f"{indent}requests:\n{indent}  memory: {size}Mi\n{indent}limits:\n{indent}  memory: {size}Mi\n"


def _helm_values(plan: Plan) -> str:
    lines = [
        _comment(plan).rstrip(),
        f"model: {_quoted(plan.model.id)}",
        f"backend: {plan.deployment.engine}",
        "plan:",
        f"  id: {_quoted(plan.plan_id)}",
        f"  usedBytes: {plan.rank.used_bytes}",
        f"  kvPoolBytes: {plan.rank.kv_pool_bytes}",
        f"  maxConcurrency: {plan.kv_cache.max_concurrency:.2f}",
        f"  gpus: {gpus(plan)}",
        "settings:",
    ]
    for name, value in _settings(plan).items():
        if value is not None:
            lines.append(f"  {name}: {_quoted(value) if isinstance(value, str) else value}")
    if gpus(plan):
        lines += ["resources:", f"  gpus: {gpus(plan)}"]
        if gpus(plan) > 1:
            # NCCL and the workers' queues live in /dev/shm, of which a container gets 64 MiB unasked
            lines += [f"sharedMemoryBytes: {GiB}"]
    else:
        lines += ["resources:", f"  memoryBytes: {memory_limit_bytes(plan)}"]
    return "\n".join(lines) + "\n"


def _quoted(value: object) -> str:
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


FORMS: dict[str, Callable[[Plan], str]] = {
    "helm-values": _helm_values,
    "compose-env": _compose_env,
    "k8s-resources": _k8s_resources,
}
