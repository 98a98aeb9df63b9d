"""Flags -> a complete Deployment: every None replaced by the value chosen, or refused by name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tonnage.planner.architecture import Architecture
from tonnage.planner.dtypes import KV_DTYPE_BYTES, check_dtype
from tonnage.planner.errors import DeploymentError
from tonnage.planner.host import host_memory
from tonnage.planner.plan import Deployment

# (engine, device) -> (max_num_seqs, max_num_batched_tokens). vLLM: its defaults for AsyncLLM on a CPU
# (config/scheduler.py 0.32.0) and for its API server on a GPU below 70 GiB (engine/arg_utils.py).
_BATCH_DEFAULTS = {
    ("hf", "cpu"): (64, 512),
    ("hf", "cuda"): (64, 2048),
    ("vllm", "cpu"): (128, 2048),
    ("vllm", "cuda"): (256, 2048),
}
# vLLM: 128 on cpu (platforms/cpu.py), 16 on GPUs (config/cache.py)
_BLOCK_DEFAULTS = {("hf", "cpu"): 16, ("hf", "cuda"): 16, ("vllm", "cpu"): 128, ("vllm", "cuda"): 16}
_MAX_BLOCK_SIZE = 4096
_MAX_COUNT = 1 << 31
_MAX_BYTES = 1 << 60  # one EiB

# vLLM refuses float16 for these (_FLOAT16_NOT_SUPPORTED_MODELS, vllm/config/model.py 0.32.0)
_NO_FLOAT16 = ("gemma2", "gemma3_text")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A Deployment without open questions: ``flags`` for the Plan, and its integers without None."""

    flags: Deployment
    device_memory: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int

    @property
    def limit(self) -> int:
        """Bytes the plan may take: the whole device when the pool's size is given (as in vLLM), else
        device memory x gpu_memory_utilization."""
        if self.flags.kv_cache_memory_bytes is not None:
            return self.device_memory
        return int(self.device_memory * self.flags.gpu_memory_utilization)


def complete(deployment: Deployment, architecture: Architecture, dtype: str) -> Resolved:
    """Check every flag against the model and the others and fill in what was left open.

    ``dtype``: what ``auto`` means for this checkpoint. Raises DeploymentError naming flag and value.
    """
    engine, device = deployment.engine, deployment.device
    if engine not in ("hf", "vllm"):
        raise DeploymentError(f"{engine!r} is not hf or vllm", field="--engine")
    if device not in ("cpu", "cuda"):
        raise DeploymentError(f"{device!r} is not cpu or cuda", field="--device")
    max_model_len = _model_len(deployment, architecture)
    seqs, tokens = _batch(deployment, max_model_len)
    chosen = _dtype(deployment, architecture, dtype)
    memory, block_size = _device_memory(deployment), _block_size(deployment)
    flags = replace(
        deployment,
        device_memory=memory,
        gpu_memory_utilization=_utilization(deployment.gpu_memory_utilization),
        dtype=chosen,
        kv_cache_dtype=_kv_dtype(deployment, chosen),
        max_model_len=max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        block_size=block_size,
        kv_cache_memory_bytes=_positive(
            deployment.kv_cache_memory_bytes, "--kv-cache-memory-bytes", limit=_MAX_BYTES
        ),
    )
    return Resolved(flags, memory, max_model_len, seqs, tokens, block_size)


def _positive(value: int | None, flag: str, limit: int = _MAX_COUNT) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit):
        raise DeploymentError(f"{value!r} is not an integer from 1 to {limit}", field=flag)
    return value


def _model_len(deployment: Deployment, architecture: Architecture) -> int:
    asked = _positive(deployment.max_model_len, "--max-model-len")
    if asked is not None and asked > architecture.max_model_len:
        raise DeploymentError(
            f"{asked} is above the model's own {architecture.max_model_len} ({architecture.position_field})",
            field="--max-model-len",
            hint=f"at most {architecture.max_model_len}",
        )
    return asked or architecture.max_model_len


def _batch(deployment: Deployment, max_model_len: int) -> tuple[int, int]:
    seqs = _positive(deployment.max_num_seqs, "--max-num-seqs")
    tokens = _positive(deployment.max_num_batched_tokens, "--max-num-batched-tokens")
    default_seqs, default_tokens = _BATCH_DEFAULTS[deployment.engine, deployment.device]
    if tokens is None:
        tokens = max(default_tokens, seqs or 0)
        tokens = min(tokens, (seqs or default_seqs) * max_model_len)
    if seqs is None:
        seqs = min(default_seqs, tokens)
    if tokens < seqs:
        raise DeploymentError(
            f"{tokens} is below --max-num-seqs {seqs}: a decode step takes one token of each sequence",
            field="--max-num-batched-tokens",
        )
    return seqs, tokens


def _dtype(deployment: Deployment, architecture: Architecture, auto: str) -> str:
    check_dtype(deployment.dtype)
    chosen = deployment.dtype
    if deployment.engine == "vllm":
        if chosen == "auto":
            # vLLM loads float32 checkpoints in bfloat16 (_resolve_auto_dtype)
            chosen = "bfloat16" if auto == "float32" else auto
            if chosen == "float16" and architecture.model_type in _NO_FLOAT16:
                chosen = "bfloat16"
        elif chosen == "float16" and architecture.model_type in _NO_FLOAT16:
            raise DeploymentError(
                f"vLLM refuses float16 for {architecture.model_type}", field="--dtype", hint="use bfloat16"
            )
    return auto if chosen == "auto" else chosen


def _kv_dtype(deployment: Deployment, dtype: str) -> str:
    asked = deployment.kv_cache_dtype
    if asked == "auto":
        return dtype
    if asked not in KV_DTYPE_BYTES:
        raise DeploymentError(
            f"{asked!r} is not one of auto, {', '.join(KV_DTYPE_BYTES)}", field="--kv-cache-dtype"
        )
    if deployment.engine == "hf" and asked != dtype:
        raise DeploymentError(
            f"{asked} differs from the model's {dtype}; the hf engine stores K and V as computed",
            field="--kv-cache-dtype",
            hint="use auto",
        )
    if asked == "float32" and dtype != "float32":
        raise DeploymentError("vLLM has no float32 KV cache for a 16-bit model", field="--kv-cache-dtype")
    return asked


def _utilization(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise DeploymentError(f"{value!r} is not in (0, 1]", field="--gpu-memory-utilization")
    return float(value)


def _device_memory(deployment: Deployment) -> int:
    asked = _positive(deployment.device_memory, "--device-memory", limit=_MAX_BYTES)
    if asked is not None:
        return asked
    if deployment.device == "cpu":
        return host_memory()
    raise DeploymentError(
        "needed for a GPU that is not here", field="--device-memory", hint="for example --device-memory 80GiB"
    )


def _block_size(deployment: Deployment) -> int:
    engine, device = deployment.engine, deployment.device
    asked = _positive(deployment.block_size, "--block-size", limit=_MAX_BLOCK_SIZE)
    size = asked or _BLOCK_DEFAULTS[engine, device]
    if engine == "hf" and size & (size - 1):
        raise DeploymentError(f"{size} is not a power of two", field="--block-size", hint="for example 16")
    step = 32 if device == "cpu" else 16  # supported kernel block sizes (v1/attention/backends/cpu_attn.py)
    if engine == "vllm" and size % step:
        raise DeploymentError(
            f"{size} is not a multiple of {step}", field="--block-size", hint="for example 128"
        )
    return size
