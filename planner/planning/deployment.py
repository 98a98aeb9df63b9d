"""Completion of a `Deployment`: flags left at None get the engine's defaults; invalid flags raise an error."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from tonnage.planner.deployment import Deployment, default_engine
from tonnage.planner.devices.catalogue import find_gpu, local_gpu
from tonnage.planner.devices.host import host_memory
from tonnage.planner.engines.base import Engine
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.engines.version import Version, installed_version, parse_version
from tonnage.planner.errors import DeploymentError, EngineRefusal
from tonnage.planner.flags import check_values, flags_of
from tonnage.planner.headers.gguf_types import file_type
from tonnage.planner.headers.names import names_gguf
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.plans import Resolved
from tonnage.planner.quantization.kv_cache import StoredCache


def canonical_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given flags with values in their canonical spelling, for example float16 for fp16."""
    flags = flags_of(Deployment)
    return {
        name: flags[name].canonical(value) if isinstance(value, str) and name in flags else value
        for name, value in given.items()
    }


def deployment_of(given: Mapping[str, Any], model: str = "") -> Deployment:
    """Return the `Deployment` of the given fields, which also determine the default engine.

    The engine defaults to llama.cpp for a GGUF file on a GPU or on the hub, and for a GGUF type as
    --quantization. Otherwise it defaults to vllm if a GPU or an engine version is given, else to hf. If a draft
    model is given, `num_speculative_tokens` defaults to 1. `model` is the name of the model, if it is known.

    Raises:
        DeploymentError: the fields contradict each other (see `check_given`).
    """
    given = canonical_values(given)
    fields = dict(given)
    if fields.get("engine_version") is None and _is_gguf(model, fields):
        fields.setdefault("engine", "llama.cpp")
    fields.setdefault("engine", default_engine(fields.get("gpu"), fields.get("engine_version")))
    if fields.get("speculative_model") is not None:
        fields.setdefault("num_speculative_tokens", 1)
    deployment = Deployment(**fields)
    check_given({name: value for name, value in given.items() if value is not None}, deployment)
    return deployment


def _is_gguf(model: str, fields: Mapping[str, Any]) -> bool:
    """Return whether the model's name or a flag asks for a GGUF file that the hf engine cannot load.

    Such flags are a GGUF type as quantization, and n_gpu_layers. Such names are GGUF files on the hub, and
    local GGUF files if the device is a GPU.
    """
    if file_type(fields.get("quantization") or "") is not None or fields.get("n_gpu_layers") is not None:
        return True
    if os.path.exists(model):
        on_gpu = fields.get("gpu") not in (None, "cpu") or fields.get("device") == "cuda"
        return on_gpu and model.lower().endswith(".gguf")
    return names_gguf(model)


def check_given(given: Mapping[str, object], deployment: Deployment) -> None:
    """Refuse flags that need another flag, belong to another engine or contradict the GPU.

    Args:
        given: field name -> value of the fields that the user set.
        deployment: the deployment made of these fields and the defaults.

    Raises:
        DeploymentError: a flag is refused; the error names the first such flag.
    """
    flags = flags_of(Deployment)

    def refuse(name: str, why: str, hint: str | None = None) -> NoReturn:
        """Raise DeploymentError with message `why` for the flag of the `Deployment` field `name`."""
        raise DeploymentError(why, field=flags[name].option, hint=hint)

    for name in given:
        needs, engine = flags[name].needs, flags[name].engine
        if needs and not given.get(needs):
            refuse(name, f"requires {flags[needs].option}")
        engines = engine.split(", ")
        if engine and deployment.engine not in engines:
            last = engines[-1]
            refuse(name, f"is a setting of {engine}, not of {deployment.engine}", f"--engine {last}")
    if "device" in given and deployment.gpu is not None:
        gpu = find_gpu(deployment.gpu)
        if deployment.device != gpu.device:
            why = f"{deployment.device} contradicts --gpu {gpu.name}, which is {gpu.device}"
            refuse("device", why, "leave it out")


