"""An engine's flags, draft model and GPU type, read from its start-up log; missing flags get assumed values."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import Gpu, catalogue
from tonnage.planner.engines.log import LogFigures
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.errors import DeploymentError
from tonnage.planner.fitlog.read import StartLog
from tonnage.planner.flags import flags_of, given
from tonnage.planner.planning.size import Size
from tonnage.planner.quantization.read import read_quantization
from tonnage.planner.source.resolve import ModelSource
from tonnage.planner.units import GiB, gib

# ASKED lists the flags of `tonnage plan` that `tonnage fit-log` accepts. _LOGGED lists the flags that a
# start-up log may contain.
ASKED = (
    "gpu", "device_memory", "engine_version", "tensor_parallel_size", "gpu_memory_utilization", "dtype",
    "kv_cache_dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_gpus",
    "device_memory_used",
)  # fmt: skip
_LOGGED = (
    "gpu_memory_utilization", "dtype", "kv_cache_dtype", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "block_size", "tensor_parallel_size", "pipeline_parallel_size",
    "data_parallel_size", "decode_context_parallel_size", "enable_expert_parallel", "enforce_eager",
    "enable_prefix_caching", "kv_cache_memory_bytes", "num_gpu_blocks_override", "cpu_offload_bytes",
    "enable_lora", "max_loras", "max_lora_rank", "swa_full_tokens_ratio", "mem_fraction_static",
    "mamba_full_memory_ratio", "limit_mm_per_prompt", "language_model_only", "skip_mm_profiling", "flash_attn",
    "kv_unified",
)  # fmt: skip
# Flags with the largest effect on a plan; they are reported as assumed if neither log nor user gives them.
_ASSUMED = (
    "tensor_parallel_size", "dtype", "kv_cache_dtype", "gpu_memory_utilization", "max_model_len",
    "max_num_seqs", "max_num_batched_tokens",
)  # fmt: skip
# Maximum difference, in bytes, between the memory sizes that drivers report for GPUs of the same type. Observed
# differences are 0.01 GiB.
_SAME_MEMORY = 0.02 * GiB
# Maximum relative difference between a GPU's nominal memory size and the size that its driver reports. Only the
# T4 has a larger difference (NOMINAL_RESERVE).
_NOMINAL = 0.02
UNKNOWN_MEMORY = 1 << 50  # bytes that a plan assumes for a device whose memory is unknown


def deployment_of(found: StartLog | LogFigures, args: argparse.Namespace) -> Deployment:
    """Return the deployment that a start-up log describes: the log's flags, completed by the user's options."""
    asked = given(args, Deployment)
    if "gpu" not in asked and "device_bytes" in found.figures:
        asked.setdefault("device_memory", int(found.figures["device_bytes"]))
    if found.version is not None:
        asked.setdefault("engine_version", found.version)
    said = _logged_flags(found)
    device = found.flags.get("device", "cuda")
    engine = {"engine": found.engine or "vllm", "device": device if device == "cpu" else "cuda"}
    flags = Deployment(**{**engine, **asked, **said})
    # With `sized_by_context`, an engine sizes its KV pool by the context length, not by the device's memory.
    if engine_of(flags.engine).sized_by_context:
        if flags.max_model_len is None:
            raise DeploymentError(
                "the log has neither n_ctx nor the number of cache cells",
                field="n_ctx",
                hint="give the whole start-up log, or --max-model-len",
            )
        return replace(flags, device_memory=flags.device_memory or UNKNOWN_MEMORY)
    return flags


def _logged_flags(found: StartLog | LogFigures) -> dict[str, Any]:
    """Return the engine flags that a start-up log contains."""
    said = {name: value for name in _LOGGED if (value := _logged(name, found.flags)) is not None}
    if length := found.figures.get("max_model_len"):
        said["max_model_len"] = int(length)
    return said


def option_notes(found: StartLog, args: argparse.Namespace) -> Iterator[str]:
    """Yield a note for each command-line option that contradicts a flag in the start-up log.

    The value `auto` contradicts nothing.
    """
    asked, said = given(args, Deployment), _logged_flags(found)
    for name in asked:
        if name in said and asked[name] not in ("auto", said[name]):
            yield f"{flags_of(Deployment)[name].option} {asked[name]} is not used: the log says {said[name]}"
    version = asked.get("engine_version")
    if found.version is not None and version not in (None, found.version):
        yield f"planned for version {version} (--engine-version); the log is of {found.version}"


def _logged(name: str, said: Mapping[str, str]) -> Any:
    """Return the parsed value of the flag `name` in a log's flags `said`; None if absent or invalid."""
    flag = flags_of(Deployment)[name]
    text = said.get(flag.option.removeprefix("--").replace("-", "_"))
    if text is None or text in ("None", "null"):
        return None
    if flag.kind == "bool":
        return text in ("True", "true")
    try:
        return flag.read(text)
    except DeploymentError:
        return None


