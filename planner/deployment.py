"""Flags that describe how a model is to be served, all declared as fields of `Deployment`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tonnage.planner.flags import flag
from tonnage.planner.model.dtypes import DTYPE_BYTES
from tonnage.planner.model.tier import disk_tier
from tonnage.planner.units import GiB, MiB

EngineName = Literal["hf", "vllm", "sglang", "llama.cpp"]

_DEVICE, _MODEL = "engine and device", "model"
_CACHE, _EXTRAS = "KV cache and batch", "parallelism and extras"
_MAX_RANKS = 4096

# Short options such as -tp are vLLM's (vllm/engine/arg_utils.py, 0.32).

# Each pair is (other spelling of a flag's value, value). `int4` stands for the format that vLLM and
# compressed-tensors call W4A16. All other pairs differ in a dash, dot or underscore, or abbreviate a dtype.
_ENGINES = (("llamacpp", "llama.cpp"), ("llama_cpp", "llama.cpp"), ("llama-cpp", "llama.cpp"))
_FORMATS = (("int4", "w4a16"), ("nf4_double", "nf4-double"), ("fp4_double", "fp4-double"))
_KV_TYPES = (("half", "float16"), ("fp16", "float16"), ("bf16", "bfloat16"), ("fp32", "float32"))


def _disk_tier(text: str, field: str) -> str:
    """Check that ``text`` is a folder, a comma and a size, such as ``/mnt/kv,100GiB``, and return ``text``."""
    disk_tier(text, field)
    return text


@dataclass(frozen=True, slots=True)
class Deployment:
    """A request to serve a model, with one field per flag, named as vLLM's flags; sizes are in bytes.

    None means that the engine chooses the value. Command-line options, server settings and checks are generated
    from these declarations (`tonnage.planner.flags`).
    """

    engine: EngineName = flag(
        "hf", "engine to plan for (default: hf; vllm with --gpu or --engine-version)", group=_DEVICE,
        # planner/engines/registry.py checks that an engine of this name exists
        metavar="|".join(get_args(EngineName)), spellings=_ENGINES,
    )  # fmt: skip
    engine_version: str | None = flag(
        None, "rules of this version, for example 0.11.0 (default: the installed one, else the newest known)",
        group=_DEVICE, metavar="V",
    )  # fmt: skip
    device: str = flag(
        "cpu", "device the engine runs on (default: cpu, or the GPU's)", group=_DEVICE, choices=("cpu", "cuda")
    )
    gpu: str | None = flag(
        None, "a GPU of the catalogue, or this machine's device", group=_DEVICE, metavar="NAME|cpu|auto"
    )
    device_memory: int | None = flag(
        None, "memory of the device, for example 79.18GiB (default: the device's own)", group=_DEVICE,
        unit="bytes",
    )  # fmt: skip
    device_memory_used: int = flag(
        0, "memory of each device that other processes use already, for example 10GiB (default: none)",
        group=_DEVICE, unit="bytes", least=0, engine="vllm",
    )  # fmt: skip
    num_gpus: int | None = flag(
        None, "GPUs of the machine (default: one per rank)", group=_DEVICE, most=_MAX_RANKS,
        engine="vllm",
    )  # fmt: skip
    gpu_memory_utilization: float | None = flag(
        None, "share of the device's memory to use (default: the engine's own: 0.9, vllm from 0.20 on 0.92)",
        group=_DEVICE, unit="share",
    )  # fmt: skip
    calibration: str | None = flag(
        None, "measurements of this GPU from tonnage fit-log --calibrate", group=_DEVICE, metavar="FILE"
    )
    dtype: str = flag(
        "auto",
        "dtype in which the model is loaded",
        group=_MODEL,
        choices=("auto", *DTYPE_BYTES),
        metavar="DTYPE",
    )
    quantization: str | None = flag(
        None,
        "fp8, int8, int4, nf4, gptq, awq ..., for GGUF q4_k_m ... (default: the checkpoint's)",
        group=_MODEL,
        metavar="METHOD",
        short="-q",
        spellings=_FORMATS,
    )
    kv_cache_dtype: str = flag(
        "auto", "KV cache: float32, float16, bfloat16, fp8, fp8_per_token_head ... (default: the model's)",
        group=_CACHE, metavar="DTYPE", spellings=_KV_TYPES,
    )  # fmt: skip
    mamba_ssm_cache_dtype: str = flag(
        "auto", "recurrent states: float32, float16 or bfloat16 (default: the model's)", group=_CACHE,
        choices=("auto", *DTYPE_BYTES), metavar="DTYPE", engine="vllm",
    )  # fmt: skip
    mamba_cache_mode: str = flag(
        "auto", "states kept for prefix hits: all or align (default: the version's; no effect from 0.33 on)",
        group=_CACHE, choices=("auto", "none", "align", "all"), metavar="MODE", engine="vllm",
    )  # fmt: skip
    runner: str = flag(
        "auto", "pooling: embeddings from a generative model, by vllm (default: the model's own task)",
        group=_MODEL, choices=("auto", "generate", "pooling"),
    )  # fmt: skip
    max_model_len: int | None = flag(
        None, "longest prompt and completion together, in tokens (default: the model's own)", group=_MODEL
    )
    max_num_seqs: int | None = flag(None, "maximum number of running sequences", group=_CACHE)
    max_num_batched_tokens: int | None = flag(None, "maximum number of tokens per step", group=_CACHE)
    block_size: int | None = flag(
        None, "tokens per KV block (default: the engine's own: 16, vllm on cpu 128, sglang 1)", group=_CACHE,
        most=8192,
    )  # fmt: skip
    kv_cache_memory_bytes: int | None = flag(
        None,
        "size of the KV pool, for example 512MiB (default: the remaining memory)",
        group=_CACHE,
        unit="bytes",
    )
    enable_prefix_caching: bool | None = flag(
        None, "reuse blocks of equal prefixes (default: as the engine does)", group=_CACHE
    )
    num_gpu_blocks_override: int | None = flag(
        None, "number of blocks in the pool, regardless of memory", group=_CACHE, engine="vllm"
    )
    limit_mm_per_prompt: str = flag(
        "{}", """most pictures per prompt, for example '{"image": 2, "video": 0}' (default: any number)""",
        group=_CACHE, metavar="JSON", engine="vllm",
    )  # fmt: skip
    mm_processor_kwargs: str = flag(
        "{}", """picture processor options, such as '{"max_pixels": 1003520}' (default: the processor's own)""",
        group=_CACHE, metavar="JSON", engine="vllm",
    )  # fmt: skip
    language_model_only: bool = flag(
        False, "load the language model only, without picture towers", group=_MODEL, engine="vllm"
    )
    skip_mm_profiling: bool = flag(
        False, "skip pictures in the profile run and reserve no memory for them", group=_CACHE,
        engine="vllm",
    )  # fmt: skip
    disable_chunked_mm_input: bool = flag(
        False, "do not split a picture over several steps", group=_CACHE, engine="vllm"
    )
    mm_encoder_tp_mode: str = flag(
        "weights", "divide the tower's weights or the pictures over the ranks", group=_EXTRAS,
        choices=("weights", "data"), engine="vllm",
    )  # fmt: skip
    tensor_parallel_size: int = flag(
        1, "GPUs that each layer is divided over", group=_EXTRAS, most=_MAX_RANKS, short="-tp"
    )
    pipeline_parallel_size: int = flag(
        1, "GPUs that the layers are distributed over", group=_EXTRAS, most=_MAX_RANKS, short="-pp"
    )
    data_parallel_size: int = flag(1, "replicas", group=_EXTRAS, most=_MAX_RANKS, short="-dp")
    enable_expert_parallel: bool = flag(False, "place whole experts on each GPU", group=_EXTRAS, short="-ep")
    decode_context_parallel_size: int = flag(
        1,
        "ranks that divide a sequence's KV cache",
        group=_EXTRAS,
        most=_MAX_RANKS,
        engine="vllm",
        short="-dcp",
    )
    enforce_eager: bool = flag(False, "do not use CUDA graphs", group=_DEVICE)
    cudagraph_capture_sizes: str | None = flag(
        None, "tokens of the captured CUDA graphs, such as 1,2,4,8 (default: up to 512)", group=_DEVICE,
        metavar="SIZES", engine="vllm",
    )  # fmt: skip
    max_cudagraph_capture_size: int | None = flag(
        None, "tokens of the largest captured CUDA graph", group=_DEVICE, engine="vllm"
    )
    cuda_graph_sizes: str | None = flag(
        None, "the same sizes, by the name of vLLM up to 0.12", group=_DEVICE, metavar="SIZES", engine="vllm"
    )
    cpu_offload_bytes: int = flag(
        0, "GiB of weights per GPU kept in host memory (default: none)", group=_EXTRAS, unit="GiB",
        least=0, option="--cpu-offload-gb",
    )  # fmt: skip
    load_format: str = flag(
        "auto", "how weight files are loaded", group=_MODEL,
        choices=("auto", "safetensors", "pt", "dummy"), engine="vllm",
    )  # fmt: skip
    safetensors_load_strategy: str = flag(
        "lazy", "how much of a weight file is in memory while it is read", group=_MODEL,
        choices=("lazy", "eager", "prefetch"), engine="vllm",
    )  # fmt: skip
    mm_processor_cache_bytes: int = flag(
        4 * GiB, "GiB of host memory for processed pictures and sound (default: 4)", group=_EXTRAS,
        unit="GiB", least=0, option="--mm-processor-cache-gb", engine="vllm",
    )  # fmt: skip
    kv_offloading_bytes: int = flag(
        0, "GiB of host memory for offloaded blocks of all GPUs (default: none)", group=_EXTRAS, unit="GiB",
        least=0, option="--kv-offloading-size", engine="hf, vllm",
    )  # fmt: skip
    kv_offloading_disk: str | None = flag(
        None, "folder for offloaded blocks behind the host memory, and its upper bound (default: none)",
        group=_EXTRAS, metavar="DIR,SIZE", engine="hf", needs="kv_offloading_bytes", read=_disk_tier,
    )  # fmt: skip
    kv_offloading_policy: str = flag(
        "learned", "order of eviction in the last tier of offloaded blocks", group=_EXTRAS,
        choices=("learned", "lru"), engine="hf", needs="kv_offloading_bytes",
    )  # fmt: skip
    kv_offloading_backend: str = flag(
        "native", "store of offloaded blocks: vllm's own, or LMCache's server of this size", group=_EXTRAS,
        choices=("native", "lmcache"), engine="vllm", needs="kv_offloading_bytes",
    )  # fmt: skip
    kv_transfer_config: str = flag(
        "{}", """KV connector, for example '{"kv_connector": "OffloadingConnector", ...}'""", group=_EXTRAS,
        metavar="JSON", engine="vllm",
    )  # fmt: skip
    enable_sleep_mode: bool = flag(
        False, "allow sleeping, with the weights in host memory", group=_EXTRAS, engine="vllm"
    )
    flash_attn: str = flag(
        "auto", "compute attention scores in tiles, or store all scores of a step", group=_CACHE,
        choices=("auto", "on", "off"), engine="llama.cpp",
    )  # fmt: skip
    kv_unified: bool = flag(
        False, "all sequences share one context of --max-model-len tokens", group=_CACHE, engine="llama.cpp"
    )
    n_gpu_layers: int | None = flag(
        None, "layers on the GPU: the output layer and the last N - 1 blocks (default: all)", group=_EXTRAS,
        least=2, most=4096, engine="llama.cpp", short="-ngl",
    )  # fmt: skip
    cache_ram_bytes: int = flag(
        8192 * MiB, "MiB of host memory for cached prompts (default: 8192)", group=_EXTRAS, unit="MiB",
        least=0, option="--cache-ram", engine="llama.cpp",
    )  # fmt: skip
    enable_lora: bool = flag(False, "reserve LoRA slots", group=_EXTRAS)
    max_loras: int = flag(1, "LoRA slots", group=_EXTRAS, most=1024, needs="enable_lora")
    # 512 is the largest LoRA rank of vLLM
    max_lora_rank: int = flag(
        16, "rank of each LoRA slot (vllm: 1, 8, 16, 32 ... 512)", group=_EXTRAS, most=512, needs="enable_lora"
    )
    speculative_model: str | None = flag(
        None, "draft model, or mtp for the checkpoint's own layers", group=_EXTRAS, metavar="M"
    )
    num_speculative_tokens: int = flag(
        0, "tokens drafted per step (default: 1 with a draft)", group=_EXTRAS, least=0, most=64,
        needs="speculative_model",
    )  # fmt: skip
    mem_fraction_static: float | None = flag(
        None, "share of memory for weights and pool", group=_DEVICE, unit="share", engine="sglang"
    )
    # ratio of tokens in the sliding-window pool to tokens in the full-attention pool (SGLang, server_args.py)
    swa_full_tokens_ratio: float = flag(
        0.8,
        "tokens of the sliding pool per token of the full pool",
        group=_DEVICE,
        unit="share",
        engine="sglang",
    )
    mamba_full_memory_ratio: float = flag(
        0.9, "bytes of state memory per byte of token memory", group=_DEVICE, unit="share", engine="sglang"
    )
    enable_hierarchical_cache: bool = flag(
        False, "keep blocks in host memory (HiCache)", group=_EXTRAS, engine="sglang"
    )
    hicache_ratio: float | None = flag(
        None, "tokens of HiCache per token of the pool (default: 2)", group=_EXTRAS, engine="sglang",
        needs="enable_hierarchical_cache", metavar="N",
    )  # fmt: skip
    hicache_size: int | None = flag(
        None, "GB (10^9 bytes) of HiCache on each rank, instead of a ratio", group=_EXTRAS, engine="sglang",
        needs="enable_hierarchical_cache",
    )  # fmt: skip
    hicache_mem_layout: str = flag(
        "auto", "order of HiCache's memory (default: the version's)", group=_EXTRAS, engine="sglang",
        choices=("auto", "layer_first", "page_first", "page_first_direct", "page_first_kv_split", "page_head"),
        needs="enable_hierarchical_cache",
    )  # fmt: skip
    hicache_storage_backend: str | None = flag(
        None, "store behind HiCache: file", group=_EXTRAS, engine="sglang", choices=("file",),
        needs="enable_hierarchical_cache",
    )  # fmt: skip


def default_engine(gpu: str | None, engine_version: str | None) -> EngineName:
    """Return the engine to plan for when none is given: vllm with a GPU or an engine version, else hf."""
    return "vllm" if gpu not in (None, "cpu") or engine_version is not None else "hf"