def complete(
    deployment: Deployment, architecture: Architecture, dtype: str, stored: StoredCache | None = None
) -> Resolved:
    """Return the deployment with every flag checked against model and other flags, and no flag left at None.

    `dtype` is the dtype that --dtype auto selects for this checkpoint. `stored` is the KV cache format
    that the checkpoint requests, or None.

    Raises:
        DeploymentError: a flag is invalid; the error names the flag and its value.
    """
    engine = engine_of(deployment.engine)
    check_values(deployment)
    bounds = _memory_bounds(deployment)
    deployment = _with_gpu(deployment)
    version, name = version_of(engine, deployment)
    memory = _device_memory(deployment)
    if deployment.max_model_len is not None:
        engine.check_length(deployment.max_model_len, architecture)
    max_model_len = deployment.max_model_len or architecture.max_model_len
    seqs, tokens = _batch(engine, deployment, architecture, max_model_len, memory, version)
    deployment, tokens = engine.adjust_step(deployment, architecture, max_model_len, tokens)
    chosen = engine.choose_dtype(deployment, architecture, dtype)
    given = deployment.block_size
    block_size = engine.block_size(given, deployment, architecture)
    share = deployment.gpu_memory_utilization
    share = engine.default_utilization(version) if share is None else float(share)
    caching = deployment.enable_prefix_caching
    if caching is None:
        caching = engine.caches_prefixes(architecture, version)
    flags = replace(
        deployment,
        engine_version=name,
        device_memory=memory,
        gpu_memory_utilization=share,
        dtype=chosen,
        kv_cache_dtype=engine.choose_kv_dtype(deployment, chosen, architecture, version, stored),
        max_model_len=max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        block_size=block_size,
        mem_fraction_static=engine.static_share(deployment, version, memory, tokens, architecture),
        enable_prefix_caching=caching,
    )
    _check_engine(engine, flags)
    engine.check_version(flags, version)
    if deployment.quantization is not None:
        engine.check_quantization(deployment.quantization, version)
    if flags.enable_expert_parallel and not architecture.experts:
        raise DeploymentError(f"{architecture.class_name} has no experts", field="--enable-expert-parallel")
    limit = engine.memory_limit(flags, memory, share)
    return Resolved(
        flags, version, memory, limit, max_model_len, seqs, tokens, block_size, given_block_size=given,
        given_max_num_seqs=deployment.max_num_seqs,
        memory_bounds=bounds and (
            (bounds[0], engine.memory_limit(flags, bounds[0], share)),
            (bounds[1], engine.memory_limit(flags, bounds[1], share)),
        ),
    )  # fmt: skip


def _check_engine(engine: Engine, flags: Deployment) -> None:
    """Raise DeploymentError for a LoRA rank or parallel size that the engine does not support.

    vLLM has a fixed list of LoRA ranks. SGLang (--max-lora-rank) and llama.cpp (the adapter's own rank) accept
    any rank.
    """
    if engine.lora_ranks and flags.max_lora_rank not in engine.lora_ranks:
        raise DeploymentError(
            f"{engine.title} does not support the LoRA rank {flags.max_lora_rank}",
            field="--max-lora-rank",
            hint=f"use one of {', '.join(map(str, engine.lora_ranks))}; an adapter may have a smaller rank",
        )
    if not engine.divides and flags.tensor_parallel_size * flags.pipeline_parallel_size > 1:
        raise DeploymentError(
            f"the {engine.name} engine runs on one device",
            field="--tensor-parallel-size",
            hint="use --engine vllm",
        )
    if flags.tensor_parallel_size % flags.decode_context_parallel_size:
        raise DeploymentError(
            f"{flags.decode_context_parallel_size} does not divide --tensor-parallel-size "
            f"{flags.tensor_parallel_size}",
            field="--decode-context-parallel-size",
            hint="choose a divisor",
        )


def _with_gpu(deployment: Deployment) -> Deployment:
    """Return the deployment with the device type and the device memory of the GPU that --gpu names.

    A given --device-memory has priority over the GPU's memory.
    """
    if deployment.gpu is None:
        return deployment
    gpu = find_gpu(deployment.gpu)
    memory = gpu.memory_bytes if deployment.device_memory is None else deployment.device_memory
    return replace(deployment, gpu=gpu.name, device=gpu.device, device_memory=memory)


