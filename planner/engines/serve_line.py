"""Shell commands that serve a plan: the options common to ``tonnage serve`` and ``vllm serve``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable

from tonnage.planner.deployment import Deployment
from tonnage.planner.flags import flags_of
from tonnage.planner.headers.names import hub_model
from tonnage.planner.plans import Plan

# Flags of ``tonnage serve`` and ``vllm serve`` that are printed only if they differ from their defaults.
RANKS = ("tensor_parallel_size", "pipeline_parallel_size")
SHARED = ("data_parallel_size", "enable_expert_parallel", "enforce_eager")


def tonnage_serve(plan: Plan, more: Iterable[str] = ()) -> str:
    """Return the ``tonnage serve`` command of ``plan``, followed by the additional options ``more``."""
    flags = plan.deployment
    line = ["tonnage", "serve", plan.model.id, "--backend", flags.engine, *common_flags(plan)]
    if flags.device != "cpu":
        line += ["--device", flags.device, "--device-memory", str(flags.device_memory)]
        # The server's own estimate of framework and activation memory depends on the GPU model.
        if flags.gpu is not None:
            line += ["--gpu", flags.gpu]
    line += [*prefix_flags(flags), *changed(flags, (*RANKS, *SHARED))]
    line += [*changed(flags, ("enable_lora", "max_loras", "max_lora_rank")), *more]
    return shlex.join(line)


def model_and_revision(name: str) -> tuple[str, ...]:
    """Return the arguments that name a model ``org/name@revision`` in a command that has --revision."""
    if "@" not in name or os.path.exists(name):
        return (name,)

    found = hub_model(name)
    return (name,) if found is None else (found.repo, "--revision", found.revision)


def changed(flags: Deployment, names: Iterable[str]) -> list[str]:
    """Return the serve command's options for those flags in ``names`` that differ from their defaults."""
    line = []
    for name in names:
        flag, value = flags_of(Deployment)[name], getattr(flags, name)
        if value != flag.default:
            line += [flag.option] if value is True else [flag.option, str(value)]
    return line


def common_flags(plan: Plan) -> list[str]:
    """Return the options of ``plan`` that ``vllm serve`` and ``tonnage serve`` spell alike.

    A value that the user did not set is left out, because the engine chooses the same default.
    """
    flags = plan.deployment
    sized = flags.kv_cache_memory_bytes is not None
    options = {
        "max_model_len": str(flags.max_model_len),
        "max_num_seqs": str(flags.max_num_seqs),
        "max_num_batched_tokens": str(flags.max_num_batched_tokens),
        "dtype": flags.dtype,
        "kv_cache_memory_bytes": str(flags.kv_cache_memory_bytes) if sized else "",
        "gpu_memory_utilization": "" if sized else f"{flags.gpu_memory_utilization:g}",
        "kv_cache_dtype": flags.kv_cache_dtype if flags.kv_cache_dtype != flags.dtype else "",
    }
    line = []
    for name, value in options.items():
        if value and name not in plan.defaults:
            line += [flags_of(Deployment)[name].option, value]
    return line


def prefix_flags(flags: Deployment) -> list[str]:
    """Return the option --no-enable-prefix-caching if prefix caching is off, else no option."""
    return [] if flags.enable_prefix_caching else ["--no-enable-prefix-caching"]
