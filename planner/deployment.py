"""Flags -> a complete Deployment: every None replaced by the value chosen, or refused by name."""

from __future__ import annotations

from tonnage.planner.architecture import Architecture
from tonnage.planner.dtypes import HF_KV_DTYPE_BYTES, KV_DTYPE_BYTES, check_dtype
from tonnage.planner.engines.version import Version, parse_version
from tonnage.planner.errors import DeploymentError
from tonnage.planner.host import cpu_features_of, host_memory
from tonnage.planner.plans import Deployment
from tonnage.planner.records import dataclass, replace
from tonnage.planner.units import GiB
from tonnage.planner.versions import engine_version

ENGINES = ("hf", "vllm", "sglang", "llama.cpp")
NEWEST = {"hf": (0, 0, 0), "vllm": (0, 32, 0), "sglang": (0, 5, 0), "llama.cpp": (0, 0, 0)}
"""Whose rules are followed when neither a flag nor an installed package says a version."""
# The oldest rules: vLLM's oldest start-up log in tests/data/field_reports.jsonl; SGLang's mem_fraction_static
# was read in 0.4.
_OLDEST = {"vllm": (0, 5, 4), "sglang": (0, 4, 0)}

# vLLM's API server (engine/arg_utils.py 0.32.0, get_batch_defaults): device memory from which so many
# sequences and tokens are the default. A100s keep the small ones.
_LARGE_DEVICE, _LARGE = 70 * GiB, (1024, 8192)
_HUGE_DEVICE, _HUGE = 160 * GiB, (1024, 16384)
_HUGE_SINCE = (0, 14, 0)  # 0.9.2 to 0.13 gave an MI300X (192 GiB) the 70 GiB defaults
_LARGE_SINCE = (0, 8, 3)  # pull request 17885 and before: 256 and 2,048 for all in 0.7
# (engine, device) -> (max_num_seqs, max_num_batched_tokens). vLLM on a CPU: its defaults for AsyncLLM
# (config/scheduler.py 0.32.0). sglang: max_running_requests and chunked_prefill_size of its server
# (server_args.py 0.5). llama.cpp: n_parallel 1, n_ubatch 512 (common/common.h, 2025).
_BATCH_DEFAULTS = {
    ("hf", "cpu"): (64, 512),
    ("hf", "cuda"): (64, 2048),
    ("vllm", "cpu"): (128, 2048),
    ("vllm", "cuda"): (256, 2048),
    ("sglang", "cpu"): (256, 2048),
    ("sglang", "cuda"): (256, 2048),
    ("llama.cpp", "cpu"): (1, 512),
    ("llama.cpp", "cuda"): (1, 512),
}
# --gpu-memory-utilization when it is not given: vLLM subtracts CUDA graphs from 0.21 on (pull request 38284).
_UTILIZATION, _UTILIZATION_WITH_GRAPHS, _WITH_GRAPHS_SINCE = 0.9, 0.92, (0, 21, 0)
# vLLM: 128 on cpu (platforms/cpu.py), 16 on GPUs (config/cache.py). sglang: page_size 1. llama.cpp: one cell.
_BLOCK_DEFAULTS = {
    ("hf", "cpu"): 16,
    ("hf", "cuda"): 16,
    ("vllm", "cpu"): 128,
    ("vllm", "cuda"): 16,
    ("sglang", "cpu"): 1,
    ("sglang", "cuda"): 1,
    ("llama.cpp", "cpu"): 1,
    ("llama.cpp", "cuda"): 1,
}
_MEM_FRACTION = 0.88  # SGLang's mem_fraction_static on one GPU (server_args.py, 0.4)
_MAX_BLOCK_SIZE = 8192
_MAX_COUNT = 1 << 31
_MAX_BYTES = 1 << 60  # one EiB
_MAX_RANKS = 4096