def _memory_bounds(deployment: Deployment) -> tuple[int, int] | None:
    """Return the smallest and largest total memory, in bytes, of the GPU that --gpu names.

    Drivers may report different totals for one kind of GPU. Returns None if the total is known.
    """
    if deployment.gpu is None or deployment.device_memory is not None:
        return None
    low, high = find_gpu(deployment.gpu).memory_bounds or (0, 0)
    return (low, high) if low < high else None


def memory_notes(asked: Deployment) -> tuple[str, ...]:
    """Return notes on the total memory that drivers report for the GPU of --gpu; empty with --device-memory."""
    if asked.gpu is None or asked.device_memory is not None:
        return ()
    return find_gpu(asked.gpu).notes


def version_of(engine: Engine, deployment: Deployment) -> tuple[Version, str]:
    """Return the engine version whose memory rules apply to the plan, as numbers and as text.

    The version is --engine-version, else that of the installed package, else the newest that the planner knows.
    """
    given = deployment.engine_version
    if given is not None:
        version = parse_version(given)
        if not any(version):
            raise DeploymentError(
                f"{given!r} is not a release number", field="--engine-version", hint="for example 0.11.0"
            )
        return version, given
    newest = engine.newest
    found = next(filter(None, map(installed_version, engine.distributions)), None)
    if found is not None:
        try:
            return version_of(engine, replace(deployment, engine_version=found))
        except DeploymentError:  # a source build, whose version is no release number
            pass
    return newest, _text(newest) if any(newest) else "none"


def _text(version: Version) -> str:
    """Return the version numbers as text, such as 0.33.0."""
    return ".".join(map(str, version))


def version_notes(asked: Deployment, chosen: Resolved) -> tuple[str, ...]:
    """Return a note if the planner does not know the engine version, or if --engine-version has no effect."""
    engine, name, version = chosen.flags.engine, chosen.flags.engine_version, chosen.version
    newest, oldest = engine_of(engine).newest, engine_of(engine).oldest
    if not any(newest):
        return (f"no rule of {engine} depends on --engine-version",) if asked.engine_version else ()
    if version[:2] > newest[:2]:  # a patch release has the memory rules of its minor release
        return (f"{engine} {name} is newer than what is known here: the rules of {_text(newest)} are used",)
    if version < oldest:
        return (f"{engine} {name} is older than what is known here: the rules of {_text(oldest)} are used",)
    return ()


def _batch(
    engine: Engine, deployment: Deployment, architecture: Architecture, max_model_len: int, memory: int,
    version: Version,
) -> tuple[int, int]:  # fmt: skip
    """Return (max_num_seqs, max_num_batched_tokens): the values of the flags, else the engine's defaults."""
    seqs, tokens = deployment.max_num_seqs, deployment.max_num_batched_tokens
    default_seqs, default_tokens = engine.default_batch(deployment, memory, version)
    if tokens is None and not engine.chunks_prompts(deployment, version, architecture, max_model_len):
        # Without chunked prefill, vLLM sets max_num_batched_tokens to at least DEFAULT_MAX_NUM_BATCHED_TOKENS
        # (config/scheduler.py).
        tokens = max(max_model_len, 2048)
    if tokens is None:
        tokens = max(default_tokens, seqs or 0)
        tokens = min(tokens, (seqs or default_seqs) * max_model_len)
    if seqs is None:
        seqs = min(default_seqs, tokens)
    if tokens < seqs:
        raise EngineRefusal(
            f"{tokens} is below --max-num-seqs {seqs}: a decode step takes one token of each sequence",
            field="--max-num-batched-tokens",
            hint=f"at least {seqs}",
            cause="batch",
            facts={"tokens": tokens, "seqs": seqs},
        )
    return seqs, tokens


def _device_memory(deployment: Deployment) -> int:
    """Return the device's memory in bytes: --device-memory, else the host's on a CPU, else the local GPU's."""
    if deployment.device_memory is not None:
        return deployment.device_memory
    if deployment.device == "cpu":
        return host_memory()
    gpu = local_gpu()
    if gpu.device == deployment.device:
        return gpu.memory_bytes
    raise DeploymentError(
        f"is required: this machine has no GPU for --device {deployment.device}",
        field="--device-memory",
        hint="for example --device-memory 80GiB, or --gpu h100-80g",
    )
