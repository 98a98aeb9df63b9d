"""Conversion of vLLM's VllmConfig into a `Deployment`, so that the plan uses the flags of the running vLLM.

This module does not import vLLM. It reads a `vllm.config.VllmConfig` (0.30 to 0.33) in which vLLM has already
filled in the defaults. A setting that the planner does not support is rejected by its name in vLLM.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError
from tonnage.planner.units import GiB

# Methods by which vLLM quantizes 16-bit weights while loading -> the planner's name of the resulting format.
_MADE_WHILE_LOADING = {"bitsandbytes": "nf4", "fp8": "fp8"}
# Formats of checkpoints that are already quantized. Their quantization config may be in a file beside
# config.json.
_OF_CHECKPOINTS = ("gguf", "modelopt")
# Speculative decoding methods that have no draft weights (SpeculativeMethod, config/speculative.py).
_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")


@dataclass(frozen=True, slots=True)
class RunningModel:
    """The model that a running vLLM serves, and vLLM's flags as a planner's `Deployment`.

    Attributes:
        model: folder or hub id of the model that vLLM loads.
        name: model name that clients use.
        deployment: vLLM's flags as the planner's `Deployment`.
    """

    model: str
    name: str
    deployment: Deployment


def read_config(config: Any) -> RunningModel:
    """Return the model and the memory-relevant flags that a VllmConfig describes.

    Raises:
        DeploymentError: a setting changes memory use, and the planner does not support it. The error names the
            setting.
    """
    model, cache, parallel, batch = (
        config.model_config, config.cache_config, config.parallel_config, config.scheduler_config,
    )  # fmt: skip
    _refuse_unknown(config)
    device = str(config.device_config.device_type)
    speculative, drafted = _draft(config)
    deployment = Deployment(
        engine="vllm",
        device=device,
        gpu="auto" if device == "cuda" else None,
        gpu_memory_utilization=cache.gpu_memory_utilization,
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=_quantization(model),
        kv_cache_dtype=cache.cache_dtype,
        mamba_ssm_cache_dtype=cache.mamba_ssm_cache_dtype,
        runner=model.runner_type,
        max_model_len=model.max_model_len,
        max_num_seqs=batch.max_num_seqs,
        max_num_batched_tokens=batch.max_num_batched_tokens,
        # None lets the planner derive vLLM's default block size. The block size that vLLM computes for a hybrid
        # model is not a flag.
        block_size=cache.block_size if cache.user_specified_block_size else None,
        kv_cache_memory_bytes=cache.kv_cache_memory_bytes,
        enable_prefix_caching=bool(cache.enable_prefix_caching),
        num_gpu_blocks_override=cache.num_gpu_blocks_override,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
        enable_expert_parallel=parallel.enable_expert_parallel,
        decode_context_parallel_size=parallel.decode_context_parallel_size,
        enforce_eager=bool(model.enforce_eager),
        cpu_offload_bytes=int(config.offload_config.uva.cpu_offload_gb * GiB),
        enable_lora=config.lora_config is not None,
        max_loras=1 if config.lora_config is None else config.lora_config.max_loras,
        max_lora_rank=16 if config.lora_config is None else int(config.lora_config.max_lora_rank),
        limit_mm_per_prompt=_without(model),
        skip_mm_profiling=bool(model.multimodal_config and model.multimodal_config.skip_mm_profiling),
        speculative_model=speculative,
        num_speculative_tokens=drafted,
    )
    return RunningModel(model=str(model.model), name=served_name(config), deployment=deployment)


def served_name(config: Any) -> str:
    """Return the value of the `model_name` label in vLLM's metrics: the first served model name."""
    name = config.model_config.served_model_name
    return str(name[0] if isinstance(name, list) else name or config.model_config.model)


def _quantization(model: Any) -> str | None:
    """Return the name of the method by which vLLM quantizes weights while loading.

    Returns None if the checkpoint's own format is kept.
    """
    method = model.quantization
    if method is None or getattr(model.hf_config, "quantization_config", None) is not None:
        return None
    if method.startswith(_OF_CHECKPOINTS):
        return None
    if method not in _MADE_WHILE_LOADING:
        _refuse("quantization", str(method))
    return _MADE_WHILE_LOADING[method]


def _without(model: Any) -> str:
    """Return the modalities that no prompt may use, as the JSON of `limit_mm_per_prompt` with zeros.

    vLLM does not load the encoders of these modalities. Limits above zero are left out: they hardly change how
    many of the largest images fit in one step, and so hardly change the planned memory.
    """
    found = model.multimodal_config
    names = () if found is None else ("image", "video", "audio")
    return json.dumps({name: 0 for name in names if not found.get_limit_per_prompt(name)})


def _draft(config: Any) -> tuple[str | None, int]:
    """Return `speculative_model` and `num_speculative_tokens` for a `Deployment`, from vLLM's config."""
    draft = config.speculative_config
    if draft is None or draft.method in _WITHOUT_WEIGHTS:
        return None, 0
    if draft.method == "mtp" or str(draft.method).endswith("_mtp"):
        return "mtp", draft.num_speculative_tokens
    if draft.method not in ("draft_model", "eagle", "eagle3") or not draft.model:
        _refuse("speculative_config.method", str(draft.method))
    return str(draft.model), draft.num_speculative_tokens


def _refuse_unknown(config: Any) -> None:
    model, parallel = config.model_config, config.parallel_config
    others = {
        "hf_overrides": model.hf_overrides if not callable(model.hf_overrides) else "a function",
        "hf_config_path": model.hf_config_path,
        "revision": model.revision,
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size - 1,
        "offload_group_size": config.offload_config.prefetch.offload_group_size,
        "kv_cache_dtype_skip_layers": config.cache_config.kv_cache_dtype_skip_layers,
    }
    for name, value in others.items():
        if value:
            _refuse(name, str(value))


def _refuse(name: str, value: str) -> NoReturn:
    raise DeploymentError(f"the planner does not support {value[:120]!r} in this vLLM setting", field=name)