# GPUs of compute capability 7: vLLM refuses bfloat16 on them and takes float16 (platforms/cuda.py
# supported_dtypes, config/model.py _resolve_auto_dtype, 0.32.0)
_NO_BFLOAT16 = ("t4-", "v100-")
# vLLM refuses float16 for these (_FLOAT16_NOT_SUPPORTED_MODELS, vllm/config/model.py 0.32.0)
_NO_FLOAT16 = ("gemma2", "gemma3_text")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A Deployment without open questions: ``flags`` for the Plan, and its integers without None."""

    flags: Deployment
    version: Version
    device_memory: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    utilization: float
    given_block_size: int | None = None

    @property
    def limit(self) -> int:
        """Bytes the plan may take: the whole device when the pool's size is given (as in vLLM), else
        device memory x gpu_memory_utilization."""
        if self.flags.kv_cache_memory_bytes is not None or self.flags.engine == "llama.cpp":
            return self.device_memory
        if self.flags.engine == "sglang":
            return self.device_memory
        return int(self.device_memory * self.utilization)


def complete(deployment: Deployment, architecture: Architecture, dtype: str) -> Resolved:
    """Check every flag against the model and the others and fill in what was left open.

    ``dtype``: what ``auto`` means for this checkpoint. Raises DeploymentError naming flag and value.
    """
    if deployment.engine not in ENGINES:
        raise DeploymentError(f"{deployment.engine!r} is not one of {', '.join(ENGINES)}", field="--engine")
    deployment = _with_gpu(deployment)
    if deployment.device not in ("cpu", "cuda"):
        raise DeploymentError(f"{deployment.device!r} is not cpu or cuda", field="--device")
    version, name = _version(deployment)
    memory = _device_memory(deployment)
    max_model_len = _model_len(deployment, architecture)
    seqs, tokens = _batch(deployment, max_model_len, memory, version)
    if takes_whole_prompts(deployment, architecture):
        deployment, tokens = replace(deployment, enable_prefix_caching=False), max(max_model_len, 2048)
    if architecture.kind == "encoder":
        from tonnage.planner.engines.encoder import whole_texts

        deployment, tokens = whole_texts(deployment, max_model_len, tokens)
    chosen = _dtype(deployment, architecture, dtype)
    block_size = _block_size(deployment, any(layer.kind == "mla" for layer in architecture.cache_layers))
    share = _utilization(deployment, version)
    flags = replace(
        deployment,
        engine_version=name,
        device_memory=memory,
        gpu_memory_utilization=share,
        dtype=chosen,
        kv_cache_dtype=_kv_dtype(deployment, chosen),
        max_model_len=max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        block_size=block_size,
        mem_fraction_static=_static_share(deployment),
        enable_prefix_caching=_caching(deployment, architecture, version),
        kv_cache_memory_bytes=_positive(
            deployment.kv_cache_memory_bytes, "--kv-cache-memory-bytes", limit=_MAX_BYTES
        ),
    )
    _check_numbers(flags)
    if flags.enable_expert_parallel and not architecture.experts:
        raise DeploymentError(f"{architecture.class_name} has no experts", field="--enable-expert-parallel")
    given = deployment.block_size
    return Resolved(flags, version, memory, max_model_len, seqs, tokens, block_size, share, given)


def takes_whole_prompts(deployment: Deployment, architecture: Architecture) -> bool:
    """Latent attention on a CPU without AMX: vLLM turns chunked prefill and prefix caching off and lets a step
    take max(max_model_len, 2048) tokens, whatever was asked (platforms/cpu.py 0.32.0)."""
    from tonnage.planner.engines.vllm import EXPANDED_MLA

    return (
        deployment.engine == "vllm"
        and deployment.device == "cpu"
        and any(layer.kind == "mla" for layer in architecture.cache_layers)
        and architecture.model_type not in EXPANDED_MLA
        and "amx_tile" not in cpu_features_of(deployment.device, deployment.gpu)
    )


def _positive(value: int | None, flag: str, limit: int = _MAX_COUNT) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit):
        raise DeploymentError(f"{value!r} is not an integer from 1 to {limit}", field=flag)
    return value


def _check_numbers(flags: Deployment) -> None:
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
                 "decode_context_parallel_size"):  # fmt: skip
        _positive(getattr(flags, name), "--" + name.replace("_", "-"), _MAX_RANKS)
    _positive(flags.num_gpu_blocks_override, "--num-gpu-blocks-override")
    _positive(flags.max_loras, "--max-loras", 1024)
    _check_lora_rank(flags)
    for value, flag, most in (
        (flags.num_speculative_tokens, "--num-speculative-tokens", 64),
        (flags.cpu_offload_bytes, "--cpu-offload-gb", _MAX_BYTES),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise DeploymentError(f"{value!r} is not from 0 to {most}", field=flag)
    if flags.mem_fraction_static is not None:
        _share(flags.mem_fraction_static, "--mem-fraction-static")
    _share(flags.swa_full_tokens_ratio, "--swa-full-tokens-ratio")
    if flags.engine == "hf" and flags.tensor_parallel_size * flags.pipeline_parallel_size > 1:
        raise DeploymentError(
            "the hf engine runs on one device", field="--tensor-parallel-size", hint="use --engine vllm"
        )
    if flags.tensor_parallel_size % flags.decode_context_parallel_size:
        raise DeploymentError(
            f"{flags.decode_context_parallel_size} does not divide --tensor-parallel-size "
            f"{flags.tensor_parallel_size}",
            field="--decode-context-parallel-size",
        )


def _check_lora_rank(flags: Deployment) -> None:
    """vLLM takes a few ranks; SGLang (its --max-lora-rank) and llama.cpp (the adapter's own) any
    up to its largest, beyond which nothing is known to be served."""
    from tonnage.planner.engines.vllm import LORA_RANKS

    _positive(flags.max_lora_rank, "--max-lora-rank", LORA_RANKS[-1])
    if flags.engine == "vllm" and flags.max_lora_rank not in LORA_RANKS:
        raise DeploymentError(
            f"vLLM has no slots of rank {flags.max_lora_rank}",
            field="--max-lora-rank",
            hint=f"one of {', '.join(map(str, LORA_RANKS))}; an adapter of a smaller rank fits",
        )


def _with_gpu(deployment: Deployment) -> Deployment:
    """``--gpu NAME`` means a CUDA device of that memory, unless --device-memory says another figure."""
    if deployment.gpu is None:
        return deployment
    from tonnage.planner.gpus import find_gpu

    gpu = find_gpu(deployment.gpu)
    memory = gpu.memory_bytes if deployment.device_memory is None else deployment.device_memory
    return replace(deployment, gpu=gpu.name, device=gpu.device, device_memory=memory)


def _version(deployment: Deployment) -> tuple[Version, str]:
    """Version whose rules apply: the flag's, the installed one's, or the newest known."""
    given = deployment.engine_version
    if given is not None:
        version = parse_version(given)
        if not any(version):
            raise DeploymentError(
                f"{given!r} is no release", field="--engine-version", hint="for example 0.11.0"
            )
        return version, given
    newest = NEWEST[deployment.engine]
    found = engine_version(deployment.engine) if deployment.engine in ("hf", "vllm") else None
    if found is not None:
        try:
            return _version(replace(deployment, engine_version=found))
        except DeploymentError:  # a source build may call itself anything
            pass
    return newest, _text(newest) if any(newest) else "none"


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def version_notes(asked: Deployment, chosen: Resolved) -> tuple[str, ...]:
    """Says it where the rules of the very version are not known, or where no rule depends on it."""
    engine, version, name = chosen.flags.engine, chosen.version, chosen.flags.engine_version
    newest = NEWEST[engine]
    if not any(newest):
        return (f"no rule of {engine} depends on --engine-version",) if asked.engine_version else ()
    if version[:2] > newest[:2]:  # patch releases follow the rules of their minor release
        return (f"{engine} {name} is newer than what is known here: the rules of {_text(newest)} are used",)
    oldest = _OLDEST[engine]
    if version < oldest:
        return (f"{engine} {name} is older than what is known here: the rules of {_text(oldest)} are used",)
    return ()


def _model_len(deployment: Deployment, architecture: Architecture) -> int:
    asked = _positive(deployment.max_model_len, "--max-model-len")
    if asked is not None and asked > architecture.max_model_len:
        raise DeploymentError(
            f"{asked} is above the model's own {architecture.max_model_len} ({architecture.position_field})",
            field="--max-model-len",
            hint=f"at most {architecture.max_model_len}",
        )
    return asked or architecture.max_model_len


def _batch_defaults(deployment: Deployment, memory: int, version: Version) -> tuple[int, int]:
    if deployment.engine == "vllm" and deployment.device == "cuda" and version >= _LARGE_SINCE:
        if memory >= _HUGE_DEVICE and version >= _HUGE_SINCE:
            return _HUGE
        if (
            memory >= _LARGE_DEVICE
            and "a100" not in (deployment.gpu or "")
            and not _old_rocm(deployment, version)
        ):
            return _LARGE
    return _BATCH_DEFAULTS[deployment.engine, deployment.device]


def _old_rocm(deployment: Deployment, version: Version) -> bool:
    """vLLM before 0.10 ran AMD GPUs on its V0 engine, without chunked prefill: a step is a whole prompt
    (reports of 0.9.2 on an MI300X in tests/data/field_reports.jsonl)."""
    return version < (0, 10, 0) and (deployment.gpu or "").startswith("mi")


def _batch(deployment: Deployment, max_model_len: int, memory: int, version: Version) -> tuple[int, int]:
    seqs = _positive(deployment.max_num_seqs, "--max-num-seqs")
    tokens = _positive(deployment.max_num_batched_tokens, "--max-num-batched-tokens")
    default_seqs, default_tokens = _batch_defaults(deployment, memory, version)
    if tokens is None and deployment.engine == "vllm" and _old_rocm(deployment, version):
        tokens = max(max_model_len, 2048)
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


def _caching(deployment: Deployment, architecture: Architecture, version: Version) -> bool:
    """Prefix caching: on, but for hybrids with recurrent state in vLLM only from the version that made it
    the default (engines/vllm.py)."""
    if deployment.enable_prefix_caching is not None:
        return deployment.enable_prefix_caching
    if deployment.engine == "vllm" and any(layer.kind == "state" for layer in architecture.cache_layers):
        from tonnage.planner.engines.vllm import rules

        return rules(version).hybrid_prefix_caching
    return True


def _utilization(deployment: Deployment, version: Version) -> float:
    if deployment.gpu_memory_utilization is not None:
        return _share(deployment.gpu_memory_utilization, "--gpu-memory-utilization")
    graphs = deployment.engine == "vllm" and version >= _WITH_GRAPHS_SINCE
    return _UTILIZATION_WITH_GRAPHS if graphs else _UTILIZATION


def _dtype(deployment: Deployment, architecture: Architecture, auto: str) -> str:
    check_dtype(deployment.dtype)
    chosen = deployment.dtype
    if deployment.engine == "vllm" and (deployment.gpu or "").startswith(_NO_BFLOAT16):
        if chosen == "bfloat16":
            raise DeploymentError(
                f"vLLM refuses bfloat16 on {deployment.gpu}", field="--dtype", hint="leave it out, or float16"
            )
        if chosen == "auto":
            return "float32" if architecture.model_type in _NO_FLOAT16 else "float16"
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
    if deployment.engine == "llama.cpp":
        from tonnage.planner.engines.llama_cpp import check_cache_types

        return check_cache_types(asked)
    if asked == "auto":
        return dtype
    known = HF_KV_DTYPE_BYTES if deployment.engine == "hf" else KV_DTYPE_BYTES
    if asked not in known:
        raise DeploymentError(f"{asked!r} is not one of auto, {', '.join(known)}", field="--kv-cache-dtype")
    if deployment.engine != "hf" and asked == "float32" and dtype != "float32":
        raise DeploymentError("vLLM has no float32 KV cache for a 16-bit model", field="--kv-cache-dtype")
    return asked


def _static_share(deployment: Deployment) -> float | None:
    if deployment.engine != "sglang":
        return None
    return _MEM_FRACTION if deployment.mem_fraction_static is None else deployment.mem_fraction_static


def _share(value: float, flag: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise DeploymentError(f"{value!r} is not in (0, 1]", field=flag)
    return float(value)


def _device_memory(deployment: Deployment) -> int:
    asked = _positive(deployment.device_memory, "--device-memory", limit=_MAX_BYTES)
    if asked is not None:
        return asked
    if deployment.device == "cpu":
        return host_memory()
    raise DeploymentError(
        "needed for a GPU that is not here",
        field="--device-memory",
        hint="for example --device-memory 80GiB, or --gpu h100-80g",
    )


def _block_size(deployment: Deployment, mla: bool) -> int:
    engine, device = deployment.engine, deployment.device
    asked = _positive(deployment.block_size, "--block-size", limit=_MAX_BLOCK_SIZE)
    size = asked or _BLOCK_DEFAULTS[engine, device]
    if engine == "hf" and size & (size - 1):
        raise DeploymentError(f"{size} is not a power of two", field="--block-size", hint="for example 16")
    # supported kernel block sizes (v1/attention/backends/cpu_attn.py; 16 is its MLA kernel's)
    step = 32 if device == "cpu" and not mla else 16
    if engine == "vllm" and size % step:
        raise DeploymentError(
            f"{size} is not a multiple of {step}", field="--block-size", hint="for example 128"
        )
    return size