def with_format(flags: Deployment, found: StartLog, source: ModelSource) -> tuple[Deployment, list[str]]:
    """Return the flags with the quantization that the engine applied while loading, and notes on it.

    The flags are unchanged if the checkpoint itself is quantized, because its config then states the format.
    """
    logged = found.flags.get("quantization")
    made = {"bitsandbytes": "nf4"}.get(logged or "", logged)
    stored = read_quantization(source.config, None).scheme
    if made not in engine_of(flags.engine).quantizes_to or stored != "none":
        return flags, []
    return replace(flags, quantization=made), [f"its weights were quantized to {logged} while loading"]


def draft(found: StartLog) -> tuple[str, int] | None:
    """Return (draft model, draft tokens per step) in a start-up log, None without speculative decoding."""
    text = found.flags.get("speculative_config", "")
    method = re.search(r"'?method'?[:=]\s*'(\w+)'", text)
    tokens = re.search(r"'?num_spec(?:ulative)?_tokens'?[:=]\s*(\d+)", text)
    model = re.search(r"'?model'?[:=]\s*'([^']+)'", text)
    if tokens is None or not (method or model):
        return None
    if method and "mtp" in method[1]:
        return "mtp", int(tokens[1])
    return (model[1], int(tokens[1])) if model else None


def assumed(found: StartLog, args: argparse.Namespace, size: Size) -> tuple[str, ...]:
    """Return the flags that neither the log nor the user gave, each as text with the assumed value."""
    asked, flags = given(args, Deployment), size.chosen.flags
    out = []
    if engine_of(flags.engine).sized_by_context:
        return ()
    if found.version is None and "engine_version" not in asked and flags.engine_version not in (None, "none"):
        out.append(f"version {flags.engine_version}")
    for name in _ASSUMED:
        known = name in asked or _logged(name, found.flags) is not None or name in found.figures
        if not known:
            value = getattr(flags, name)
            shown = f"{value:,}" if isinstance(value, int) else value
            out.append(f"{flags_of(Deployment)[name].option} {shown}")
    return tuple(out)


def infer_gpu(device_bytes: float) -> tuple[list[Gpu], list[Gpu]]:
    """Return the GPU types that have `device_bytes` of memory (a log's figure), and those that may have it.

    The first list is empty if no GPU type has this memory, or if the plan would differ between the types that
    have it. It has several types only if the plan is the same for all of them. Memory sizes that a driver
    reported are compared more strictly than nominal sizes.
    """
    gpus = [gpu for gpu in catalogue() if gpu.device == "cuda"]

    def distance(gpu: Gpu) -> float:
        return abs(gpu.memory_bytes - device_bytes)

    exact = [gpu for gpu in gpus if gpu.basis == "reported" and distance(gpu) < _SAME_MEMORY]
    near = sorted((gpu for gpu in gpus if distance(gpu) < _NOMINAL * device_bytes), key=distance)
    found = exact or near
    alike = len({(gpu.vendor, gpu.capability) for gpu in found}) == 1
    if not exact and alike:
        found = found[:1]
    # The SXM and PCIe versions of a GPU have the same memory size. The SXM version is preferred, because more
    # servers have it.
    found = sorted(found, key=lambda gpu: "pcie" in gpu.name)
    return (found if alike else []), near


def with_gpu(
    flags: Deployment, found: StartLog, args: argparse.Namespace
) -> tuple[Deployment, tuple[str, ...], str]:
    """Find the GPU type by the memory size in a start-up log, if neither --gpu nor --device-memory is given.

    Returns:
        (flags, assumed, hint): the flags with the GPU type, or without a memory size if the type is not clear;
            a text on the assumed type, if there is one; and the text that asks for --gpu.
    """
    size = found.figures.get("device_bytes")
    given = args.gpu is not None or args.device_memory is not None or flags.device == "cpu"
    if size is None or given or engine_of(flags.engine).sized_by_context:
        return flags, (), "--gpu"
    alike, candidates = infer_gpu(size)
    total = gib(int(size))
    if alike:
        others = f"; {alike[1].name} has as much" if len(alike) > 1 else ""
        name = alike[0].name
        return replace(flags, gpu=name), (f"--gpu {name} (the log's total is {total}{others})",), "--gpu"
    may = f"may be {' or '.join(gpu.name for gpu in candidates)}"
    hint = f"--gpu; the log's total of {total} {may if candidates else 'is that of no GPU in the catalogue'}"
    return replace(flags, device_memory=None), (), hint
