"""Deployment settings computed from a plan, for `--emit helm-values | compose-env | k8s-resources`.

The settings contain the memory that the plan needs. Rendering the Helm chart and starting the server compare it
with the container's memory, and fail if the container has less. Without this check, the kernel would kill the
server later, under load.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from math import ceil

from tonnage.planner.engines.registry import engine_of
from tonnage.planner.engines.serve_line import model_and_revision
from tonnage.planner.errors import DeploymentError, DoesNotFit, did_you_mean
from tonnage.planner.plans import Plan
from tonnage.planner.units import GiB, MiB

# Fraction by which a container's memory limit exceeds the plan's upper bound. Page tables and kernel memory
# count towards the container's cgroup too. benchmarks/memory_limit.py runs servers with plan + 3 %.
MEMORY_MARGIN = 0.03
# With Compose, /tmp and the home directory are tmpfs mounts, whose files count towards the memory limit. 1 GiB
# is assumed for GPU kernels that are compiled into these folders.
SCRATCH_BYTES = GiB


def emit(plan: Plan, form: str) -> str:
    """Return a plan as the text of deployment settings, for example Helm values.

    Args:
        plan: the plan.
        form: `helm-values`, `compose-env` or `k8s-resources`.

    Raises:
        DoesNotFit: the plan does not fit.
        DeploymentError: `form` is not one of these three.
    """
    if form not in FORMS:
        raise DeploymentError(
            f"{form!r} is not one of {', '.join(FORMS)}", field="--emit", hint=did_you_mean(form, FORMS)
        )
    if not plan.fits:
        raise DoesNotFit("; ".join(plan.reasons), field="--emit")
    return FORMS[form](plan)


def memory_limit_bytes(plan: Plan) -> int | None:
    """Return the memory limit for the server's container in bytes, in whole MiB; None if it is not known.

    The limit is the upper bound of the plan's memory, increased by the fraction MEMORY_MARGIN. With GPUs, it
    covers host memory only.
    """
    if plan.host is None:
        _, high = plan.intervals.get("used_bytes", (0, plan.rank.used_bytes))
        high = max(high, plan.rank.used_bytes)
    elif plan.host.unknown:
        return None
    else:
        high = plan.host.high
    return ceil(high * (1 + MEMORY_MARGIN) / MiB) * MiB


def shared_memory_bytes(plan: Plan) -> int | None:
    """Return the size of /dev/shm in bytes, in whole MiB, or None if a container's default of 64 MiB is enough.

    With several ranks the size is at least 1 GiB, for every engine. Returns None also if the required size is
    not known.
    """
    held = 0 if plan.host is None else ceil(plan.host.shared_bytes / MiB) * MiB
    return max(held, GiB if gpus(plan) > 1 else 0) or None


def gpus(plan: Plan) -> int:
    """Return the number of GPUs of one replica (tensor x pipeline parallel ranks); 0 on a CPU."""
    return len(plan.ranks) if plan.deployment.device != "cpu" else 0


def _settings(plan: Plan) -> dict[str, object]:
    """Return the settings, name -> value, with which `tonnage serve` computes the same plan.

    A setting with the value None is omitted.
    """
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
    """Return the quantization that the server applies to weights while loading; None to keep stored weights."""
    return (
        plan.deployment.quantization if plan.deployment.quantization in ("int8", "nf4", "nf4-double") else None
    )


def _comment(plan: Plan) -> str:
    cache = plan.kv_cache
    text = (
        f"# {plan.model.id}, plan {plan.plan_id}: {cache.num_blocks:,} KV blocks of {cache.layout.block_size} "
        f"tokens, {plan.running:.2f} sequences of {plan.deployment.max_model_len} tokens\n"
    )
    return text + "".join(f"# {line}\n" for line in plan.host_lines())


def _compose_env(plan: Plan) -> str:
    options = engine_of(plan.deployment.engine).serve_options(plan.deployment)
    repo, *revision = model_and_revision(plan.model.id) if options else (plan.model.id,)
    lines = {
        "MODEL": plan.model.id,
        "REPO": repo if revision else None,
        "BACKEND": plan.deployment.engine,
        "TARGET": "cuda" if gpus(plan) else "cpu",
        "MEMORY_LIMIT": _compose_limit(plan),
        "SHM_SIZE": shared_memory_bytes(plan),
        "POOL": plan.rank.kv_pool_bytes,
        "MEMORY": _settings(plan)["device_memory"],
        "UTILIZATION": _settings(plan)["gpu_memory_utilization"],
        "CONTEXT": plan.deployment.max_model_len,
        "SEQUENCES": plan.deployment.max_num_seqs,
        "BATCHED_TOKENS": plan.deployment.max_num_batched_tokens,
        "GPUS": _settings(plan)["tensor_parallel_size"],
        "DEVICES": gpus(plan) if plan.deployment.pipeline_parallel_size > 1 else None,
        "OPTIONS": shlex.join([*revision, *options]) or None,
    }
    hint = "# beside deploy/compose.yaml: -f deploy/compose.gpu.yaml\n" if gpus(plan) else ""
    settings = "".join(f"{name}={value}\n" for name, value in lines.items() if value is not None)
    return _comment(plan) + hint + settings


def _compose_limit(plan: Plan) -> int | None:
    limit = memory_limit_bytes(plan)
    return limit if limit is None or not gpus(plan) else limit + SCRATCH_BYTES


def _k8s_resources(plan: Plan) -> str:
    text, shared = _comment(plan), shared_memory_bytes(plan)
    if shared:
        volume = f"{{medium: Memory, sizeLimit: {shared // MiB}Mi}}"
        text += f"# /dev/shm: an emptyDir {volume}; it counts for limits.memory\n"
    return text + "resources:\n" + _resources(plan, "  ")


def _resources(plan: Plan, indent: str) -> str:
    # The pod's memory request equals its limit, so that the Kubernetes scheduler reserves all planned memory.
    limit = memory_limit_bytes(plan)
    memory = "" if limit is None else f"{indent}  memory: {limit // MiB}Mi\n"
    devices = f"{indent}  nvidia.com/gpu: {gpus(plan)}\n" if gpus(plan) else ""
    requests = f"{indent}requests:\n{memory}" if memory else ""
    return f"{requests}{indent}limits:\n{memory}{devices}"


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
    ]
    if plan.host is not None and not plan.host.unknown:
        lines.append(f"  hostBytes: {plan.host.value}")
    lines.append("settings:")
    for name, value in _settings(plan).items():
        if value is not None:
            lines.append(f"  {name}: {_quoted(value) if isinstance(value, str) else value}")
    limit, shared = memory_limit_bytes(plan), shared_memory_bytes(plan)
    lines.append("resources:")
    # The value 0 means no memory limit. It is written if the plan's host memory is not known.
    lines.append(f"  memoryBytes: {limit or 0}")
    if gpus(plan):
        lines.append(f"  gpus: {gpus(plan)}")
    if shared:
        # NCCL, the workers' queues and a KV tier use /dev/shm, which in a container has only 64 MiB by default.
        lines.append(f"sharedMemoryBytes: {shared}")
    if gpus(plan) and (options := engine_of(plan.deployment.engine).own_flags(plan.deployment)):
        # The following flags are those of `vllm serve` that `tonnage serve` does not have.
        lines += ["vllmServe:", f"  args: [{', '.join(map(_quoted, options))}]"]
    return "\n".join(lines) + "\n"


def _quoted(value: object) -> str:
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


FORMS: dict[str, Callable[[Plan], str]] = {
    "helm-values": _helm_values,
    "compose-env": _compose_env,
    "k8s-resources": _k8s_resources,
}
